# SPDX-License-Identifier: Apache-2.0
"""Checks of SGLang's server flags, and hooks that depend on --moe-a2a-backend weft.

With any other all-to-all backend, a hook returns the result of the original function.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import torch

from weft.errors import InvalidArgument, SetupError
from weft.plugins.blocks import Limits
from weft.plugins.engine_api import ExpectedAPI
from weft.plugins.settings import Settings
from weft.plugins.sglang import elastic
from weft.plugins.sglang.hooks import NAME, SGLANG, SRT, Hook

DEFAULT_BATCH = 64  # tokens of a decode batch if SGLang captures no graph
# LoRA target modules outside MoE blocks, by SGLang's and PEFT's names.
ATTENTION = {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa", "kv_b_proj"),
}

_ON_GPU = "(experts stay on the GPUs: use more ranks)"
# Flags that not all versions have, and that are on if they are positive or not empty.
UNSUPPORTED = {
    "cpu_offload_gb": f"--cpu-offload-gb {_ON_GPU}",
    "offload_group_size": f"--offload-group-size {_ON_GPU}",
    "enable_paged_experts": f"--enable-paged-experts {_ON_GPU}",
    "kt_weight_path": f"--kt-weight-path {_ON_GPU}",
    "enforce_shared_experts_fusion": "--enforce-shared-experts-fusion (weft overlaps the shared "
    "expert: WEFT_SGLANG_OVERLAP)",
    "remote_instance_weight_loader_start_seed_via_transfer_engine": "--remote-instance-weight-"
    "loader-start-seed-via-transfer-engine (others would read rows in weft's order: use the NCCL "
    "backend)",
    "enable_nvidia_megakernel": "--enable-nvidia-megakernel (its kernels replace whole layers)",
}


def get_choice_lists() -> list[list[str]]:
    """Return the lists of choices that SGLang's parser has for its backend flags."""
    from sglang.srt import server_args

    choice_list: list[str] | None = getattr(server_args, "MOE_A2A_BACKEND_CHOICES", None)
    if choice_list is not None:
        return [choice_list]
    choice_lists = []
    # 0.5.23: in annotations
    for field in ("moe_a2a_backend", "speculative_moe_a2a_backend", "elastic_ep_backend"):
        choices = _read_choices(server_args.ServerArgs, field)
        if (
            not isinstance(choices, list)
            or _read_choices(server_args.ServerArgs, field) is not choices
        ):
            raise SetupError(
                f"SGLang's ServerArgs.{field} has no list of choices that weft could extend"
            )
        choice_lists.append(choices)
    return choice_lists


def _read_choices(owner: type, field: str) -> Any:
    metadata = get_type_hints(owner, include_extras=True)[field].__metadata__[0]
    return getattr(metadata, "choices", None)


def resolve_backend_alias(original: Callable[..., Any], backend: Any, value: object) -> Any:
    """Map "weft" to the member reserved for plug-ins; wraps MoeA2ABackend._missing_."""
    return backend.CUSTOMIZED if value == NAME else original(backend, value)


def override_ep_size(original: Callable[..., Any], view: Any) -> Any:
    """Set ep_size to tp_size, as for every all-to-all backend; wraps _a2a_ep_size."""
    return {"ep_size": view.tp_size} if view.moe_a2a_backend == NAME else original(view)


def disable_shared_expert_fusion(original: Callable[..., Any], view: Any) -> Any:
    """Disable fusion of the shared expert with routed experts; wraps _a2a_fusion_adjustments."""
    if view.moe_a2a_backend == NAME:
        return {"disable_shared_experts_fusion": True}
    return original(view)


def disable_overlap(original: Callable[..., Any], *server_args: Any) -> Any:
    """Disable SGLang's single-batch overlap; wraps initialize_moe_config.

    The overlap only affects blocks that weft replaces, and SGLang raises on Hopper, where it lacks
    kernels for it.
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
    """Proxy of the resolved flags without an all-to-all backend."""

    moe_a2a_backend = "none"

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def allow_prefill_graphs(original: Callable[..., Any], server_args: Any) -> Any:
    """Allow prefill in CUDA graphs; wraps the rules that exclude it unless a flag enables it.

    One rule lists the supported all-to-all backends. weft's calls can be captured, too, so that
    rule gets flags without a backend.
    """
    namespace = inspect.unwrap(original).__globals__
    resolved_view = namespace["resolved_view"]

    def get_view(server_args: Any) -> Any:
        view = resolved_view(server_args)
        return _NoBackend(view) if view.moe_a2a_backend == NAME else view

    namespace["resolved_view"] = get_view
    try:
        return original(server_args)
    finally:
        namespace["resolved_view"] = resolved_view


def requires_mlp_tp_gather(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return True for weft with DP attention; wraps require_mlp_tp_gather.

    All ranks then replay graphs of the same size.
    """
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    backend = kwargs.get("moe_a2a_backend")  # in 0.5.23 a draft model's backend, or None
    uses_weft = is_weft_backend() if backend is None else MoeA2ABackend(backend).is_customized()
    return (uses_weft and has_dp_attention()) or original(*args, **kwargs)


def get_noncontiguous_fallback(
    original: Callable[..., Any], info: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return a non-contiguous tensor; wraps MLPSyncBatchInfo._get_fallback_tensor.

    0.5.17 expands the tensor into the buffer of all ranks' counts. With one rank, the expansion of
    a contiguous tensor copies nothing, and torch raises when a tensor is written onto itself.
    """
    counts: torch.Tensor = original(info, *args, **kwargs)
    return counts.repeat_interleave(2)[::2]


def captures_scattered_tokens(original: Callable[..., bool]) -> bool:
    """Return True for weft; wraps _is_scattered_a2a_backend.

    With --enable-return-routed-experts, a rank then returns the experts of its own tokens, gathered
    over attention ranks, instead of the rows at its offset in a batch of all DP ranks.
    """
    return is_weft_backend() or original()


def has_dp_attention() -> bool:
    """Whether DP attention is enabled."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if hasattr(parallel, "attn_dp_enabled"):  # 0.5.23, where enable_dp_attention stays false
        return bool(parallel.attn_dp_enabled)
    return bool(parallel.enable_dp_attention)


def is_weft_backend() -> bool:
    """Whether weft is the all-to-all backend of the layers being constructed or run."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    return bool(get_moe_a2a_backend().is_customized())


def check_server(server_args: Any) -> None:
    """Raise InvalidArgument for flags that weft does not support, with what to use instead.

    Two-batch overlap calls parts of a block. --enable-pdmux runs prefill and decode concurrently,
    so the order of calls may differ between ranks.
    """
    backend = server_args.elastic_ep_backend
    startup = getattr(server_args, "startup_weight_load_mode", "serial")
    # DeepSeek-V4.1's late layers then run on fewer rows than SGLang's mask of padding rows counts.
    # 0.5.17 reads captured experts at the offset of a DP rank, where weft's router wrote none.
    captures_experts = (
        server_args.enable_return_routed_experts
        and SGLANG.match_release(SGLANG.get_version()) == "0.5.17"
    )
    replays_tails = getattr(server_args, "enable_decoder_swa_bounded_replay", None)
    cache = getattr(server_args, "weight_cache_mode", "off")
    flags = (
        (
            server_args.enable_two_batch_overlap,
            "--enable-two-batch-overlap (weft overlaps within a batch: WEFT_SGLANG_OVERLAP)",
        ),
        (server_args.enable_torch_compile, "--enable-torch-compile (use CUDA graphs alone)"),
        (server_args.enable_pdmux, "--enable-pdmux (use --disaggregation-mode)"),
        (backend not in (None, NAME), f"--elastic-ep-backend {backend} (use weft)"),
        (server_args.attn_cp_size > 1, "--attn-cp-size (use --attn-dp-size)"),
        (
            replays_tails,
            "decoder SWA bounded replay (pass --no-enable-decoder-swa-bounded-replay)",
        ),
        (captures_experts, "--enable-return-routed-experts (use SGLang 0.5.23)"),
        (startup != "serial", f"--startup-weight-load-mode {startup} (use serial)"),
        # weft reorders weights in place, which another process would map, too.
        (cache != "off", f"--weight-cache-mode {cache} (use off)"),
        *((_is_set(server_args, name), text) for name, text in UNSUPPORTED.items()),
    )
    if unsupported := [text for is_set, text in flags if is_set]:
        raise InvalidArgument(f"--moe-a2a-backend weft does not support {', '.join(unsupported)}")
    required = [] if backend is None else list(elastic.list_missing_flags(server_args))
    if required:
        raise InvalidArgument(
            f"--elastic-ep-backend weft needs {', '.join(required)}: without them, SGLang "
            "runs collectives over all ranks, or uses results before all ranks have completed a "
            "pass, and neither survives a dead rank"
        )
    # With lora_target_modules set, SGLang rejects adapters of any other module.
    lora_modules = set(server_args.lora_target_modules or ())
    if server_args.enable_lora and (not lora_modules or lora_modules - ATTENTION):
        actual = " ".join(sorted(lora_modules)) or "not given"
        raise InvalidArgument(
            f"--moe-a2a-backend weft supports LoRA on attention only, but --lora-target-modules "
            f"is {actual}: pass a subset of {' '.join(sorted(ATTENTION))}, or remove --enable-lora"
        )


def _is_set(server_args: Any, name: str) -> bool:
    value = getattr(server_args, name, None)
    return value > 0 if isinstance(value, int | float) else bool(value)


def check_unused(passed: Any, server_args: Any, model: Any) -> None:
    """Raise InvalidArgument if the user chose weft, but no layer of the model uses it.

    Args:
        passed: Flags as the user passed them.
        server_args: Resolved flags. Some flags change the all-to-all backend.
        model: SGLang's model.
    """
    if server_args.elastic_ep_backend == NAME:
        raise InvalidArgument(
            "--elastic-ep-backend weft needs --moe-a2a-backend weft and a model with MoE layers"
        )
    if passed.moe_a2a_backend != NAME or server_args.pp_size > 1:
        return
    if server_args.moe_a2a_backend != NAME:
        raise InvalidArgument(
            f"SGLang replaced --moe-a2a-backend weft by {server_args.moe_a2a_backend!r} because of "
            "another flag: remove --enable-waterfill and --dwdp-size, or --moe-a2a-backend weft"
        )
    raise InvalidArgument(
        f"{type(model).__name__} has no MoE layers that weft runs: remove --moe-a2a-backend weft"
    )


def compute_limits(server_args: Any, settings: Settings) -> Limits:
    """Compute the limits from the largest decode graph and the prefill chunk."""
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import get_parallel

    graphs = server_args.cuda_graph_config.decode
    # SGLang sets sizes even if --disable-cuda-graph disables capture.
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
    Hook(
        SRT + "layers.moe.utils.MoeA2ABackend._missing_",
        "cls, value",
        function=resolve_backend_alias,
    ),
    Hook(SRT + "arg_groups.overrides._a2a_ep_size", "view", function=override_ep_size),
    Hook(
        SRT + "arg_groups.overrides._a2a_fusion_adjustments",
        "view",
        function=disable_shared_expert_fusion,
    ),
    Hook(
        SRT + "layers.moe.utils.initialize_moe_config",
        {"0.5.17": "server_args", "0.5.23": ""},
        function=disable_overlap,
    ),
    Hook(
        SRT + "server_args.ServerArgs._disable_breakable_cudagraph_if_incompatible",
        {"0.5.17": "self"},
        function=allow_prefill_graphs,
    ),
    Hook(
        SRT + "arg_groups.cuda_graph_hook.disable_breakable_cudagraph_if_incompatible",
        {"0.5.23": "server_args"},
        function=allow_prefill_graphs,
    ),
    Hook(
        SRT + "utils.common.require_mlp_tp_gather",
        {"0.5.17": "server_args", "0.5.23": "*, moe_a2a_backend="},
        function=requires_mlp_tp_gather,
    ),
    Hook(
        SRT + "state_capturer.routed_experts._is_scattered_a2a_backend",
        {"0.5.23": ""},
        function=captures_scattered_tokens,
    ),
    Hook(
        SRT + "managers.scheduler_components.dp_attn.MLPSyncBatchInfo._get_fallback_tensor",
        {"0.5.17": "self, device, dtype="},
        function=get_noncontiguous_fallback,
    ),
)
# Functions and classes that the hooks use.
EXPECTED_API = (
    ExpectedAPI(SRT + "server_args.MOE_A2A_BACKEND_CHOICES", {"0.5.17": None}),
    ExpectedAPI(
        SRT + "arg_groups.arg_utils.add_cli_args_from_dataclass",
        {"0.5.23": "parser, cls, *, fields="},
        attributes="choices",
    ),
    ExpectedAPI(SRT + "arg_groups.overrides.resolved_view", "server_args"),
    ExpectedAPI(SRT + "server_args.resolved_view", {"0.5.17": "server_args"}),
    ExpectedAPI(SRT + "arg_groups.cuda_graph_hook.resolved_view", {"0.5.23": "server_args"}),
    ExpectedAPI(
        SRT + "model_executor.cuda_graph_config.PhaseConfig",
        attributes="backend bs max_bs",
    ),
    ExpectedAPI(SRT + "model_executor.cuda_graph_config.Backend.DISABLED"),
    ExpectedAPI(SRT + "layers.moe.utils.MoeA2ABackend.CUSTOMIZED"),
    ExpectedAPI(SRT + "layers.moe.utils.MoeA2ABackend.is_customized", "self"),
    ExpectedAPI(SRT + "layers.moe.utils.get_moe_a2a_backend", ""),
    ExpectedAPI(SRT + "runtime_context.get_parallel", ""),
    ExpectedAPI(SRT + "runtime_context.get_exec", {"0.5.23": ""}),
)
