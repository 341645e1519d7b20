# SPDX-License-Identifier: Apache-2.0
"""Flags of SGLang's server: what --moe-a2a-backend weft implies, refuses and limits.

With any other all-to-all backend every hook returns what the original does.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import torch

from weft.errors import InvalidArgument, SetupError
from weft.plugins.blocks import Limits
from weft.plugins.names import Known
from weft.plugins.settings import Settings
from weft.plugins.sglang import elastic
from weft.plugins.sglang.hooks import NAME, SRT, Hook

DEFAULT_BATCH = 64  # tokens of a decode batch if no graph is captured
# LoRA target modules outside MoE blocks, by SGLang's and PEFT's names.
ATTENTION = {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa", "kv_b_proj"),
}


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


def check_server(server_args: Any) -> None:
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


def limits_of(server_args: Any, settings: Settings) -> Limits:
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
)
# Names that the hooks call and read.
KNOWN = (
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
)
