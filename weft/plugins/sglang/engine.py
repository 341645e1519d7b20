# SPDX-License-Identifier: Apache-2.0
"""Hooks that create weft's layers after loading and run them in SGLang's forward passes.

This module imports SGLang only inside functions that SGLang calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from weft.errors import InvalidArgument, OutOfOrder
from weft.group import Group
from weft.plugins.blocks import Blocks
from weft.plugins.engine_api import ExpectedAPI
from weft.plugins.faults import Watch
from weft.plugins.settings import Settings
from weft.plugins.sglang import elastic, flags, models, sleep
from weft.plugins.sglang.flags import check_server, check_unused, compute_limits
from weft.plugins.sglang.hooks import (
    FORWARD,
    RUNNER,
    SRT,
    Hook,
    check_applied,
    create_server_terminator,
    get_model_device,
    resolve_flags,
)
from weft.plugins.sglang.models import (
    EXPERT_CALLERS,
    FORWARDS,
    calls_experts,
    find_weft_layers,
    get_gate,
    get_shared_expert,
    get_shared_mlp,
)
from weft.plugins.sglang.weights import build_layer, check_experts, split_mxfp4, unify_mxfp4
from weft.plugins.weights import check_exportable, check_loadable

_blocks: Blocks | None = None


def after_load_model(result: Any, runner: Any) -> None:
    """Create weft's layers after ModelRunner.load_model.

    SGLang measures free memory and captures graphs later.
    """
    global _blocks
    layers = find_weft_layers(runner.model)
    server_args = resolve_flags(runner.server_args)
    if not layers:
        if not runner.is_draft_worker:
            check_unused(runner.server_args, server_args, runner.model)
        return
    check_applied(HOOKS)
    check_server(server_args)
    batch_invariant = bool(server_args.enable_deterministic_inference)
    settings = replace(Settings.read("SGLANG"), batch_invariant=batch_invariant)
    for layer, block in layers:
        if settings.form == "block":
            unify_mxfp4(layer)
        check_experts(layer, form=settings.form)
        if calls_experts(block):
            _check_caller(layer, block, settings)
        if getattr(get_gate(block), "e_score_correction_bias_vl", None) is not None:
            raise InvalidArgument(
                f"layer {layer.layer_id} routes image tokens by a bias of their own, which weft "
                "does not support"
            )
    with torch.inference_mode(False):  # inference tensors are read-only elsewhere
        if _blocks is None:
            group = elastic.create_group(_get_process_group(), get_model_device(runner))
            if server_args.elastic_ep_backend is not None:
                group.require_one_machine(
                    "--elastic-ep-backend weft", fix="leave it out, or start without --nnodes"
                )
            _blocks = Blocks(group, compute_limits(server_args, settings), settings)
            end = create_server_terminator(os.getppid())
            if server_args.elastic_ep_backend is None:
                _blocks.watch = Watch(group, end_server=end)
            else:
                _blocks.watch = Watch(
                    group,
                    end_server=end,
                    grace_seconds=2 * elastic.RECOVERY_TIMEOUT,
                    can_recover=True,
                )
                elastic.enable_recovery(group, runner, [each for each, _ in layers], server_args)
        for layer, block in layers:
            if settings.form == "dispatcher":
                layer.dispatcher.all_to_all = _blocks.get_exchange(build_layer(layer))
                continue
            weights_memory = _use_weights_memory(runner, server_args)
            if calls_experts(block):
                layer.dispatcher.runs_experts = True
                _blocks.add_block(build_layer(layer), weights_memory=weights_memory)
                continue
            mlp = get_shared_mlp(block)
            size = 0 if mlp is None else mlp.gate_up_proj.output_size // 2
            _blocks.add_block(
                build_layer(layer),
                shared=get_shared_expert(block),
                shared_size=size,
                moves_experts=server_args.enable_eplb,
                weights_memory=weights_memory,
            )
    _blocks.log_layers(f"{len(layers)} MoE layers of {type(runner.model).__name__}")


def _use_weights_memory(runner: Any, server_args: Any) -> AbstractContextManager[object]:
    """Return a context whose allocations SGLang releases and resumes with the model's weights."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    has_backup = server_args.enable_weights_cpu_backup or (
        runner.is_draft_worker and server_args.enable_draft_weights_cpu_backup
    )
    region: AbstractContextManager[object] = runner.memory_saver_adapter.region(
        GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=bool(has_backup)
    )
    return region


def restore_weights(original: Callable[..., None], model: Any, target_device: Any) -> None:
    """Undo weft's order of rows before SGLang's methods see it; wraps DefaultModelLoader's."""
    _restore(model)
    original(model, target_device)


def _restore(model: Any) -> None:
    if _blocks is not None:
        with torch.inference_mode(False):
            for fused in _blocks.restore(model.modules()):
                split_mxfp4(fused)


def load_tensors(
    original: Callable[..., Any], updater: Any, named_tensors: Any, *args: Any, **kwargs: Any
) -> Any:
    """Undo weft's order of rows before SGLang loads tensors; wraps methods of WeightUpdater.

    A forward pass since begin_weight_update has applied it again.
    """
    _restore(updater.get_model())
    return original(updater, named_tensors, *args, **kwargs)


def load_directly(original: Callable[..., None], model: Any, named_tensors: Any) -> None:
    """Raise for weights that weft could not restore; wraps load_format="direct".

    That format copies into parameters without their weight_loader.
    """
    parameters = dict(model.named_parameters())
    for name, _ in named_tensors:
        if name in parameters:
            check_loadable(parameters[name])
    original(model, named_tensors)


def export_weights(original: Callable[..., Any], exporter: Any, *args: Any, **kwargs: Any) -> Any:
    """Undo weft's order of rows before SGLang saves or sends weights; wraps WeightExporter's.

    Raises:
        OutOfOrder: weights cannot go back to SGLang's order.
    """
    model = exporter.get_model()
    _restore(model)
    for parameter in model.parameters():
        check_exportable(parameter)
    return original(exporter, *args, **kwargs)


def capture_graphs(original: Callable[..., None], runner: Any) -> None:
    """Apply updated weights before a capture runs the model; wraps init_decode_cuda_graph."""
    if _blocks is not None:
        _blocks.reload_all(unify_mxfp4)
    original(runner)


def _check_caller(layer: Any, block: Any, settings: Settings) -> None:
    """Raise InvalidArgument for settings that a block of `EXPERT_CALLERS` does not support."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    name = f"{type(block).__name__} of layer {layer.layer_id}"
    if settings.form != "block":
        raise InvalidArgument(f"{name} needs form 'block': unset WEFT_SGLANG_FORM")
    if get_global_expert_location_metadata() is not None:  # its fused router knows no replicas
        raise InvalidArgument(f"{name} has no replicas of experts: remove SGLang's flags of EPLB")


def close() -> None:
    """Free the memory of `after_load_model`. Local and idempotent; process exit does the same."""
    global _blocks
    elastic.disable_recovery()
    if _blocks is not None:
        _blocks.close()
    _blocks = None


def _get_process_group() -> Any:
    """Return the CPU process group of the expert-parallel ranks."""
    from sglang.srt.distributed import get_moe_ep_group

    return get_moe_ep_group().cpu_group


def run_moe_block(
    original: Callable[..., Any],
    block: Any,
    hidden_states: torch.Tensor,
    forward_batch: Any = None,
    *args: Any,
    input_ids_global: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Run a MoE block with SGLang's routing; wraps the block's forward.

    `input_ids_global` are the token ids of this rank's rows: with an all-to-all backend SGLang
    gathers no rows.
    """
    from weft.plugins.sglang.dispatcher import BlockDispatcher, ExchangeDispatcher

    dispatcher = block.experts.dispatcher
    if not isinstance(dispatcher, BlockDispatcher | ExchangeDispatcher):
        if input_ids_global is not None:
            kwargs["input_ids_global"] = input_ids_global
        return original(block, hidden_states, forward_batch, *args, **kwargs)
    if _blocks is None:
        raise OutOfOrder(
            f"layer {block.layer_id} runs before weft's hook after ModelRunner.load_model"
        )
    x = hidden_states.view(-1, hidden_states.shape[-1])
    topk = _run_router(block, x, forward_batch, input_ids_global)
    max_tokens = get_max_tokens_over_ranks()
    with _blocks.log_group_errors():
        if isinstance(dispatcher, BlockDispatcher):
            out = _blocks.run(block.experts, x, topk.topk_ids, topk.topk_weights, max_tokens)
        else:
            out = _run_experts(block, dispatcher, x, topk, max_tokens)
    return out.view(hidden_states.shape)


def run_experts(
    original: Callable[..., Any],
    experts: Any,
    hidden_states: torch.Tensor,
    topk_output: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run experts that a block of `EXPERT_CALLERS` calls; wraps FusedMoE.forward_impl."""
    if not getattr(experts.dispatcher, "runs_experts", False) or _blocks is None:
        return original(experts, hidden_states, topk_output, *args, **kwargs)
    ids, weights = topk_output.topk_ids, topk_output.topk_weights
    max_tokens = get_max_tokens_over_ranks()
    with _blocks.log_group_errors():
        return _blocks.run(experts, hidden_states, ids, weights, max_tokens)


def run_forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run a forward pass, then raise a group error or recover; wraps ModelRunner.forward.

    Weights that SGLang updated since the last pass take effect first, also in captured graphs.
    """
    if _blocks is not None:
        _blocks.reload_all(unify_mxfp4)
    if _blocks is not None and elastic.is_enabled():
        return elastic.run_forward(
            lambda: original(runner, forward_batch, *args, **kwargs), _blocks.check, forward_batch
        )
    result = original(runner, forward_batch, *args, **kwargs)
    if _blocks is not None:
        _blocks.check()
    return result


def _run_router(
    block: Any, x: torch.Tensor, forward_batch: Any, input_ids: torch.Tensor | None = None
) -> Any:
    """Run SGLang's router: physical ids, with -1 in the padding rows of a graph's batch."""
    if x.shape[0] == 0:  # SGLang's kernels cannot be launched on empty tensors
        return block.topk.empty_topk_output(x.device, layer_id=block.layer_id)
    block_type = type(block).__name__
    if block_type == "DeepseekV2MoE":
        logits = block.gate(x, forward_batch=forward_batch)
    elif block_type == "MiniMaxM3MoE":
        logits = block._compute_router_logits(x)
    else:  # MiniMax-M2's gate is float32
        logits = get_gate(block)(x.float() if block_type == "MiniMaxM2MoE" else x)
    if isinstance(logits, tuple):  # a linear layer also returns its bias
        logits = logits[0]
    # DeepSeek-V4's first layers choose experts by token id.
    by_token = {"input_ids": input_ids} if getattr(block, "is_hash", False) else {}
    if hasattr(block.topk, "routing_inputs"):  # 0.5.23 handles replicas and padding itself
        return block.topk(x, logits, **by_token)
    from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo

    replicas = None
    if not getattr(block, "is_nextn", False):
        replicas = ExpertLocationDispatchInfo.init_new(layer_id=block.layer_id)
    return block.topk(
        x,
        logits,
        **by_token,
        num_token_non_padded=_num_valid_tokens(forward_batch),
        expert_location_dispatch_info=replicas,
    )


def _num_valid_tokens(forward_batch: Any) -> torch.Tensor | None:
    """Return the number of rows without padding, or None if SGLang does not update it.

    With one rank it is stale: a graph's buffer has the value of another graph's capture.
    """
    from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded

    num_tokens: torch.Tensor | None = forward_batch.num_token_non_padded
    return num_tokens if enable_num_token_non_padded() else None


def get_max_tokens_over_ranks() -> int:
    """Return the largest token count over all ranks in this layer (identical on every rank)."""
    from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
    from sglang.srt.runtime_context import get_parallel

    counts: list[int] | None = get_dp_global_num_tokens()
    if not counts:
        raise OutOfOrder(
            "SGLang did not report the ranks' token counts in this forward pass, which determine "
            "the number of rounds: report how the server was started"
        )
    attention_ranks: int = get_parallel().attn_tp_size
    return -(-max(counts) // attention_ranks)


def _run_experts(block: Any, dispatcher: Any, x: torch.Tensor, topk: Any, max_tokens: int) -> Any:
    """Run the experts with SGLang's runner, in rounds of at most the all-to-all's max_tokens."""
    out = torch.empty_like(x)
    step = dispatcher.all_to_all.max_tokens
    for start in range(0, max_tokens, step):  # the same number of rounds on every rank
        part, dispatcher.max_tokens = slice(start, start + step), min(step, max_tokens - start)
        chunk = topk._replace(topk_weights=topk.topk_weights[part], topk_ids=topk.topk_ids[part])
        out[part] = block.experts(x[part], chunk)
    shared = get_shared_expert(block)
    if shared is not None and x.shape[0]:
        out += shared(x)
    return out


def _get_group() -> Group | None:
    return None if _blocks is None else _blocks.group


_LOADER = SRT + "model_loader.loader.DefaultModelLoader."
_COMPONENTS = SRT + "model_executor.model_runner_components."
_UPDATER = _COMPONENTS + "weight_updater."
_EXPORTER = _COMPONENTS + "weight_exporter.WeightExporter."
_EXPORTS = {
    "send_weights_to_remote_instance": "self, master_address, ports, group_name",
    "save_remote_model": "self, url",
    "save_sharded_model": "self, path, pattern=, max_size=",
}
HOOKS = (
    *flags.HOOKS,
    *models.HOOKS,
    *sleep.create_hooks(_get_group),
    *(Hook(name, parameters, function=run_moe_block) for name, parameters in FORWARDS.items()),
    Hook(
        SRT + "layers.moe.fused_moe_triton.layer.FusedMoE.forward_impl",
        "self, hidden_states, topk_output, pre_quant_input=",
        function=run_experts,
    ),
    Hook(RUNNER + "load_model", "self", function=after_load_model, kind="AFTER"),
    Hook(RUNNER + "forward", FORWARD, function=run_forward),
    Hook(RUNNER + "init_decode_cuda_graph", "self", function=capture_graphs),
    Hook(
        _LOADER + "restore_weights_before_loading",
        {"0.5.23": "model, target_device"},
        function=restore_weights,
    ),
    Hook(
        _LOADER + "postprocess_weights",
        {"0.5.23": "model, target_device"},
        function=restore_weights,
    ),
    Hook(
        _UPDATER + "WeightUpdater.update_weights_from_tensor",
        {"0.5.23": "self, named_tensors, load_format="},
        function=load_tensors,
    ),
    Hook(
        _UPDATER + "WeightUpdater.load_weights_from_distributed",
        {"0.5.23": "self, named_tensors"},
        function=load_tensors,
    ),
    Hook(_UPDATER + "_model_load_weights_direct", "model, named_tensors", function=load_directly),
    *(
        Hook(_EXPORTER + name, parameters, function=export_weights)
        for name, parameters in _EXPORTS.items()
    ),
    *elastic.HOOKS,
)
# Functions and classes that the hooks use.
_TOPK = SRT + "layers.moe.topk."
_FORWARD_CUDA = (
    "self, hidden_states, router_logits, *, num_token_non_padded=, expert_location_dispatch_info="
)
EXPECTED_API = (
    ExpectedAPI(_UPDATER + "WeightUpdater", attributes="get_model"),
    ExpectedAPI(_EXPORTER.removesuffix("."), attributes="get_model"),
    ExpectedAPI(SRT + "constants.GPU_MEMORY_TYPE_WEIGHTS"),
    ExpectedAPI(
        SRT + "utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.region",
        "self, tag, enable_cpu_backup=",
    ),
    ExpectedAPI(
        SRT + "server_args.ServerArgs",
        {"0.5.17": None},
        attributes="enable_weights_cpu_backup enable_draft_weights_cpu_backup",
    ),
    *flags.EXPECTED_API,
    *models.EXPECTED_API,
    *elastic.EXPECTED_API,
    *sleep.EXPECTED_API,
    ExpectedAPI(SRT + "distributed.get_moe_ep_group", ""),
    ExpectedAPI(SRT + "layers.dp_attention.get_dp_global_num_tokens", ""),
    ExpectedAPI(
        SRT + "eplb.expert_location_dispatch.ExpertLocationDispatchInfo.init_new",
        {"0.5.17": "cls, layer_id"},
    ),
    ExpectedAPI(
        SRT + "model_executor.forward_batch_info.enable_num_token_non_padded", {"0.5.17": ""}
    ),
    ExpectedAPI(_TOPK + "StandardTopKOutput"),
    ExpectedAPI(_TOPK + "TopK.empty_topk_output", "self, device, *, layer_id="),
    ExpectedAPI(
        _TOPK + "TopK.forward_cuda",
        {
            "0.5.17": _FORWARD_CUDA,
            "0.5.23": _FORWARD_CUDA + ", dynamic_expert_bias=, router_logits_partials=",
        },
    ),
    ExpectedAPI(_TOPK + "TopK.routing_inputs", {"0.5.23": "self"}),
    ExpectedAPI(
        SRT + "layers.moe.hash_topk.HashTopK.forward",
        {
            "0.5.23": "self, hidden_states, router_logits, input_ids, num_token_non_padded=, "
            "expert_location_dispatch_info="
        },
    ),
    ExpectedAPI(
        SRT + "layers.quantization.fp8.Fp8MoEMethod.__init__",
        {"0.5.23": None},
        attributes="is_fp4_expert",
    ),
    *(ExpectedAPI(*item) for item in EXPERT_CALLERS.items()),
    ExpectedAPI(
        SRT + "layers.moe.moe_runner.base.MoeRunnerConfig",
        attributes="activation is_gated apply_router_weight_on_input routed_scaling_factor "
        "gemm1_alpha gemm1_clamp_limit swiglu_limit gate_up_interleaved",
    ),
    ExpectedAPI(SRT + "plugins.hook_registry.HookRegistry._patched"),
    ExpectedAPI(
        SRT + "plugins.hook_registry.HookRegistry.register",
        "cls, target, hook, hook_type=, *, source=",
    ),
)
