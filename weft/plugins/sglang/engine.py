# SPDX-License-Identifier: Apache-2.0
"""Hooks on SGLang's models that serve MoE blocks by weft.

This module imports SGLang only inside functions that SGLang calls. With any other all-to-all
backend every hook returns what the original does.
"""

from __future__ import annotations

import copy
import inspect
import os
import pkgutil
from collections.abc import Callable
from typing import Any, get_type_hints

import torch

from weft.errors import InvalidArgument, OutOfOrder, SetupError
from weft.group import Group
from weft.plugins.blocks import LOAD_TIMEOUT, Blocks, Limits
from weft.plugins.faults import Watch
from weft.plugins.names import Known, Parameters
from weft.plugins.settings import Settings
from weft.plugins.sglang import elastic
from weft.plugins.sglang.hooks import (
    FORWARD,
    NAME,
    RUNNER,
    SRT,
    Hook,
    check_applied,
    device_of,
    end_server,
    resolved,
)
from weft.plugins.sglang.weights import check_experts, layer_of

DEFAULT_BATCH = 64  # tokens of a decode batch if no graph is captured
# LoRA target modules outside MoE blocks, by SGLang's and PEFT's names.
ATTENTION = {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa", "kv_b_proj"),
}

_blocks: Blocks | None = None


# Flags.


def choices() -> list[list[str]]:
    """Return the lists of choices that SGLang's parser uses for its backend flags."""
    from sglang.srt import server_args

    shared: list[str] | None = getattr(server_args, "MOE_A2A_BACKEND_CHOICES", None)
    if shared is not None:
        return [shared]
    lists = []
    # 0.5.23: in annotations
    for field in ("moe_a2a_backend", "speculative_moe_a2a_backend", "elastic_ep_backend"):
        choices = _choices_of(server_args.ServerArgs, field)
        if (
            not isinstance(choices, list)
            or _choices_of(server_args.ServerArgs, field) is not choices
        ):
            raise SetupError(
                f"SGLang's ServerArgs.{field} has no list of choices that weft could extend"
            )
        lists.append(choices)
    return lists


def _choices_of(owner: type, field: str) -> Any:
    metadata = get_type_hints(owner, include_extras=True)[field].__metadata__[0]
    return getattr(metadata, "choices", None)


def alias(original: Callable[..., Any], backend: Any, value: object) -> Any:
    """Around MoeA2ABackend._missing_: map "weft" to the member reserved for plug-ins."""
    return backend.CUSTOMIZED if value == NAME else original(backend, value)


def expert_parallel_size(original: Callable[..., Any], view: Any) -> Any:
    """Around _a2a_ep_size: each rank holds whole experts, as with every all-to-all backend."""
    return {"ep_size": view.tp_size} if view.moe_a2a_backend == NAME else original(view)


def shared_expert_fusion(original: Callable[..., Any], view: Any) -> Any:
    """Around _a2a_fusion_adjustments: keep the shared expert out of the routed experts' kernel."""
    if view.moe_a2a_backend == NAME:
        return {"disable_shared_experts_fusion": True}
    return original(view)


def without_overlap(original: Callable[..., Any], *server_args: Any) -> Any:
    """Around initialize_moe_config: turn off SGLang's single-batch overlap.

    It only affects blocks that weft replaces, and SGLang raises on Hopper, where it lacks kernels.
    """
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    if server_args:
        flags = server_args[0]
        if MoeA2ABackend(flags.moe_a2a_backend).is_customized():
            flags = copy.copy(flags)
            object.__setattr__(flags, "enable_single_batch_overlap", False)
        return original(flags)
    from sglang.srt.runtime_context import get_exec  # 0.5.23 publishes the flags there

    if not MoeA2ABackend(get_exec().moe.moe_a2a_backend).is_customized():
        return original()
    with get_exec().overlap.override(enable_single_batch_overlap=False):
        return original()


class _NoBackend:
    """Proxy of the resolved flags that reports no all-to-all backend."""

    moe_a2a_backend = "none"

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def prefill_graphs(original: Callable[..., Any], server_args: Any) -> Any:
    """Around the rules that exclude prefill from CUDA graphs unless a flag enables it.

    One rule lists the supported all-to-all backends. weft's calls can be captured as well, so that
    rule sees the flags without a backend.
    """
    namespace = inspect.unwrap(original).__globals__
    resolved_view = namespace["resolved_view"]

    def view_of(server_args: Any) -> Any:
        view = resolved_view(server_args)
        return _NoBackend(view) if view.moe_a2a_backend == NAME else view

    namespace["resolved_view"] = view_of
    try:
        return original(server_args)
    finally:
        namespace["resolved_view"] = resolved_view


def agrees_on_counts(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around require_mlp_tp_gather: with DP attention all ranks replay graphs of one size."""
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    backend = kwargs.get("moe_a2a_backend")  # in 0.5.23 a draft model's backend, or None
    on = is_on() if backend is None else MoeA2ABackend(backend).is_customized()
    return (on and has_dp_attention()) or original(*args, **kwargs)


def noncontiguous_fallback(
    original: Callable[..., Any], info: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around MLPSyncBatchInfo._get_fallback_tensor: return it in a non-contiguous layout.

    0.5.17 expands the tensor into the buffer of all ranks' counts. With one rank, expanding a
    contiguous tensor copies nothing, and torch refuses to write the tensor onto itself.
    """
    counts: torch.Tensor = original(info, *args, **kwargs)
    return counts.repeat_interleave(2)[::2]


def has_dp_attention() -> bool:
    """Whether DP attention is enabled."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if hasattr(parallel, "attn_dp_enabled"):  # 0.5.23, where enable_dp_attention stays false
        return bool(parallel.attn_dp_enabled)
    return bool(parallel.enable_dp_attention)


def is_on() -> bool:
    """Whether weft is the backend of the layers being constructed or run."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    return bool(get_moe_a2a_backend().is_customized())


# Model construction and loading.


def make_dispatcher(
    original: Callable[..., Any], moe_runner_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around create_moe_dispatcher: install weft's dispatcher, which marks the layer as weft's."""
    if not is_on():
        return original(moe_runner_config, *args, **kwargs)
    from weft.plugins.sglang import dispatcher

    block = Settings.read("SGLANG").form == "block"
    kind = dispatcher.WholeBlock if block else dispatcher.Exchanged
    return kind(moe_runner_config.layer_id)


def whole_shared_expert(original: Callable[..., Any], mlp: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the MLP's constructor: keep the shared expert whole on each rank."""
    if is_on() and str(kwargs.get("prefix", "")).endswith(("shared_experts", "shared_expert")):
        if "parallel_group" in inspect.signature(original).parameters:  # 0.5.23
            kwargs["parallel_group"] = "replicated"
        else:
            kwargs |= {"tp_rank": 0, "tp_size": 1}
    return original(mlp, *args, **kwargs)


def keep_mxfp4(original: Callable[..., Any], method: Any, layer: Any) -> Any:
    """Around the conversion of MXFP4 weights for SGLang's kernels: keep the checkpoint's layout."""
    from weft.plugins.sglang.dispatcher import WholeBlock

    if isinstance(getattr(layer, "dispatcher", None), WholeBlock):
        return None
    return original(method, layer)


def after_load_model(result: Any, runner: Any) -> None:
    """After ModelRunner.load_model: build before SGLang measures free memory and captures."""
    global _blocks
    layers = _layers(runner.model)
    server_args = resolved(runner.server_args)
    if not layers:
        if server_args.elastic_ep_backend == NAME:
            raise InvalidArgument(
                "--elastic-ep-backend weft needs --moe-a2a-backend weft and a model with MoE layers"
            )
        return
    check_applied(HOOKS)
    _check_server(server_args)
    settings = Settings.read("SGLANG")
    for layer, block in layers:
        check_experts(layer, form=settings.form)
        for owner, name, what in (
            (block, "is_hash", "token ids"),
            (_gate(block), "e_score_correction_bias_vl", "image tokens"),
        ):
            if getattr(owner, name, None) not in (None, False):
                raise InvalidArgument(
                    f"layer {layer.layer_id} routes by {what}; weft serves routing by logits only"
                )
    with torch.inference_mode(False):  # inference tensors are read-only elsewhere
        if _blocks is None:
            group = Group.from_torch(_processes(), device=device_of(runner), timeout=LOAD_TIMEOUT)
            if server_args.elastic_ep_backend is not None:
                group.one_machine(
                    "--elastic-ep-backend weft", fix="leave it out, or start without --nnodes"
                )
            _blocks = Blocks(group, _limits(server_args, settings), settings)
            end = end_server(os.getppid())
            if server_args.elastic_ep_backend is None:
                _blocks.watch = Watch(group, end=end)
            else:
                _blocks.watch = Watch(
                    group, end=end, grace=2 * elastic.RECOVERY_TIMEOUT, recovers=True
                )
                elastic.follow(group, runner)
        for layer, block in layers:
            if settings.form == "dispatcher":
                layer.dispatcher.all_to_all = _blocks.exchange(layer_of(layer))
                continue
            mlp = _shared_mlp(block)
            size = 0 if mlp is None else mlp.gate_up_proj.output_size // 2
            _blocks.add_block(layer_of(layer), shared=_shared_expert(block), shared_size=size)
    _blocks.announce(f"{len(layers)} MoE layers of {type(runner.model).__name__}")


def close() -> None:
    """Free what `after_load_model` built. Local and idempotent; also done at process exit."""
    global _blocks
    elastic.leave()
    if _blocks is not None:
        _blocks.close()
    _blocks = None


def _layers(model: Any) -> list[tuple[Any, Any]]:
    """Return weft's layers of experts, each with the block that calls it.

    Raises InvalidArgument for a block that weft does not serve.
    """
    from weft.plugins.sglang.dispatcher import Exchanged, WholeBlock

    forwards = [pkgutil.resolve_name(name) for name in FORWARDS]
    layers = []
    for block in model.modules():
        for layer in block.children():
            if not isinstance(getattr(layer, "dispatcher", None), WholeBlock | Exchanged):
                continue
            if type(block).forward not in forwards:
                served = ", ".join(name.rsplit(".", 2)[1] for name in FORWARDS)
                raise InvalidArgument(
                    f"{type(block).__name__} of {type(model).__name__} is not among the MoE blocks "
                    f"that weft serves: {served}; take another --moe-a2a-backend"
                )
            layers.append((layer, block))
    return layers


def _check_server(server_args: Any) -> None:
    """Raise InvalidArgument for flags whose features bypass the hooks.

    Two-batch overlap calls a block in parts. --enable-pdmux runs prefill and decode at the same
    time, so the order of calls may differ between ranks.
    """
    flags = {
        "enable_two_batch_overlap": "--enable-two-batch-overlap",
        "enable_torch_compile": "--enable-torch-compile",
        "enable_pdmux": "--enable-pdmux",
    }
    wrong = [flag for name, flag in flags.items() if getattr(server_args, name)]
    backend = server_args.elastic_ep_backend
    if backend not in (None, NAME):
        wrong.append(f"--elastic-ep-backend {backend}")
    if server_args.attn_cp_size > 1:
        wrong.append("--attn-cp-size")
    if getattr(server_args, "startup_weight_load_mode", "serial") != "serial":
        wrong.append("--startup-weight-load-mode")
    if wrong:
        raise InvalidArgument(
            f"--moe-a2a-backend weft does not serve {', '.join(wrong)}: leave that out"
        )
    missing = [] if backend is None else list(elastic.wrong_flags(server_args))
    if missing:
        raise InvalidArgument(
            f"--elastic-ep-backend weft needs {', '.join(missing)}: SGLang's collectives over all "
            "ranks, or results used before all ranks have theirs, do not survive a dead rank"
        )
    # With lora_target_modules set, SGLang refuses adapters of any other module.
    adapted = set(server_args.lora_target_modules or ())
    if server_args.enable_lora and (not adapted or adapted - ATTENTION):
        have = " ".join(sorted(adapted)) or "not given"
        raise InvalidArgument(
            f"--moe-a2a-backend weft serves LoRA on attention only, but --lora-target-modules is "
            f"{have}: name some of {' '.join(sorted(ATTENTION))}, or leave --enable-lora out"
        )


def _processes() -> Any:
    """Return the CPU process group of the expert-parallel ranks."""
    from sglang.srt.distributed import get_moe_ep_group

    return get_moe_ep_group().cpu_group


def _limits(server_args: Any, settings: Settings) -> Limits:
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import get_parallel

    graphs = server_args.cuda_graph_config.decode
    # SGLang fills in sizes even if --disable-cuda-graph turns off capture.
    sizes = [] if graphs.backend == Backend.DISABLED else [*(graphs.bs or []), graphs.max_bs or 0]
    batch = max(sizes, default=0) or DEFAULT_BATCH
    chunk = server_args.chunked_prefill_size or 0
    return Limits.from_server(
        batch * (server_args.speculative_num_draft_tokens or 1),
        chunk if chunk > 0 else server_args.max_prefill_tokens,
        attention_ranks=get_parallel().attn_tp_size,
        prefill_tokens=settings.prefill_tokens,
    )


def _gate(block: Any) -> Any:
    """Return the module that computes a block's router logits."""
    return block.router if type(block).__name__ == "GptOssSparseMoeBlock" else block.gate


def _shared_mlp(block: Any) -> Any:
    """Return a block's shared-expert MLP, or None."""
    return getattr(block, "shared_experts", getattr(block, "shared_expert", None))


def _shared_expert(block: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a block's shared expert, including its gate if it has one, or None."""
    mlp = _shared_mlp(block)
    return getattr(block, "_forward_shared_experts", mlp) if mlp is not None else None


# Forward passes.


def serve(
    original: Callable[..., Any],
    block: Any,
    hidden_states: torch.Tensor,
    forward_batch: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Around a MoE block's forward: SGLang routes, weft runs the rest."""
    from weft.plugins.sglang.dispatcher import Exchanged, WholeBlock

    dispatcher = block.experts.dispatcher
    if not isinstance(dispatcher, WholeBlock | Exchanged):
        return original(block, hidden_states, forward_batch, *rest, **kwargs)
    if _blocks is None:
        raise OutOfOrder(
            f"layer {block.layer_id} runs before weft's hook after ModelRunner.load_model did"
        )
    x = hidden_states.view(-1, hidden_states.shape[-1])
    topk, max_tokens = _route(block, x, forward_batch), max_tokens_over_ranks()
    with _blocks.logged():
        if isinstance(dispatcher, WholeBlock):
            out = _blocks.run(block.experts, x, topk.topk_ids, topk.topk_weights, max_tokens)
        else:
            out = _run_experts(block, dispatcher, x, topk, max_tokens)
    return out.view(hidden_states.shape)


def forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ModelRunner.forward: raise a group error, or continue without dead ranks.

    Weights that SGLang updated since the last pass take effect here, also in captured graphs.
    """
    if _blocks is not None:
        _blocks.reload_all()
    if _blocks is not None and elastic.is_on():
        return elastic.forward(
            lambda: original(runner, forward_batch, *args, **kwargs), _blocks.check, forward_batch
        )
    result = original(runner, forward_batch, *args, **kwargs)
    if _blocks is not None:
        _blocks.check()
    return result


def _route(block: Any, x: torch.Tensor, forward_batch: Any) -> Any:
    """Return SGLang's routing result: physical ids, -1 in padding rows of a graph's batch."""
    if x.shape[0] == 0:  # SGLang's kernels cannot be launched on empty tensors
        return block.topk.empty_topk_output(x.device, layer_id=block.layer_id)
    kind = type(block).__name__
    if kind == "DeepseekV2MoE":
        logits = block.gate(x, forward_batch=forward_batch)
    else:  # MiniMax-M2's gate is float32
        logits = _gate(block)(x.float() if kind == "MiniMaxM2MoE" else x)
    if isinstance(logits, tuple):  # a linear layer also returns its bias
        logits = logits[0]
    if hasattr(block.topk, "routing_inputs"):  # 0.5.23 handles replicas and padding itself
        return block.topk(x, logits)
    from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo

    replicas = None
    if not getattr(block, "is_nextn", False):
        replicas = ExpertLocationDispatchInfo.init_new(layer_id=block.layer_id)
    return block.topk(
        x,
        logits,
        num_token_non_padded=_num_valid_tokens(forward_batch),
        expert_location_dispatch_info=replicas,
    )


def _num_valid_tokens(forward_batch: Any) -> torch.Tensor | None:
    """Return the number of rows without padding, or None if SGLang does not keep it current.

    With one rank it is stale: a graph's buffer holds the value of another graph's capture.
    """
    from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded

    num_tokens: torch.Tensor | None = forward_batch.num_token_non_padded
    return num_tokens if enable_num_token_non_padded() else None


def max_tokens_over_ranks() -> int:
    """Return the largest token count over all ranks in this layer (identical on every rank)."""
    from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
    from sglang.srt.runtime_context import get_parallel

    counts: list[int] | None = get_dp_global_num_tokens()
    if not counts:
        raise OutOfOrder(
            "SGLang reported no rank's number of tokens in this forward pass, by which weft's "
            "ranks agree on rounds: report how the server was started"
        )
    ranks: int = get_parallel().attn_tp_size
    return -(-max(counts) // ranks)


def _run_experts(block: Any, dispatcher: Any, x: torch.Tensor, topk: Any, max_tokens: int) -> Any:
    """Run the experts with SGLang's runner, in as many rounds as the all-to-all needs."""
    out = torch.empty_like(x)
    step = dispatcher.all_to_all.max_tokens
    for start in range(0, max_tokens, step):  # the same number of rounds on every rank
        part, dispatcher.max_tokens = slice(start, start + step), min(step, max_tokens - start)
        chunk = topk._replace(topk_weights=topk.topk_weights[part], topk_ids=topk.topk_ids[part])
        out[part] = block.experts(x[part], chunk)
    shared = _shared_expert(block)
    if shared is not None and x.shape[0]:
        out += shared(x)
    return out


# Patched names.

_BLOCK = "self, hidden_states, forward_batch="
_MLP = "self, hidden_size, intermediate_size, hidden_act, quant_config=, reduce_results=, prefix="
_PLAIN_MLP = {"0.5.17": _MLP + ", tp_rank=, tp_size=", "0.5.23": _MLP + ", *, parallel_group="}
_MORE = ", gemm_output_zero_allocator=, input_ids=, input_ids_global=, skip_shared_experts="
# Forward methods of the supported MoE blocks: Qwen3-MoE, Qwen3-Next and -3.5, GLM-4.5, DeepSeek-V3,
# MiniMax-M2, GPT-OSS.
FORWARDS: dict[str, Parameters] = {
    SRT + "models.qwen3_moe.Qwen3MoeSparseMoeBlock.forward": _BLOCK,
    SRT + "models.glm4_moe.Glm4MoeSparseMoeBlock.forward": _BLOCK,
    SRT + "models.qwen2_moe.Qwen2MoeSparseMoeBlock.forward": {
        "0.5.17": _BLOCK,
        "0.5.23": _BLOCK + ", defer_finalize=",
    },
    SRT + "models.minimax_m2.MiniMaxM2MoE.forward": _BLOCK,
    SRT + "models.gpt_oss.GptOssSparseMoeBlock.forward": _BLOCK,
    SRT + "models.deepseek_v2.DeepseekV2MoE.forward": {
        "0.5.17": _BLOCK + _MORE,
        "0.5.23": _BLOCK + _MORE + ", return_moe_output=, leave_output_sum=",
    },
}
HOOKS = (
    Hook(SRT + "layers.moe.utils.MoeA2ABackend._missing_", "cls, value", function=alias),
    Hook(SRT + "arg_groups.overrides._a2a_ep_size", "view", function=expert_parallel_size),
    Hook(
        SRT + "arg_groups.overrides._a2a_fusion_adjustments", "view", function=shared_expert_fusion
    ),
    Hook(
        SRT + "layers.moe.utils.initialize_moe_config",
        {"0.5.17": "server_args", "0.5.23": ""},
        function=without_overlap,
    ),
    Hook(
        SRT + "server_args.ServerArgs._disable_breakable_cudagraph_if_incompatible",
        {"0.5.17": "self"},
        function=prefill_graphs,
    ),
    Hook(
        SRT + "arg_groups.cuda_graph_hook.disable_breakable_cudagraph_if_incompatible",
        {"0.5.23": "server_args"},
        function=prefill_graphs,
    ),
    Hook(
        SRT + "utils.common.require_mlp_tp_gather",
        {"0.5.17": "server_args", "0.5.23": "*, moe_a2a_backend="},
        function=agrees_on_counts,
    ),
    Hook(
        SRT + "managers.scheduler_components.dp_attn.MLPSyncBatchInfo._get_fallback_tensor",
        {"0.5.17": "self, device, dtype="},
        function=noncontiguous_fallback,
    ),
    Hook(
        SRT + "layers.moe.fused_moe_triton.layer.create_moe_dispatcher",
        {"0.5.17": "moe_runner_config", "0.5.23": "moe_runner_config, quant_method"},
        function=make_dispatcher,
    ),
    Hook(SRT + "models.glm4_moe.Glm4MoeMLP.__init__", _PLAIN_MLP, function=whole_shared_expert),
    Hook(SRT + "models.qwen2_moe.Qwen2MoeMLP.__init__", _PLAIN_MLP, function=whole_shared_expert),
    Hook(
        SRT + "layers.quantization.mxfp4.Mxfp4MoEMethod.process_weights_after_loading",
        "self, layer",
        function=keep_mxfp4,
    ),
    Hook(
        SRT + "models.deepseek_v2.DeepseekV2MLP.__init__",
        {
            "0.5.17": _MLP + ", tp_rank=, tp_size=, swiglu_limit=",
            "0.5.23": _MLP + ", swiglu_limit=, allow_fused_down=, *, parallel_group=",
        },
        function=whole_shared_expert,
    ),
    *(Hook(name, parameters, function=serve) for name, parameters in FORWARDS.items()),
    Hook(RUNNER + "load_model", "self", function=after_load_model, kind="AFTER"),
    Hook(RUNNER + "forward", FORWARD, function=forward),
    *elastic.HOOKS,
)
# Names that the hooks call and read.
_PARTS, _SHARED = "experts gate topk layer_id", " shared_experts"
_TOPK = SRT + "layers.moe.topk."
_CHOOSE = (
    "self, hidden_states, router_logits, *, num_token_non_padded=, expert_location_dispatch_info="
)
_DISPATCHER = SRT + "layers.moe.token_dispatcher."
KNOWN = (
    *elastic.KNOWN,
    Known(SRT + "server_args.MOE_A2A_BACKEND_CHOICES", {"0.5.17": None}),
    Known(
        SRT + "arg_groups.arg_utils.add_cli_args_from_dataclass",
        {"0.5.23": "parser, cls, *, fields="},
        names="choices",
    ),
    Known(SRT + "arg_groups.overrides.resolved_view", "server_args"),
    Known(SRT + "server_args.resolved_view", {"0.5.17": "server_args"}),
    Known(SRT + "arg_groups.cuda_graph_hook.resolved_view", {"0.5.23": "server_args"}),
    Known(
        SRT + "model_executor.cuda_graph_config.PhaseConfig",
        names="backend bs max_bs",
    ),
    Known(SRT + "model_executor.cuda_graph_config.Backend.DISABLED"),
    Known(SRT + "layers.moe.utils.MoeA2ABackend.CUSTOMIZED"),
    Known(SRT + "layers.moe.utils.MoeA2ABackend.is_customized", "self"),
    Known(SRT + "layers.moe.utils.get_moe_a2a_backend", ""),
    Known(SRT + "runtime_context.get_parallel", ""),
    Known(SRT + "runtime_context.get_exec", {"0.5.23": ""}),
    Known(SRT + "distributed.get_moe_ep_group", ""),
    Known(SRT + "layers.dp_attention.get_dp_global_num_tokens", ""),
    Known(
        SRT + "eplb.expert_location_dispatch.ExpertLocationDispatchInfo.init_new",
        {"0.5.17": "cls, layer_id"},
    ),
    Known(SRT + "model_executor.forward_batch_info.enable_num_token_non_padded", {"0.5.17": ""}),
    Known(_TOPK + "StandardTopKOutput"),
    Known(_TOPK + "TopK.empty_topk_output", "self, device, *, layer_id="),
    Known(
        _TOPK + "TopK.forward_cuda",
        {"0.5.17": _CHOOSE, "0.5.23": _CHOOSE + ", dynamic_expert_bias=, router_logits_partials="},
    ),
    Known(_TOPK + "TopK.routing_inputs", {"0.5.23": "self"}),
    Known(_DISPATCHER + "base.BaseDispatcher.__init__", "self"),
    Known(_DISPATCHER + "base.BaseDispatcher.dispatch", "self, hidden_states, topk_output"),
    Known(_DISPATCHER + "base.BaseDispatcher.combine", "self, combine_input"),
    Known(_DISPATCHER + "standard.StandardDispatchOutput"),
    Known(_DISPATCHER + "standard.StandardCombineInput"),
    Known(
        SRT + "layers.moe.fused_moe_triton.layer.FusedMoE.forward_impl",
        "self, hidden_states, topk_output, pre_quant_input=",
    ),
    Known(
        SRT + "layers.moe.fused_moe_triton.layer.FusedMoE.__init__",
        names="layer_id num_experts num_local_experts top_k hidden_size params_dtype with_bias "
        "intermediate_size_per_partition moe_ep_size moe_ep_rank moe_tp_size dispatcher "
        "num_fused_shared_experts moe_runner_config quant_method "
        "should_fuse_routed_scaling_factor_in_topk",
    ),
    Known(
        SRT + "layers.moe.moe_runner.base.MoeRunnerConfig",
        names="activation is_gated apply_router_weight_on_input routed_scaling_factor gemm1_alpha "
        "gemm1_clamp_limit swiglu_limit gate_up_interleaved",
    ),
    Known(SRT + "models.qwen3_moe.Qwen3MoeSparseMoeBlock.__init__", names=_PARTS),
    Known(
        SRT + "models.qwen2_moe.Qwen2MoeSparseMoeBlock.__init__",
        names=_PARTS + " shared_expert shared_expert_gate",
    ),
    Known(
        SRT + "models.qwen2_moe.Qwen2MoeSparseMoeBlock._forward_shared_experts",
        "self, hidden_states, apply_gate=",
    ),
    Known(SRT + "models.minimax_m2.MiniMaxM2MoE.__init__", names=_PARTS),
    Known(
        SRT + "models.gpt_oss.GptOssSparseMoeBlock.__init__",
        names="experts router topk layer_id",
    ),
    Known(SRT + "models.glm4_moe.Glm4MoeSparseMoeBlock.__init__", names=_PARTS + _SHARED),
    Known(
        SRT + "models.deepseek_v2.DeepseekV2MoE.__init__",
        names=_PARTS + _SHARED + " is_nextn is_hash",
    ),
    Known(SRT + "plugins.hook_registry.HookRegistry._patched"),
    Known(
        SRT + "plugins.hook_registry.HookRegistry.register",
        "cls, target, hook, hook_type=, *, source=",
    ),
)
