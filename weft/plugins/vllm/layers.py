# SPDX-License-Identifier: Apache-2.0
"""The classes that are used in the place of vLLM's. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEKernelModularImpl,
    FusedMoEPrepareAndFinalizeModular,
)
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod

from weft.errors import InvalidArgument
from weft.plugins.vllm import engine
from weft.plugins.vllm.weights import EXCHANGE, check_arithmetic
from weft.plugins.weights import refusal
from weft.shape import FP8_BLOCK


class Wefted:
    """Before a class of vLLM's layers of routed experts, whose method is then weft's."""

    def __init__(self, layer_name: str, *args: Any, **given: Any) -> None:
        if "expert_substitution" in given:  # its router's ids repeat expert 0 with weight 0
            raise InvalidArgument(
                f"weft cannot serve the experts of {layer_name}: the checkpoint replaces some by "
                "constants (approximate_experts or expert_substitution in config.json), and vLLM "
                "serves those on ranks that have all experts: unset WEFT_VLLM"
            )
        super().__init__(layer_name, *args, **given)  # type: ignore[call-arg]

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        form = engine.check_layer(moe_config.moe_parallel_config)
        if form == "block" and type(quant_config) is GptOssMxfp4Config:
            found = _of_gpt_oss(moe_config)
        else:
            method = super()._get_quant_method(prefix, quant_config, moe_config)  # type: ignore[misc]
            if form == "exchange":
                return _become(method, Exchanged)
            if type(method) not in (UnquantizedFusedMoEMethod, Fp8MoEMethod):
                have = f"their method is {type(method).__name__}, served are "
                served = "UnquantizedFusedMoEMethod, Fp8MoEMethod and GptOssMxfp4MoEMethod"
                raise refusal(prefix, "block", have + served, EXCHANGE)
            found = _become(method, WholeBlock)
        check_arithmetic(self)
        return found


class WeftRoutedExperts(Wefted, RoutedExperts):  # type: ignore[misc]  # vLLM is not type-checked
    """vLLM's layer of routed experts, whose method is weft's."""


def _of_gpt_oss(moe_config: Any) -> Any:
    """The method of GPT-OSS's MXFP4, which loads weights and has chosen no kernel of vLLM's.

    Its own constructor chooses one, and raises where there is none, as on CPUs without AMX.
    """
    kind = type(GptOssMxfp4MoEMethod.__name__, (WholeBlock, GptOssMxfp4MoEMethod), {})
    found: Any = object.__new__(kind)
    FusedMoEMethodBase.__init__(found, moe_config)
    found.weight_dtype, found.mxfp4_backend = "gpt_oss_mxfp4", Mxfp4MoeBackend.NONE
    return found


def _become(method: Any, kind: type) -> Any:
    """The method, by a class with `kind` first. Its name stays: loaders tell methods by it."""
    found: Any = object.__new__(type(type(method).__name__, (kind, type(method)), {}))
    found.__dict__ = method.__dict__  # one state: the method may have bound its own functions
    return found


class WholeBlock:
    """Before the class of a method of vLLM's, which then only loads the weights."""

    supports_internal_mk = True  # the runner gathers no tokens
    is_monolithic = False
    mk_can_overlap_shared_experts = False
    topk_indices_dtype = torch.int32

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        """The model's own sizes: no kernel of vLLM's runs."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """None of vLLM's kernels reads it, and some are made of weights in another layout."""
        return FusedMoEQuantConfig.make()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Build: vLLM measures the memory that is left when all layers have done so."""
        engine.load_block(layer)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[tokens, hidden]` of this rank -> the same; vLLM itself adds the shared expert."""
        return engine.run_block(layer, x, topk_weights, topk_ids)


class Exchanged:
    """Before the class of any method of vLLM's whose kernel is modular."""

    supports_internal_mk = True

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put weft's all-to-all around the experts that vLLM has chosen."""
        super().process_weights_after_loading(layer)  # type: ignore[misc]
        kernel = getattr(self, "moe_kernel", None)
        impl = getattr(kernel, "impl", None)
        if not isinstance(impl, FusedMoEKernelModularImpl):
            have = "none" if impl is None else type(impl).__name__
            raise refusal(
                layer.layer_name,
                "exchange",
                f"{type(self).__name__} has no modular kernel there, but {have}, which sends "
                "tokens by itself or routes: take another --moe-backend (triton), or "
                "WEFT_VLLM=block",
            )
        if not isinstance(impl.prepare_finalize, PrepareFinalize):
            impl.prepare_finalize = PrepareFinalize(layer, impl.fused_experts)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As many rounds of vLLM's kernel as the busiest rank needs."""
        around = self.moe_kernel.impl.prepare_finalize  # type: ignore[attr-defined]
        parallel = layer.moe_config.moe_parallel_config
        more = (shared_experts, shared_experts_input)
        topk_ids = engine.unpadded(topk_ids, parallel)
        most, parts = engine.most(x, parallel), []
        for start in range(0, most, around.max_tokens):  # as many on every rank
            part = slice(start, start + around.max_tokens)
            around.rows = min(around.max_tokens, most - start)
            some = (x[part], topk_weights[part], topk_ids[part])
            with engine.logged():
                parts.append(super().apply(layer, *some, *more))  # type: ignore[misc]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty_like(x)


class PrepareFinalize(FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """Tokens by `weft.AllToAll` to vLLM's own experts, and their sums back.

    Rows are of the layer's dtype, or what vLLM itself makes of them for its experts: FP8 with a
    float32 scale for each 128 columns. `rows` is set before each pair: tokens of the rank that has
    most, at most max_tokens.
    """

    def __init__(self, layer: Any, experts: Any) -> None:
        super().__init__()
        parallel = layer.moe_config.moe_parallel_config
        self.hidden, self.fp8 = layer.hidden_size, engine.travels_as_fp8(layer, experts)
        self.all_to_all = engine.load_exchange(layer, fp8=self.fp8)
        self.max_tokens = self.rows = self.all_to_all.max_tokens
        self.ranks = parallel.ep_size
        first, local = parallel.ep_rank * layer.local_num_experts, layer.local_num_experts
        # Experts on GPUs skip ids that their map gives no slot, and on CPUs have no map.
        on_cpu = engine.device_of(layer).type == "cpu"
        self.first = 0 if on_cpu else first
        self.elsewhere = 0 if on_cpu else (first + local) % layer.global_num_experts

    @property
    def activation_format(self) -> Any:
        """Rows one after the other."""
        return FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> None:
        """Either."""

    def max_num_tokens_per_rank(self) -> None:
        """No batches of experts."""

    def num_dispatchers(self) -> int:
        """Ranks that send here."""
        return int(self.ranks)

    def output_is_reduced(self) -> bool:
        """Over tensor-parallel ranks it is not."""
        return False

    def allocate_fused_expert_output(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, reduction: Any
    ) -> torch.Tensor | None:
        """Experts that sum by themselves do so where peers read."""
        out = self.all_to_all.output(self.rows).flatten(0, 1)
        fits = isinstance(reduction, TopKWeightAndReduceNoOP) and out.dtype == dtype
        return out if fits and tuple(out.shape) == tuple(shape) else None

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, torch.Tensor, torch.Tensor]:
        """What all ranks sent here, `[ranks * rows, hidden]` in the inbox itself.

        Ids are as the experts take them: an expert that is not here is another rank's, or on CPUs
        one of this rank's, and has weight 0.
        """
        if apply_router_weight_on_input:
            a1 = a1 * topk_weights.to(a1.dtype)
        received = self.all_to_all.dispatch(
            _in_fp8(a1, quant_config) if self.fp8 else [a1.contiguous()],
            topk_ids.contiguous(),
            topk_weights.float().contiguous(),
            rows=self.rows,
        )
        x, *scaled = (each.flatten(0, 1) for each in received.payloads)
        ids, weights = received.ids.flatten(0, 1), received.weights.flatten(0, 1)
        none = ids < 0
        ids = torch.where(none, self.elsewhere, ids + self.first)
        return x, scaled[0] if scaled else None, None, ids, weights.masked_fill(none, 0.0)

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Each token's sum over ranks, into `output`."""
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceContiguous()
        sums = weight_and_reduce_impl.apply(
            output=None,
            fused_expert_output=fused_expert_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        self.all_to_all.combine(sums.view(self.ranks, self.rows, self.hidden), out=output)


def _in_fp8(x: torch.Tensor, quant: Any) -> list[torch.Tensor]:
    """Rows and scales as vLLM makes them, whose kernels cannot be launched with none."""
    if x.shape[0] == 0:
        scales = x.new_empty(0, x.shape[1] // FP8_BLOCK, dtype=torch.float32)
        return [x.to(quant.quant_dtype), scales]
    rows, scales = moe_kernel_quantize_input(
        x,
        quant.a1_scale,
        quant_dtype=quant.quant_dtype,
        per_act_token_quant=quant.per_act_token_quant,
        block_shape=quant.block_shape,
    )
    return [rows.contiguous(), scales.contiguous()]


def register() -> None:
    """Put weft's layers in the place of vLLM's, and of those that models derive from it.

    vLLM's registry goes by a class's name, so each has one of its own.
    """
    RoutedExperts.register_oot(WeftRoutedExperts)
    for each in engine.derived():
        each.register_oot(type(f"Weft{each.__name__}", (Wefted, each), {}))
