# SPDX-License-Identifier: Apache-2.0
"""The workspace of `allreduce_fusion`: a weft.AllReduce with flashinfer.comm's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from weft.allreduce.call import MoEFinalize, Reduced
from weft.allreduce.config import MAX_TOKENS
from weft.allreduce.operator import AllReduce
from weft.arguments import check_bools, check_choice, check_float, check_instance, check_int
from weft.compat.checks import check_allowed, check_not_capturing, rename_argument
from weft.compat.ranks import lease_group
from weft.errors import OutOfOrder, UsageError
from weft.group import Group
from weft.runtime.operator import run_all
from weft.shape import DTYPE_NAMES

# Names in `allreduce_fusion` of the arguments of `AllReduce.fused`.
ARGUMENT_NAMES = {
    "x": "input",
    "residual": "residual_in",
    "weight": "rms_gamma",
    "eps": "rms_eps",
    "out": "output",
    "quant.scale": "scale_factor",
    "prologue.rows": "input",
    "prologue.index": "expanded_idx_to_permuted_idx",
    "prologue.scales": "expert_scale_factor",
    "prologue.shared": "shared_expert_output",
    "prologue.routed_scaling_factor": "routed_scaling_factor",
}
MOE_REDUCTION_NAMES = ARGUMENT_NAMES | {  # for the MoE reduction pattern
    "prologue.rows": "moe_reduction_active_experts_token_input",
    "prologue.scales": "moe_reduction_scale_input",
    "prologue.shared": "moe_reduction_token_input",
}
MAX_WORLD = 1 << 16
INT64 = -(1 << 63), (1 << 63) - 1
MULTICAST_REASON = "mnnvl needs NVLink multicast, which weft does not use; pass auto or trtllm"


class AllReduceFusionWorkspace:
    """Memory and ranks of `allreduce_fusion`. A context manager; construction is collective.

    Attributes:
        metadata: The sizes passed to the constructor.
    """

    backend = "trtllm"  # queried by engines

    def __init__(
        self,
        tp_size: int,
        tp_rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: torch.dtype = torch.float16,
        comm_backend: Any = None,
        group: Group | dist.ProcessGroup | None = None,
        *,
        timeout: float = 120.0,
        first_timeout: float = 120.0,
    ) -> None:
        tp_size = check_int("tp_size", tp_size, 1, MAX_WORLD)
        tp_rank = check_int("tp_rank", tp_rank, 0, tp_size - 1)
        max_token_num = check_int("max_token_num", max_token_num, 1, MAX_TOKENS)
        hidden_dim = check_int("hidden_dim", hidden_dim, 8, 1 << 20)
        dtype = check_choice("dtype", dtype, DTYPE_NAMES)
        self.group, self._release = lease_group(tp_rank, tp_size, group, comm_backend)
        self.world_size, self.rank = tp_size, tp_rank
        self._max_elements = max_token_num * hidden_dim
        self._timeout, self._first_timeout = timeout, first_timeout
        self._default_key = hidden_dim, dtype
        self._operators: dict[tuple[int, torch.dtype], AllReduce] = {}
        try:
            self._operators[self._default_key] = self._create_operator(
                max_token_num, *self._default_key
            )
        except BaseException:
            self._release()
            raise
        self._scales: dict[float, torch.Tensor] = {}
        self._indices: dict[tuple[int, int], torch.Tensor] = {}
        self.metadata: dict[str, Any] = {
            **{"tp_rank": tp_rank, "tp_size": tp_size, "max_token_num": max_token_num},
            **{"hidden_dim": hidden_dim, "use_fp32_lamport": dtype == torch.float32},
        }

    def _create_operator(self, num_tokens: int, hidden: int, dtype: torch.dtype) -> AllReduce:
        return AllReduce(
            self.group,
            max_tokens=min(num_tokens, MAX_TOKENS),
            hidden=hidden,
            dtype=dtype,
            epilogue_at="receiver",  # as in flashinfer.comm, each rank may have its own residual
            timeout=self._timeout,
            first_timeout=self._first_timeout,
        )

    def get_default_operator(self) -> AllReduce:
        """Return the all-reduce with the sizes given to the constructor.

        Raises:
            OutOfOrder: If the workspace is destroyed.
        """
        if not self._operators:
            raise OutOfOrder("this workspace was destroyed; create a new one")
        return self._operators[self._default_key]

    def get_operator(self, rows: torch.Tensor) -> AllReduce:
        """Return the all-reduce for rows of this size and dtype. Collective if it is new.

        For unsupported rows, return the default all-reduce, whose checks raise.

        Raises:
            OutOfOrder: If the workspace is destroyed.
            InvalidArgument: If the size or dtype is new in a graph capture.
        """
        default, key = self.get_default_operator(), (int(rows.shape[-1]), rows.dtype)
        if key not in self._operators and self._supports(1, *key):
            label = f"a call with rows [{key[0]}] of {key[1]}"
            check_not_capturing(self.group.device, label, "run one before the capture")
            self._operators[key] = self._create_operator(self._max_elements // key[0], *key)
        return self._operators.get(key, default)

    def _supports(self, num_tokens: int, hidden: int, dtype: torch.dtype) -> bool:
        """Whether the workspace supports these rows, as in flashinfer.comm."""
        has_same_width = (dtype == torch.float32) == (
            self.get_default_operator().dtype == torch.float32
        )
        is_size_supported = (
            hidden >= 8 and hidden % 8 == 0 and 0 <= num_tokens * hidden <= self._max_elements
        )
        return dtype in DTYPE_NAMES and has_same_width and is_size_supported

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: bool | None = None,
    ) -> bool:
        """Whether this workspace supports calls of this size.

        A call with a new hidden size allocates memory.
        """
        self.get_default_operator()
        tp_size = check_int("tp_size", tp_size, *INT64)
        num_tokens = check_int("num_tokens", num_tokens, *INT64)
        hidden_dim = check_int("hidden_dim", hidden_dim, *INT64)
        check_instance("dtype", dtype, torch.dtype)
        if use_oneshot is not None:
            check_bools(use_oneshot=use_oneshot)
        return tp_size == self.world_size and self._supports(num_tokens, hidden_dim, dtype)

    def select_backend(self, use_oneshot: bool | None, rows: torch.Tensor, num_tokens: int) -> str:
        """Return the backend that use_oneshot selects, or "auto" if that does not fit the size."""
        if use_oneshot is None:
            return "auto"
        check_bools(use_oneshot=use_oneshot)
        if not use_oneshot:
            return "twoshot"
        return "oneshot" if num_tokens <= self.get_operator(rows).config.direct else "auto"

    def run(
        self,
        x: torch.Tensor | None,
        prologue: MoEFinalize | None,
        backend: str,
        kwargs: dict[str, Any],
        names: Mapping[str, str] = ARGUMENT_NAMES,
    ) -> Reduced:
        """Call `weft.AllReduce.fused`; `names` maps its arguments to names for errors."""
        try:
            rows = prologue.rows if x is None and prologue is not None else x
            operator = self.get_default_operator() if rows is None else self.get_operator(rows)
            return operator.fused(x, prologue=prologue, backend=backend, **kwargs)
        except UsageError as error:
            raise rename_argument(error, names) from error

    def get_scale_tensor(self, value: float) -> torch.Tensor:
        """Return a cached float32 tensor `[1]` with `value`.

        Raises:
            InvalidArgument: If the value is new in a graph capture.
        """
        value = check_float("scale_factor", value, above=0.0)
        if value not in self._scales:
            fix = "pass it as a float32 tensor [1]"
            check_not_capturing(self.group.device, f"scale_factor={value}", fix)
            self._scales[value] = torch.full(
                (1,), value, dtype=torch.float32, device=self.group.device
            )
        return self._scales[value]

    def get_expert_major_indices(self, num_experts: int, num_tokens: int) -> torch.Tensor:
        """Return cached int32 `[tokens, experts]`: the index of token t's row of expert e."""
        if (num_experts, num_tokens) not in self._indices:
            label = f"a MoE reduction with {num_experts} experts and {num_tokens} tokens"
            check_not_capturing(self.group.device, label, "run one such call before the capture")
            rows = torch.arange(
                num_experts * num_tokens, dtype=torch.int32, device=self.group.device
            )
            self._indices[num_experts, num_tokens] = (
                rows.view(num_experts, num_tokens).t().contiguous()
            )
        return self._indices[num_experts, num_tokens]

    def check(self) -> None:
        """Raise errors recorded by the device (`weft.AllReduce.check`)."""
        self.get_default_operator()
        run_all(*(operator.check for operator in self._operators.values()))

    def destroy(self) -> None:
        """Free the memory, and the group if it is not the caller's. Local and idempotent."""
        close_functions = [operator.close for operator in self._operators.values()]
        self._operators.clear()
        self._scales.clear()
        self._indices.clear()
        run_all(*close_functions, self._release)

    def __enter__(self) -> AllReduceFusionWorkspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()


TRTLLMAllReduceFusionWorkspace = AllReduceFusionWorkspace


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: Any = None,
    force_oneshot_support: bool = False,
    group: Group | dist.ProcessGroup | None = None,
    *,
    timeout: float = 120.0,
    first_timeout: float = 120.0,
) -> AllReduceFusionWorkspace:
    """Create the workspace of `allreduce_fusion`. Collective.

    flashinfer.comm has no timeout and first_timeout; they are those of weft.AllReduce.

    Args:
        backend: "auto" or "trtllm", which are the same. "mnnvl" is not supported.
        world_size: Number of ranks.
        rank: This rank.
        max_token_num: Maximum tokens of a call.
        hidden_dim: Elements of a row.
        dtype: Dtype of the rows.
        gpus_per_node: Ignored: all ranks are on one host.
        comm_backend: Used for the rendezvous unless group is given.
        force_oneshot_support: Ignored.
        group: The ranks, a weft.Group or a process group. Default: those of comm_backend, otherwise
            the world of torch.distributed.
        timeout: Seconds to wait for a peer.
        first_timeout: Seconds to wait for a peer in the first call.

    Raises:
        InvalidArgument: If an argument is invalid.
        CreationFailed: If a rank fails. Every rank raises it.
        GeometryMismatch: If ranks pass different sizes.
        RendezvousFailed: If the ranks do not meet.
    """
    check_allowed("backend", backend, ("auto", "trtllm"), MULTICAST_REASON)
    world_size = check_int("world_size", world_size, 1, MAX_WORLD)
    return AllReduceFusionWorkspace(
        world_size,
        check_int("rank", rank, 0, world_size - 1),
        check_int("max_token_num", max_token_num),
        check_int("hidden_dim", hidden_dim),
        check_choice("dtype", dtype, DTYPE_NAMES),
        comm_backend,
        group,
        timeout=timeout,
        first_timeout=first_timeout,
    )
