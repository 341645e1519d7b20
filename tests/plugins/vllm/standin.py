# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM on CPU ranks, in plain torch: what weft's plug-in reads and calls.

All of vLLM's modules are this one; `tests.plugins.standins` says how.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

# Flags, groups and the forward pass.


def make_config() -> Any:
    """Return a VllmConfig."""
    return SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=True, enable_sleep_mode=False),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=32),
        parallel_config=SimpleNamespace(
            **{"all2all_backend": "allgather_reducescatter", "enable_elastic_ep": False},
            **{"expert_placement_strategy": "linear", "enable_dbo": False, "ubatch_size": 0},
            **{"prefill_context_parallel_size": 1, "enable_fault_tolerance": False},
        ),
        lora_config=None,
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0),
            prefetch=SimpleNamespace(offload_group_size=0),
        ),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=None),
    )


CURRENT = make_config()


class Worker:
    """A GPU worker; its allocator is elsewhere."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None: ...

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> None: ...


current_platform = SimpleNamespace(is_cpu=lambda: True)


def get_current_vllm_config() -> Any:
    return CURRENT


class GroupCoordinator:
    of_experts: GroupCoordinator

    def __init__(self, cpu_group: Any) -> None:
        self.cpu_group = cpu_group


def get_ep_group() -> Any:
    return GroupCoordinator.of_experts


_contexts: list[Any] = []


def get_forward_context() -> Any:
    return _contexts[-1]


@contextmanager
def forward(sizes: list[int] | None, padding: torch.Tensor | None) -> Iterator[None]:
    """Run a forward pass of the tests."""
    metadata = SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: sizes) if sizes else None
    _contexts.append(SimpleNamespace(dp_metadata=metadata, is_padding=padding))
    try:
        yield
    finally:
        _contexts.pop()


# Layers of experts.

op_registry_oot: dict[str, type] = {}


class PluggableLayer(torch.nn.Module):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, _decorated_layer_cls: Any = None, name: str | None = None) -> Any:
        name = name or cls.__name__
        assert name not in op_registry_oot, f"Duplicate layer name: {name}"
        op_registry_oot[name] = _decorated_layer_cls
        return _decorated_layer_cls


def FusedMoEQuantConfig(dtype: torch.dtype | None = None, blocks: Any = None) -> Any:  # noqa: N802
    more = {"per_act_token_quant": False, "a1_scale": None}
    return SimpleNamespace(quant_dtype=dtype, block_shape=blocks, **more)


vars(FusedMoEQuantConfig)["make"] = FusedMoEQuantConfig
FusedMoEActivationFormat = SimpleNamespace(Standard="standard")


def moe_kernel_quantize_input(
    A: torch.Tensor, A_scale: None, quant_dtype: torch.dtype, block_shape: list[int], **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = A.float().view(A.shape[0], -1, block_shape[1])
    scale = blocks.abs().amax(2).clamp(min=1e-10) / 448
    return (blocks / scale[..., None]).view(A.shape).to(quant_dtype), scale


TopKWeightAndReduceDelegate = type("TopKWeightAndReduceDelegate", (), {})


class TopKWeightAndReduceNoOP:
    def apply(self, output: None, fused_expert_output: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return fused_expert_output


class TopKWeightAndReduceContiguous:
    def apply(self, output: None, fused_expert_output: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if not kwargs["apply_router_weight_on_input"]:
            fused_expert_output.mul_(kwargs["topk_weights"][..., None])
        return fused_expert_output.sum(1)


def abstract() -> Any:
    return abstractmethod(lambda self: None)


class FusedMoEPrepareAndFinalize(ABC):  # noqa: B024
    def allocate_fused_expert_output(
        self, shape: Any, dtype: torch.dtype, device: torch.device, weight_and_reduce_impl: Any
    ) -> torch.Tensor | None:
        return None

    activation_format, topk_indices_dtype, output_is_reduced = abstract(), abstract(), abstract()
    max_num_tokens_per_rank, num_dispatchers = abstract(), abstract()


class FusedMoEPrepareAndFinalizeModular(FusedMoEPrepareAndFinalize):
    prepare, finalize = abstract(), abstract()


class FusedMoEExperts:
    """Experts with a map's ids, or local ids; sums: they weigh and sum."""

    expects_unquantized_inputs = False

    def __init__(self, quant_config: Any, sums: bool) -> None:
        self.quant_config, self.sums = quant_config, sums

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP() if self.sums else TopKWeightAndReduceContiguous()

    def apply(self, output: Any, x: Any, scale: Any, layer: Any, weights: Any, ids: Any) -> None:
        own = torch.ones_like(ids, dtype=torch.bool)
        if layer.expert_map is not None:
            ids = layer.expert_map[ids.long()]
            own, ids = ids >= 0, ids.clamp(min=0)
        if scale is not None:
            x = (x.float().view(*scale.shape, -1) * scale[..., None]).view(x.shape)
        x = x.nan_to_num().to(layer.w13_weight.dtype)
        wide = torch.einsum("th,tkih->tki", x, layer.w13_weight[ids.long()])
        gate, up = wide.chunk(2, dim=2)
        h = functional.silu(gate) * up
        rows = torch.einsum("tki,tkhi->tkh", h, layer.w2_weight[ids.long()])
        rows = rows.masked_fill(~own[..., None], 0.0)
        output.copy_((rows * weights[..., None]).sum(1) if self.sums else rows)


class FusedMoEKernelModularImpl:
    def __init__(self, prepare_finalize: Any, fused_experts: FusedMoEExperts) -> None:
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts


class FusedMoEKernel:
    def __init__(self, prepare_finalize: Any, fused_experts: FusedMoEExperts) -> None:
        self.impl = FusedMoEKernelModularImpl(prepare_finalize, fused_experts)

    def apply(self, x: torch.Tensor, layer: Any, weights: Any, ids: Any) -> torch.Tensor:
        around, experts = self.impl.prepare_finalize, self.impl.fused_experts
        impl, on = experts.finalize_weight_and_reduce_impl(), layer.apply_router_weight_on_input
        a, scale, _, ids, weights = around.prepare(
            *(x, weights, ids, 0, layer.expert_map, on, experts.quant_config),
            defer_input_quant=False,
        )
        shape = a.shape if experts.sums else (*ids.shape, a.shape[1])
        made = around.allocate_fused_expert_output(shape, x.dtype, x.device, impl)
        made = torch.empty(shape, dtype=x.dtype, device=x.device) if made is None else made
        experts.apply(made, a, scale, layer, weights, ids)
        out = torch.empty_like(x)
        around.finalize(out, made, weights, ids, on, impl)
        return out


class FusedMoEMethodBase:
    quant = FusedMoEQuantConfig()
    sums = True
    mk_can_overlap_shared_experts, topk_indices_dtype = False, None
    supports_internal_mk = property(lambda self: self.moe_kernel is not None)
    is_monolithic = property(lambda self: self.moe_kernel is None)

    def __init__(self, moe: Any) -> None:
        self.moe = moe
        self.moe_kernel: Any = None
        self.moe_quant_config: Any = None

    def maybe_roundup_sizes(self, hidden: int, intermediate: int, *args: Any) -> tuple[int, int]:
        return hidden, -(-intermediate // 256) * 256

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        raise AttributeError("a kernel's layout, which was not made")


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    def process_weights_after_loading(self, layer: Any) -> None:
        self.moe_quant_config = self.quant
        self.moe_kernel = FusedMoEKernel("stock", FusedMoEExperts(self.quant, self.sums))

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: Any, topk_ids: Any, *args: Any, **more: Any
    ) -> torch.Tensor:
        return self.moe_kernel.apply(x, layer, topk_weights, topk_ids)


class Fp8MoEMethod(UnquantizedFusedMoEMethod):
    """FP8 rows, for weights of the model's dtype."""

    quant = FusedMoEQuantConfig(torch.float8_e4m3fn, [128, 128])
    sums = False


def select_mxfp4_moe_backend(moe: Any) -> Any:
    raise NotImplementedError("No MXFP4 MoE backend supports the deployment configuration.")


select_deepseek_v4_mxfp4_moe_backend = select_mxfp8_moe_backend = select_mxfp4_moe_backend


class GptOssMxfp4MoEMethod(UnquantizedFusedMoEMethod):
    """GPT-OSS's weights, for which this machine has no kernel."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self.mxfp4_backend, self.experts_cls = select_mxfp4_moe_backend(moe)


class Mxfp4MoEMethod(UnquantizedFusedMoEMethod):
    """MXFP4 experts of other models."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self.mxfp4_backend, self.experts_cls = select_deepseek_v4_mxfp4_moe_backend(moe)


class ModelOptMxFp8FusedMoE(UnquantizedFusedMoEMethod):
    """MXFP8 experts."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self.mxfp8_backend, self.experts_cls = select_mxfp8_moe_backend(moe)


class RoutedExperts(PluggableLayer):
    def __init__(self, layer_name: str, moe_config: Any, quant_config: Any = None, **more: Any):
        super().__init__()
        self.layer_name, self.moe_config = layer_name, moe_config
        self.hidden_size = moe_config.hidden_dim
        self.global_num_experts = moe_config.num_experts
        self.local_num_experts = moe_config.num_local_experts
        self.top_k = moe_config.experts_per_token
        self.activation = moe_config.activation
        self.swiglu_limit = more.get("limit")
        self.swiglu_alpha = self.swiglu_beta = None
        self.expert_map_manager = SimpleNamespace(num_fused_shared_experts=more.get("fused", 0))
        self.apply_router_weight_on_input = more.get("on_input", False)
        self.quant_method = self._get_quant_method(layer_name, quant_config, moe_config)
        _, self.intermediate_size_per_partition = self.quant_method.maybe_roundup_sizes(
            self.hidden_size,
            moe_config.intermediate_size_per_partition,
            moe_config.in_dtype,
            moe_config.moe_parallel_config,
        )

    @property
    def expert_map(self) -> torch.Tensor | None:
        """The map of physical experts; None on CPUs."""
        device: Any = self.w13_weight.device
        if device.type == "cpu":
            return None
        first = self.moe_config.moe_parallel_config.ep_rank * self.local_num_experts
        local = torch.arange(self.global_num_experts, device=device) - first
        return local.masked_fill((local < 0) | (local >= self.local_num_experts), -1)

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        return (quant_config or UnquantizedFusedMoEMethod)(moe_config)

    def _ensure_moe_quant_config_init(self) -> None:
        method = self.quant_method
        if method.moe_quant_config is None:
            method.moe_quant_config = method.get_fused_moe_quant_config(self)

    def forward_modular(self, x: Any, topk_weights: Any, topk_ids: Any) -> torch.Tensor:
        kwargs = {"layer": self, "x": x, "topk_weights": topk_weights, "topk_ids": topk_ids}
        return self.quant_method.apply(**kwargs, shared_experts=None, shared_experts_input=None)


GptOssRoutedExperts, TransformersRoutedExperts, DbrxExperts = (
    type(name, (RoutedExperts,), {})
    for name in ("GptOssRoutedExperts", "TransformersRoutedExperts", "DbrxExperts")
)


def layerwise(layer: Any, weights: dict[str, torch.Tensor], *, restore: bool = True) -> None:
    """Load `weights` as vLLM's layerwise reload does: into temporary parameters, which the layer
    processes, and which are then copied into the first ones.

    restore: whether the layer gets its first parameters back; otherwise the temporary ones stay.
    """
    first = dict(layer.named_parameters(recurse=False))
    for name, tensor in weights.items():
        setattr(layer, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    layer.quant_method.process_weights_after_loading(layer)
    for name, parameter in first.items() if restore else ():
        parameter.data.copy_(getattr(layer, name))
        setattr(layer, name, parameter)
