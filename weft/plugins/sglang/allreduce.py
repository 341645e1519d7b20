# SPDX-License-Identifier: Apache-2.0
"""All-reduces of SGLang's tensor parallelism, fused with residual and RMSNorm.

    WEFT_SGLANG_ALLREDUCE=1 python3 -m sglang.launch_server --tp 4 ...

SGLang fuses an all-reduce with the following norm where a gate of its FlashInfer path allows it.
These hooks replace the gate, the fused call and the choice of backend for plain all-reduces.
SGLang still runs what weft does not serve: more tokens than FUSE_ALLREDUCE_MAX_BATCH_SIZE, other
widths and dtypes, and groups other than the tensor-parallel one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from weft.allreduce.operator import AllReduce
from weft.errors import InvalidArgument, WeftError
from weft.group import Group
from weft.leases import Lease, lease
from weft.plugins.faults import Watch
from weft.plugins.names import Known
from weft.plugins.settings import Settings
from weft.plugins.sglang.hooks import (
    FORWARD,
    RUNNER,
    SGLANG,
    SRT,
    Hook,
    check_applied,
    device_of,
    end_server,
    install,
    resolved,
)

SWITCH = "WEFT_SGLANG_ALLREDUCE"
METHOD = "weft"  # identifies weft among SGLang's out-of-place all-reduce methods
# A norm with one of these settings is not the RMSNorm of SGLang's fused kernels.
UNLIKE = (
    "variance_size_override",
    "cast_x_before_out_mul",
    "fp32_residual",
    "override_orig_dtype",
)

_log = logging.getLogger(__name__)
_live: TensorParallel | None = None


def register() -> None:
    """Install the hooks if WEFT_SGLANG_ALLREDUCE is set.

    SGLang has no flag for this all-reduce, and it only logs exceptions of plug-ins. An invalid
    setup therefore raises SystemExit, so that no other backend serves silently instead.
    """
    if os.environ.get(SWITCH, "").strip() in ("", "0"):
        return
    try:
        Settings.read("SGLANG")
        SGLANG.check((*HOOKS, *KNOWN))
    except WeftError as error:
        raise SystemExit(f"weft in SGLang: {error}") from error
    install(HOOKS)


class TensorParallel:
    """This rank's all-reduces of the tensor-parallel group.

    `fuses` tells whether layers may leave their sums to the following norm. It is true if SGLang
    lists the model as fusing, and the sums after both attention and experts are over this group.
    """

    def __init__(self, device: torch.device, *, model_fuses: bool) -> None:
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers.moe.utils import get_moe_a2a_backend

        tensor = parallel_state.get_tp_group()
        experts = parallel_state.get_moe_ep_group()
        if experts.world_size == 1:
            experts = parallel_state.get_moe_tp_group()
        self.ranks, self.max_tokens = list(tensor.ranks), _most_tokens()
        parts = (parallel_state.get_attn_tp_group(), experts)
        # With an all-to-all the experts' results return summed, and nothing is left to fuse.
        own = get_moe_a2a_backend().is_none() and all(map(self.spans, parts))
        self.fuses = model_fuses and own
        self.timeout = Settings.read("SGLANG").timeout
        ranks = Group.from_torch(tensor.cpu_group, device=device, timeout=self.timeout)
        self.group = ranks.require_one_host(
            f"{SWITCH}=1", fix=f"unset {SWITCH}, or keep --tp within one host"
        )
        self._watch = Watch(self.group, end=end_server(os.getppid()))
        self._leases: dict[tuple[int, torch.dtype], Lease[AllReduce]] = {}

    def spans(self, coordinator: Any) -> bool:
        """Whether a coordinator is SGLang's tensor-parallel group under any of its names."""
        return list(coordinator.ranks) == self.ranks

    def serve(self, hidden: int, dtype: torch.dtype) -> None:
        """Create the operator for a model's rows unless it exists. Collective."""
        if (hidden, dtype) in self._leases:
            return
        sizes: dict[str, Any] = {"max_tokens": self.max_tokens, "hidden": hidden, "dtype": dtype}
        self._leases[hidden, dtype] = lease(
            self.group, AllReduce, **sizes, timeout=self.timeout, first_timeout=self.timeout
        )
        if self.group.rank == 0:
            _log.info(
                "all-reduces of %d tensor-parallel ranks by weft: up to %d tokens of %d x %s, %s, "
                "%d MiB a rank",
                self.group.size,
                self.max_tokens,
                hidden,
                dtype,
                "fused with residual and norm" if self.fuses else "sums alone",
                AllReduce.memory_bytes(ranks=self.group.size, **sizes) >> 20,
            )

    def operator(self, rows: torch.Tensor) -> AllReduce | None:
        """Return the operator that can sum these rows, or None. Equal on all ranks."""
        owner = self._leases.get((rows.shape[-1], rows.dtype)) if rows.dim() == 2 else None
        if (
            owner is None
            or not 0 < len(rows) <= self.max_tokens
            or rows.device != self.group.device
            or not rows.is_contiguous()
            or rows.data_ptr() % 16
        ):
            return None
        return owner.operator

    def check(self) -> None:
        """Raise a group error. Reads host memory only."""
        for each in self._leases.values():
            if each.operator.broken:
                each.operator.check()

    def close(self) -> None:
        """Free operators and group."""
        self._watch.close()
        for each in self._leases.values():
            try:
                each.close()
            except WeftError as error:  # the engine is shutting down
                _log.warning("closing an all-reduce: %s", error)
        self.group.close()


def after_load_model(result: object, runner: Any) -> None:
    """After ModelRunner.load_model: allocate before SGLang measures free memory and captures."""
    global _live
    if not Settings.read("SGLANG").allreduce:
        return
    check_applied(HOOKS)
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled

    server_args = resolved(runner.server_args)
    if is_dp_attention_enabled():
        raise InvalidArgument(
            f"{SWITCH}=1 serves tensor parallelism, but with --enable-dp-attention each rank has "
            "its own tokens: leave one of the two out"
        )
    if server_args.enable_pdmux:
        raise InvalidArgument(
            f"{SWITCH}=1 serves one stream, but with --enable-pdmux prefill and decode reduce on "
            "two streams at the same time: leave one of the two out"
        )
    if parallel_state.get_tp_group().world_size == 1:
        return
    if _live is None:
        _live = TensorParallel(device_of(runner), model_fuses=_model_fuses(runner, server_args))
    _live.serve(runner.model_config.hidden_size, runner.model_config.dtype)


def may_fuse(original: Callable[..., bool], batch_size: int) -> bool:
    """Around the gate that lets layers leave their sum to the next norm's fused kernel.

    A compiled layer keeps all-reduces and norms separate; plain all-reduces are opaque to Dynamo.
    """
    if _live is None or not _live.fuses:
        return original(batch_size)
    return not torch.compiler.is_compiling() and 0 < batch_size <= _live.max_tokens


def sum_and_norm(
    original: Callable[..., Any],
    norm_module: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post_residual_addition: torch.Tensor | None,
    weight: torch.Tensor,
    use_attn_tp_group: bool = True,
) -> Any:
    """Around _forward_with_allreduce_fusion; `x` is this rank's partial sum.

    SGLang's own function assumes that `x` is already reduced if fusion is not possible. Here such
    rows are reduced first, and the norm runs by itself.
    """
    if _live is None or not _live.fuses or residual is None:
        return original(norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group)
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
    operator = _live.operator(x)
    if operator is None or not _fits(norm_module, x, residual, weight):
        from sglang.srt.distributed import parallel_state

        # The norm may write into its residual, to which other code holds references.
        return norm_module.forward(parallel_state.get_tp_group().all_reduce(x), residual.clone())
    bias = 0.0
    if weight is getattr(norm_module, "gemma_weight", None):  # 1 + weight, rounded
        weight, bias = norm_module.weight, 1.0
    result = operator.fused(
        x,
        residual=residual,
        weight=weight,
        eps=norm_module.variance_epsilon,
        weight_bias=bias,
    )
    return result.norm, result.residual


def select_method(
    original: Callable[..., str | None],
    self: Any,
    input_: torch.Tensor,
    should_use_pymscclpp_allreduce: bool | None = None,
) -> str | None:
    """Around GroupCoordinator._resolve_outplace_all_reduce_method: select weft."""
    if _operator(self, input_) is not None:
        return METHOD
    return original(self, input_, should_use_pymscclpp_allreduce)


def before_flashinfer(original: Callable[..., bool], self: Any, input_: torch.Tensor) -> bool:
    """Around GroupCoordinator._can_use_flashinfer_allreduce, which precedes `select_method`."""
    if _live is not None and _live.spans(self):
        return False
    return original(self, input_)


def sum_rows(
    original: Callable[..., torch.Tensor],
    self: Any,
    input_: torch.Tensor,
    outplace_all_reduce_method: str,
) -> torch.Tensor:
    """Around GroupCoordinator._all_reduce_out_place; compiled layers pass the method "auto"."""
    if outplace_all_reduce_method in (METHOD, "auto"):
        operator = _operator(self, input_)
        if operator is not None:
            out = operator.fused(input_).out
            assert out is not None
            return out
    return original(self, input_, outplace_all_reduce_method)


def skip_workspaces(
    original: Callable[..., None],
    max_token_num: int,
    hidden_dim: int,
    dtype: torch.dtype,
    use_oneshot: bool | None = None,
) -> None:
    """Around pre_initialize_workspaces: skip FlashInfer's workspaces, which would be unused."""
    if _live is None or not _live.fuses:
        original(max_token_num, hidden_dim, dtype, use_oneshot)


def after_forward(result: object, runner: Any, *args: Any, **options: Any) -> None:
    """After ModelRunner.forward: raise if the group is broken."""
    if _live is not None:
        _live.check()


def close() -> None:
    """Free all operators; SGLang then runs its own all-reduces. Local and idempotent."""
    global _live
    live, _live = _live, None
    if live is not None:
        live.close()


def _model_fuses(runner: Any, server_args: Any) -> bool:
    """Whether SGLang or the user enabled all-reduce fusion for the model."""
    from sglang.srt.arg_groups.overrides import _FLASHINFER_ALLREDUCE_FUSION_ARCHS

    listed = runner.model_config.hf_config.architectures[0] in _FLASHINFER_ALLREDUCE_FUSION_ARCHS
    return listed or server_args.flashinfer_allreduce_fusion_backend is not None


def _most_tokens() -> int:
    """Return the number of rows up to which SGLang fuses all-reduces."""
    try:
        from sglang.srt.layers.layer_boundary import FUSE_ALLREDUCE_MAX_BATCH_SIZE  # 0.5.23
    except ImportError:
        from sglang.srt.layers.communicator import FUSE_ALLREDUCE_MAX_BATCH_SIZE
    return int(FUSE_ALLREDUCE_MAX_BATCH_SIZE)


def _operator(coordinator: Any, rows: torch.Tensor) -> AllReduce | None:
    if _live is None or not _live.spans(coordinator):
        return None
    return _live.operator(rows)


def _fits(norm: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the fused kernel supports this norm and these tensors."""
    return (
        not any(getattr(norm, name, None) for name in UNLIKE)
        and residual.dtype == x.dtype
        and residual.shape == x.shape
        and residual.is_contiguous()
        and residual.data_ptr() % 16 == 0
        and weight.dtype in (x.dtype, torch.float32)
        and weight.is_contiguous()
    )


_STATE = SRT + "distributed.parallel_state."
_NORMS = SRT + "layers.layernorm."
_BOUNDARY = SRT + "layers.layer_boundary."
HOOKS = (
    Hook(RUNNER + "load_model", "self", function=after_load_model, kind="AFTER"),
    Hook(RUNNER + "forward", FORWARD, function=after_forward, kind="AFTER"),
    Hook(
        SRT + "layers.communicator.apply_flashinfer_allreduce_fusion",
        {"0.5.17": "batch_size"},
        function=may_fuse,
    ),
    Hook(
        _BOUNDARY + "residual.add_norm.flashinfer_ar_fusion_applies",
        {"0.5.23": "batch_size"},
        function=may_fuse,
    ),
    Hook(
        _STATE + "GroupCoordinator._can_use_flashinfer_allreduce",
        {"0.5.23": "self, input_"},
        function=before_flashinfer,
    ),
    Hook(
        _NORMS + "_forward_with_allreduce_fusion",
        "norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group=",
        function=sum_and_norm,
    ),
    Hook(
        _STATE + "GroupCoordinator._resolve_outplace_all_reduce_method",
        "self, input_, should_use_pymscclpp_allreduce=",
        function=select_method,
    ),
    Hook(
        _STATE + "GroupCoordinator._all_reduce_out_place",
        "self, input_, outplace_all_reduce_method",
        function=sum_rows,
    ),
    Hook(
        SRT + "layers.flashinfer_comm_fusion.pre_initialize_workspaces",
        "max_token_num, hidden_dim, dtype, use_oneshot=",
        function=skip_workspaces,
    ),
)
KNOWN = (
    Known(_STATE + "get_tp_group", ""),
    Known(_STATE + "get_attn_tp_group", ""),
    Known(_STATE + "get_moe_ep_group", ""),
    Known(_STATE + "get_moe_tp_group", ""),
    Known(_STATE + "GroupCoordinator.__init__", names="ranks world_size cpu_group"),
    Known(_STATE + "GroupCoordinator.all_reduce", "self, input_"),
    Known(_NORMS + "RMSNorm.__init__", names=" ".join((*UNLIKE, "weight", "variance_epsilon"))),
    Known(_NORMS + "GemmaRMSNorm.__init__", names="weight variance_epsilon"),
    Known(_NORMS + "GemmaRMSNorm.forward_with_allreduce_fusion", names="gemma_weight"),
    Known(SRT + "arg_groups.overrides._FLASHINFER_ALLREDUCE_FUSION_ARCHS"),
    Known(SRT + "layers.communicator.FUSE_ALLREDUCE_MAX_BATCH_SIZE", {"0.5.17": None}),
    Known(_BOUNDARY + "FUSE_ALLREDUCE_MAX_BATCH_SIZE", {"0.5.23": None}),
    Known(SRT + "arg_groups.overrides.resolved_view", "server_args"),
    Known(SRT + "layers.dp_attention.is_dp_attention_enabled", ""),
    Known(SRT + "layers.moe.utils.get_moe_a2a_backend", ""),
    Known(SRT + "plugins.hook_registry.HookRegistry._patched"),
)
