# SPDX-License-Identifier: Apache-2.0
"""Subclasses of vLLM's layers, methods and kernels. This module imports vLLM."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEKernelModularImpl,
    FusedMoEPrepareAndFinalizeModular,
)
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
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8FusedMoE
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod, Mxfp4MoEMethod

from weft.errors import InvalidArgument
from weft.plugins.vllm import engine
from weft.plugins.vllm.weights import EXCHANGE_FIX, check_arithmetic, convert_mxfp8
from weft.plugins.weights import build_layer_error
from weft.shape import FP8_BLOCK

# Methods that load weights which `block` supports.
BLOCK_METHODS = (
    UnquantizedFusedMoEMethod,
    Fp8MoEMethod,
    GptOssMxfp4MoEMethod,
    Mxfp4MoEMethod,
    ModelOptMxFp8FusedMoE,
)


class WeftRoutedExpertsMixin:
    """Mixin for vLLM's layers of routed experts that installs weft's quantization method."""

    def __init__(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        if "expert_substitution" in kwargs:  # its router repeats expert 0 with weight 0
            raise InvalidArgument(
                f"weft does not support the experts of {layer_name}: the checkpoint replaces some "
                "by constants (approximate_experts or expert_substitution in config.json), which "
                "vLLM supports only on ranks that have all experts: unset WEFT_VLLM"
            )
        super().__init__(layer_name, *args, **kwargs)  # type: ignore[call-arg]

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        form = engine.select_form(moe_config.moe_parallel_config)
        if form == "exchange":
            method = super()._get_quant_method(prefix, quant_config, moe_config)  # type: ignore[misc]
            return _mix_in(method, ExchangeMethodMixin)
        with _select_no_kernel():
            method = super()._get_quant_method(prefix, quant_config, moe_config)  # type: ignore[misc]
        if type(method) not in BLOCK_METHODS:
            actual = f"their method is {type(method).__name__}; weft supports "
            supported = ", ".join(each.__name__ for each in BLOCK_METHODS)
            raise build_layer_error(prefix, "block", actual + supported, EXCHANGE_FIX)
        check_arithmetic(self, type(method).__name__)
        return _mix_in(method, BlockMethodMixin)


class WeftRoutedExperts(WeftRoutedExpertsMixin, RoutedExperts):  # type: ignore[misc]  # vLLM is not type-checked
    """vLLM's layer of routed experts with weft's quantization method."""


@contextlib.contextmanager
def _select_no_kernel() -> Iterator[None]:
    """Make vLLM construct MXFP4 and MXFP8 methods without one of its kernels.

    Their constructors select a kernel and raise if there is none, as on CPUs without AMX.
    """
    selectors = []
    for target in engine.SELECTORS:
        path, _, name = target.rpartition(".")
        module = importlib.import_module(path)
        selectors.append((module, name, getattr(module, name)))
    try:
        for module, name, _ in selectors:
            setattr(module, name, lambda *args, **kwargs: (None, None))
        yield
    finally:
        for module, name, selector in selectors:
            setattr(module, name, selector)


def _mix_in(method: Any, kind: type) -> Any:
    """Return `method` with the mixin `kind`. The class name stays, because loaders compare it."""
    mixed: Any = object.__new__(type(type(method).__name__, (kind, type(method)), {}))
    mixed.__dict__ = method.__dict__  # shared, because it may contain bound methods of `method`
    return mixed


class BlockMethodMixin:
    """Mixin for vLLM's quantization methods: vLLM loads the weights, and weft runs the layer."""

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
        """Return the sizes unchanged, because no kernel of vLLM runs."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Return an unquantized config. It is unused, and creating the real one may raise."""
        return FusedMoEQuantConfig.make()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Create the layer's operators before vLLM measures free memory."""
        if isinstance(self, ModelOptMxFp8FusedMoE):
            convert_mxfp8(layer)
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
        """Run the experts on this rank's `[tokens, hidden]`; vLLM adds the shared expert."""
        return engine.run_block(layer, x, topk_weights, topk_ids)


class ExchangeMethodMixin:
    """Mixin for vLLM's quantization methods with a modular kernel: weft moves the tokens."""

    supports_internal_mk = True

    def process_weights_after_loading(self, layer: Any) -> None:
        """Wrap the experts that vLLM selected in weft's all-to-all."""
        super().process_weights_after_loading(layer)  # type: ignore[misc]
        kernel = getattr(self, "moe_kernel", None)
        impl = getattr(kernel, "impl", None)
        if not isinstance(impl, FusedMoEKernelModularImpl):
            actual = "none" if impl is None else type(impl).__name__
            raise build_layer_error(
                layer.layer_name,
                "exchange",
                f"{type(self).__name__} has no modular kernel but {actual}, which sends or routes "
                "tokens by itself: use another --moe-backend (triton), or "
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
        """Run vLLM's kernel, in rounds of at most the all-to-all's max_tokens."""
        exchange = self.moe_kernel.impl.prepare_finalize  # type: ignore[attr-defined]
        parallel = layer.moe_config.moe_parallel_config
        shared = (shared_experts, shared_experts_input)
        topk_ids = engine.mask_padding(topk_ids, parallel)
        max_tokens, parts = engine.get_max_tokens_over_ranks(x, parallel), []
        # The same number of rounds on every rank.
        for start in range(0, max_tokens, exchange.max_tokens):
            part = slice(start, start + exchange.max_tokens)
            exchange.rows = min(exchange.max_tokens, max_tokens - start)
            chunk = (x[part], topk_weights[part], topk_ids[part])
            with engine.log_errors():
                parts.append(super().apply(layer, *chunk, *shared))  # type: ignore[misc]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty_like(x)


class PrepareFinalize(FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """Sends tokens to vLLM's experts with `weft.AllToAll`, and returns their sums.

    Rows have the layer's dtype or vLLM's block FP8: one float32 scale per 128 columns. Before each
    pair of calls, the caller sets `rows` to the largest token count over all ranks, at most
    max_tokens.
    """

    def __init__(self, layer: Any, experts: Any) -> None:
        super().__init__()
        parallel = layer.moe_config.moe_parallel_config
        self.hidden, self.uses_fp8_rows = layer.hidden_size, engine.uses_fp8_rows(layer, experts)
        self.all_to_all = engine.load_exchange(layer, fp8=self.uses_fp8_rows)
        self.max_tokens = self.rows = self.all_to_all.max_tokens
        self.ranks = parallel.ep_size
        first, local = parallel.ep_rank * layer.local_num_experts, layer.local_num_experts
        # Experts on GPUs skip ids that are not in their expert map; experts on CPUs have no map.
        on_cpu = engine.get_weights_device(layer).type == "cpu"
        self.first_id = 0 if on_cpu else first
        self.skipped_id = 0 if on_cpu else (first + local) % layer.global_num_experts

    @property
    def activation_format(self) -> Any:
        """Format of the rows: contiguous, not batched by expert."""
        return FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> None:
        """Return None: any index dtype is accepted."""

    def max_num_tokens_per_rank(self) -> None:
        """Return None: rows are not batched by expert."""

    def num_dispatchers(self) -> int:
        """Return the number of ranks that send to this one."""
        return int(self.ranks)

    def output_is_reduced(self) -> bool:
        """Whether the output is reduced over tensor-parallel ranks."""
        return False

    def allocate_fused_expert_output(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, reduction: Any
    ) -> torch.Tensor | None:
        """Return the all-to-all's buffer if the experts reduce their output, otherwise None."""
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
        """Return a view of the received rows, `[ranks * rows, hidden]`, with their ids and weights.

        Experts of other ranks get an id that this rank's experts skip (or, on CPUs, a local id) and
        weight 0.
        """
        if apply_router_weight_on_input:
            a1 = a1 * topk_weights.to(a1.dtype)
        received = self.all_to_all.dispatch(
            _quantize_fp8(a1, quant_config) if self.uses_fp8_rows else [a1.contiguous()],
            topk_ids.contiguous(),
            topk_weights.float().contiguous(),
            rows=self.rows,
        )
        x, *scales = (payload.flatten(0, 1) for payload in received.payloads)
        ids, weights = received.ids.flatten(0, 1), received.weights.flatten(0, 1)
        unused = ids < 0
        ids = torch.where(unused, self.skipped_id, ids + self.first_id)
        return x, scales[0] if scales else None, None, ids, weights.masked_fill(unused, 0.0)

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Write each token's sum over all ranks into `output`."""
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


def _quantize_fp8(x: torch.Tensor, quant: Any) -> list[torch.Tensor]:
    """Quantize rows with vLLM's kernel, which cannot be launched on empty tensors."""
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
    """Replace vLLM's RoutedExperts layer and the subclasses that models define.

    vLLM's registry is keyed by class name, so each replacement has its own name.
    """
    RoutedExperts.register_oot(WeftRoutedExperts)
    for base in engine.find_derived_classes():
        base.register_oot(type(f"Weft{base.__name__}", (WeftRoutedExpertsMixin, base), {}))
