# SPDX-License-Identifier: Apache-2.0
"""All-reduces of SGLang's tensor parallelism, fused with residual and RMSNorm.

    WEFT_SGLANG_ALLREDUCE=1 python3 -m sglang.launch_server --tp 4 ...

SGLang fuses an all-reduce with the following norm if a condition of its FlashInfer path is true.
These hooks replace the condition, the fused call and the choice of backend for plain all-reduces.
SGLang still runs what weft does not support: more tokens than FUSE_ALLREDUCE_MAX_BATCH_SIZE, other
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
from weft.plugins.engine_api import ExpectedAPI
from weft.plugins.faults import Watch
from weft.plugins.settings import Settings
from weft.plugins.sglang import sleep
from weft.plugins.sglang.hooks import (
    FORWARD,
    RUNNER,
    SGLANG,
    SRT,
    Hook,
    check_applied,
    create_server_terminator,
    get_model_device,
    install,
    resolve_flags,
)

SWITCH = "WEFT_SGLANG_ALLREDUCE"
METHOD_NAME = "weft"  # identifies weft among SGLang's out-of-place all-reduce methods
# A norm with one of these settings is not the RMSNorm of SGLang's fused kernels.
UNSUPPORTED_NORM_SETTINGS = (
    "variance_size_override",
    "cast_x_before_out_mul",
    "fp32_residual",
    "override_orig_dtype",
)

_log = logging.getLogger(__name__)
_tensor_parallel: TensorParallel | None = None


def register() -> None:
    """Install the hooks if WEFT_SGLANG_ALLREDUCE is set.

    SGLang has no flag for this all-reduce, and it only logs exceptions of plug-ins. An invalid
    setup therefore raises SystemExit, so that SGLang does not silently use another backend.
    """
    if os.environ.get(SWITCH, "").strip() in ("", "0"):
        return
    try:
        Settings.read("SGLANG")
        SGLANG.check((*HOOKS, *EXPECTED_API))
    except WeftError as error:
        raise SystemExit(f"weft in SGLang: {error}") from error
    install(HOOKS)


class TensorParallel:
    """This rank's all-reduces of the tensor-parallel group.

    `can_fuse_sums`: whether the following norm may compute a layer's sum. It is true if SGLang
    enables fusion for the model, and the sums after attention and experts are over this group.
    """

    def __init__(self, device: torch.device, *, is_fusion_enabled: bool) -> None:
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers.moe.utils import get_moe_a2a_backend

        tensor = parallel_state.get_tp_group()
        experts = parallel_state.get_moe_ep_group()
        if experts.world_size == 1:
            experts = parallel_state.get_moe_tp_group()
        self.ranks, self.max_tokens = list(tensor.ranks), _read_max_fused_tokens()
        sum_groups = (parallel_state.get_attn_tp_group(), experts)
        # An all-to-all returns summed results, so there is nothing to fuse.
        sums_over_group = get_moe_a2a_backend().is_none() and all(
            map(self.is_same_group, sum_groups)
        )
        self.can_fuse_sums = is_fusion_enabled and sums_over_group
        self.timeout = Settings.read("SGLANG").timeout
        group = Group.from_torch(tensor.cpu_group, device=device, timeout=self.timeout)
        self.group = group.require_one_host(
            f"{SWITCH}=1", fix=f"unset {SWITCH}, or keep --tp within one host"
        )
        self._watch = Watch(self.group, end_server=create_server_terminator(os.getppid()))
        self._leases: dict[tuple[int, torch.dtype], Lease[AllReduce]] = {}

    def is_same_group(self, coordinator: Any) -> bool:
        """Whether a coordinator has the ranks of SGLang's tensor-parallel group."""
        return list(coordinator.ranks) == self.ranks

    def add_operator(self, hidden: int, dtype: torch.dtype) -> None:
        """Create the operator for a model's rows, unless it exists. Collective."""
        if (hidden, dtype) in self._leases:
            return
        sizes: dict[str, Any] = {"max_tokens": self.max_tokens, "hidden": hidden, "dtype": dtype}
        self._leases[hidden, dtype] = lease(
            self.group, AllReduce, **sizes, timeout=self.timeout, first_timeout=self.timeout
        )
        if self.group.rank == 0:
            _log.info(
                "weft runs the all-reduces of %d tensor-parallel ranks: up to %d tokens of %d x "
                "%s, %s, %d MiB per rank",
                self.group.size,
                self.max_tokens,
                hidden,
                dtype,
                "fused with residual and norm" if self.can_fuse_sums else "without fusion",
                AllReduce.memory_bytes(ranks=self.group.size, **sizes) >> 20,
            )

    def find_operator(self, rows: torch.Tensor) -> AllReduce | None:
        """Return the operator that supports these rows, or None. Same result on all ranks."""
        leased = self._leases.get((rows.shape[-1], rows.dtype)) if rows.dim() == 2 else None
        if (
            leased is None
            or not 0 < len(rows) <= self.max_tokens
            or rows.device != self.group.device
            or not rows.is_contiguous()
            or rows.data_ptr() % 16
        ):
            return None
        return leased.operator

    def check(self) -> None:
        """Raise the group error if an operator is broken. Reads host memory only."""
        for leased in self._leases.values():
            if leased.operator.broken:
                leased.operator.check()

    def close(self) -> None:
        """Free operators and group."""
        self._watch.close()
        for leased in self._leases.values():
            try:
                leased.close()
            except WeftError as error:  # the engine is shutting down
                _log.warning("failed to close an all-reduce: %s", error)
        self.group.close()


def after_load_model(result: object, runner: Any) -> None:
    """Create the operators after ModelRunner.load_model.

    SGLang measures free memory and captures graphs later.
    """
    global _tensor_parallel
    if not Settings.read("SGLANG").allreduce:
        return
    check_applied(HOOKS)
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled

    server_args = resolve_flags(runner.server_args)
    if is_dp_attention_enabled():
        raise InvalidArgument(
            f"{SWITCH}=1 needs the same tokens on all ranks, but with --enable-dp-attention each "
            "rank has different ones: remove one of the two"
        )
    if server_args.enable_pdmux:
        raise InvalidArgument(
            f"{SWITCH}=1 needs one stream, but with --enable-pdmux prefill and decode use two "
            "streams concurrently: remove one of the two"
        )
    if parallel_state.get_tp_group().world_size == 1:
        return
    if _tensor_parallel is None:
        _tensor_parallel = TensorParallel(
            get_model_device(runner), is_fusion_enabled=_is_fusion_enabled(runner, server_args)
        )
    _tensor_parallel.add_operator(runner.model_config.hidden_size, runner.model_config.dtype)


def can_fuse(original: Callable[..., bool], batch_size: int) -> bool:
    """Whether the next norm may compute a layer's sum; wraps SGLang's condition for fusion.

    Not in a compiled layer: Dynamo supports plain all-reduces only, as opaque operators.
    """
    if _tensor_parallel is None or not _tensor_parallel.can_fuse_sums:
        return original(batch_size)
    return not torch.compiler.is_compiling() and 0 < batch_size <= _tensor_parallel.max_tokens


def reduce_and_norm(
    original: Callable[..., Any],
    norm_module: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post_residual_addition: torch.Tensor | None,
    weight: torch.Tensor,
    use_attn_tp_group: bool = True,
) -> Any:
    """All-reduce the partial sum `x` and apply the norm; wraps _forward_with_allreduce_fusion.

    If fusion is not possible, SGLang's function assumes that `x` is already reduced. This one
    reduces `x` before the norm.
    """
    if _tensor_parallel is None or not _tensor_parallel.can_fuse_sums or residual is None:
        return original(norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group)
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
    operator = _tensor_parallel.find_operator(x)
    if operator is None or not _is_supported(norm_module, x, residual, weight):
        from sglang.srt.distributed import parallel_state

        # The norm may write into its residual, and other code may use that tensor later.
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
    """Select weft; wraps GroupCoordinator._resolve_outplace_all_reduce_method."""
    if _find_operator(self, input_) is not None:
        return METHOD_NAME
    return original(self, input_, should_use_pymscclpp_allreduce)


def disable_flashinfer(original: Callable[..., bool], self: Any, input_: torch.Tensor) -> bool:
    """Return False, so that `select_method` runs; wraps _can_use_flashinfer_allreduce."""
    if _tensor_parallel is not None and _tensor_parallel.is_same_group(self):
        return False
    return original(self, input_)


def all_reduce_rows(
    original: Callable[..., torch.Tensor],
    self: Any,
    input_: torch.Tensor,
    outplace_all_reduce_method: str,
) -> torch.Tensor:
    """All-reduce rows; wraps GroupCoordinator._all_reduce_out_place.

    Compiled layers pass the method "auto".
    """
    if outplace_all_reduce_method in (METHOD_NAME, "auto"):
        operator = _find_operator(self, input_)
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
    """Skip FlashInfer's workspaces, which would be unused; wraps pre_initialize_workspaces."""
    if _tensor_parallel is None or not _tensor_parallel.can_fuse_sums:
        original(max_token_num, hidden_dim, dtype, use_oneshot)


def after_forward(result: object, runner: Any, *args: Any, **options: Any) -> None:
    """Raise if the group is broken; runs after ModelRunner.forward."""
    if _tensor_parallel is not None:
        _tensor_parallel.check()


def close() -> None:
    """Free all operators; SGLang then uses its own all-reduces. Local and idempotent."""
    global _tensor_parallel
    closing, _tensor_parallel = _tensor_parallel, None
    if closing is not None:
        closing.close()


def _is_fusion_enabled(runner: Any, server_args: Any) -> bool:
    """Whether SGLang or the user enabled all-reduce fusion for the model."""
    from sglang.srt.arg_groups.overrides import _FLASHINFER_ALLREDUCE_FUSION_ARCHS

    is_listed = runner.model_config.hf_config.architectures[0] in _FLASHINFER_ALLREDUCE_FUSION_ARCHS
    return is_listed or server_args.flashinfer_allreduce_fusion_backend is not None


def _read_max_fused_tokens() -> int:
    """Return SGLang's maximum number of rows for a fused all-reduce."""
    try:
        from sglang.srt.layers.layer_boundary import FUSE_ALLREDUCE_MAX_BATCH_SIZE  # 0.5.23
    except ImportError:
        from sglang.srt.layers.communicator import FUSE_ALLREDUCE_MAX_BATCH_SIZE
    return int(FUSE_ALLREDUCE_MAX_BATCH_SIZE)


def _find_operator(coordinator: Any, rows: torch.Tensor) -> AllReduce | None:
    if _tensor_parallel is None or not _tensor_parallel.is_same_group(coordinator):
        return None
    return _tensor_parallel.find_operator(rows)


def _is_supported(norm: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the fused kernel supports this norm and these tensors."""
    return (
        not any(getattr(norm, name, None) for name in UNSUPPORTED_NORM_SETTINGS)
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
    *sleep.create_hooks(lambda: None if _tensor_parallel is None else _tensor_parallel.group),
    Hook(RUNNER + "load_model", "self", function=after_load_model, kind="AFTER"),
    Hook(RUNNER + "forward", FORWARD, function=after_forward, kind="AFTER"),
    Hook(
        SRT + "layers.communicator.apply_flashinfer_allreduce_fusion",
        {"0.5.17": "batch_size"},
        function=can_fuse,
    ),
    Hook(
        _BOUNDARY + "residual.add_norm.flashinfer_ar_fusion_applies",
        {"0.5.23": "batch_size"},
        function=can_fuse,
    ),
    Hook(
        _STATE + "GroupCoordinator._can_use_flashinfer_allreduce",
        {"0.5.23": "self, input_"},
        function=disable_flashinfer,
    ),
    Hook(
        _NORMS + "_forward_with_allreduce_fusion",
        "norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group=",
        function=reduce_and_norm,
    ),
    Hook(
        _STATE + "GroupCoordinator._resolve_outplace_all_reduce_method",
        "self, input_, should_use_pymscclpp_allreduce=",
        function=select_method,
    ),
    Hook(
        _STATE + "GroupCoordinator._all_reduce_out_place",
        "self, input_, outplace_all_reduce_method",
        function=all_reduce_rows,
    ),
    Hook(
        SRT + "layers.flashinfer_comm_fusion.pre_initialize_workspaces",
        "max_token_num, hidden_dim, dtype, use_oneshot=",
        function=skip_workspaces,
    ),
)
EXPECTED_API = (
    *sleep.EXPECTED_API,
    ExpectedAPI(_STATE + "get_tp_group", ""),
    ExpectedAPI(_STATE + "get_attn_tp_group", ""),
    ExpectedAPI(_STATE + "get_moe_ep_group", ""),
    ExpectedAPI(_STATE + "get_moe_tp_group", ""),
    ExpectedAPI(  # of 0.5.23: in healing.py, which wraps it
        _STATE + "GroupCoordinator.__init__",
        {
            "0.5.17": "self, group_ranks, local_rank, torch_distributed_backend, use_pynccl, "
            "use_pymscclpp, use_custom_allreduce, use_torch_symm_mem_all_reduce, "
            "use_hpu_communicator, use_xpu_communicator, use_npu_communicator, "
            "use_message_queue_broadcaster=, group_name=, gloo_timeout=, recovered_rank=, "
            "rank_offset=, max_world_size="
        },
        attributes="ranks world_size cpu_group",
    ),
    ExpectedAPI(_STATE + "GroupCoordinator.all_reduce", "self, input_"),
    ExpectedAPI(
        _NORMS + "RMSNorm.__init__",
        attributes=" ".join((*UNSUPPORTED_NORM_SETTINGS, "weight", "variance_epsilon")),
    ),
    ExpectedAPI(_NORMS + "GemmaRMSNorm.__init__", attributes="weight variance_epsilon"),
    ExpectedAPI(_NORMS + "GemmaRMSNorm.forward_with_allreduce_fusion", attributes="gemma_weight"),
    ExpectedAPI(SRT + "arg_groups.overrides._FLASHINFER_ALLREDUCE_FUSION_ARCHS"),
    ExpectedAPI(SRT + "layers.communicator.FUSE_ALLREDUCE_MAX_BATCH_SIZE", {"0.5.17": None}),
    ExpectedAPI(_BOUNDARY + "FUSE_ALLREDUCE_MAX_BATCH_SIZE", {"0.5.23": None}),
    ExpectedAPI(SRT + "arg_groups.overrides.resolved_view", "server_args"),
    ExpectedAPI(SRT + "layers.dp_attention.is_dp_attention_enabled", ""),
    ExpectedAPI(SRT + "layers.moe.utils.get_moe_a2a_backend", ""),
    ExpectedAPI(SRT + "plugins.hook_registry.HookRegistry._patched"),
)
