# SPDX-License-Identifier: Apache-2.0
"""The workspace of `allreduce_fusion`: a weft.AllReduce by flashinfer.comm's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from weft.allreduce.call import MoEFinalize, Reduced
from weft.allreduce.config import MAX_TOKENS
from weft.allreduce.operator import AllReduce
from weft.arguments import flags, instance, integer, one_of, real
from weft.compat.ranks import lease_group
from weft.compat.refusals import refuse, refuse_capture, renamed
from weft.errors import OutOfOrder, UsageError
from weft.memory import Group
from weft.runtime.operator import call_all
from weft.shape import DTYPE_NAMES

# What the arguments of `AllReduce.fused` are called in `allreduce_fusion`.
NAMES = {
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
REDUCED = NAMES | {  # in the pattern that reduces experts' rows
    "prologue.rows": "moe_reduction_active_experts_token_input",
    "prologue.scales": "moe_reduction_scale_input",
    "prologue.shared": "moe_reduction_token_input",
}
MAX_WORLD = 1 << 16
INT64 = -(1 << 63), (1 << 63) - 1
MULTICAST = "weft uses no NVLink multicast, which mnnvl is made of; auto and trtllm are the same"


class AllReduceFusionWorkspace:
    """What `create_allreduce_fusion_workspace` returns; a context manager. Collective.

    metadata: the sizes that it was made with.
    """

    backend = "trtllm"  # the calls that it takes: engines ask

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
        tp_size = integer("tp_size", tp_size, 1, MAX_WORLD)
        tp_rank = integer("tp_rank", tp_rank, 0, tp_size - 1)
        max_token_num = integer("max_token_num", max_token_num, 1, MAX_TOKENS)
        hidden_dim = integer("hidden_dim", hidden_dim, 8, 1 << 20)
        dtype = one_of("dtype", dtype, DTYPE_NAMES)
        self.group, self._release = lease_group(tp_rank, tp_size, group, comm_backend)
        self.world_size, self.rank = tp_size, tp_rank
        self._elements = max_token_num * hidden_dim
        self._timeout, self._first_timeout = timeout, first_timeout
        self._first = hidden_dim, dtype
        self._reduces: dict[tuple[int, torch.dtype], AllReduce] = {}
        try:
            self._reduces[self._first] = self._make(max_token_num, *self._first)
        except BaseException:
            self._release()
            raise
        self._scales: dict[float, torch.Tensor] = {}
        self._indices: dict[tuple[int, int], torch.Tensor] = {}
        self.metadata: dict[str, Any] = {
            **{"tp_rank": tp_rank, "tp_size": tp_size, "max_token_num": max_token_num},
            **{"hidden_dim": hidden_dim, "use_fp32_lamport": dtype == torch.float32},
        }

    def _make(self, tokens: int, hidden: int, dtype: torch.dtype) -> AllReduce:
        return AllReduce(
            self.group,
            max_tokens=min(tokens, MAX_TOKENS),
            hidden=hidden,
            dtype=dtype,
            epilogue_at="receiver",  # as flashinfer.comm: a residual of each rank's own
            timeout=self._timeout,
            first_timeout=self._first_timeout,
        )

    def open(self) -> AllReduce:
        """The all-reduce of the sizes that it was made with.

        Raises:
            OutOfOrder: the workspace is destroyed.
        """
        if not self._reduces:
            raise OutOfOrder("this workspace was destroyed; make a new one")
        return self._reduces[self._first]

    def serving(self, rows: torch.Tensor) -> AllReduce:
        """The all-reduce for rows like these; collective where their size or dtype is new.

        What does not fit goes to the first, whose checks say why.

        Raises:
            OutOfOrder: the workspace is destroyed.
            InvalidArgument: a graph capture is the first to bring such rows.
        """
        first, key = self.open(), (int(rows.shape[-1]), rows.dtype)
        if key not in self._reduces and self._fits(1, *key):
            what = f"a call with rows [{key[0]}] of {key[1]}"
            refuse_capture(self.group.device, what, "make one before the capture")
            self._reduces[key] = self._make(self._elements // key[0], *key)
        return self._reduces.get(key, first)

    def _fits(self, tokens: int, hidden: int, dtype: torch.dtype) -> bool:
        """As in flashinfer.comm: as many elements, and either both float32 or neither."""
        alike = (dtype == torch.float32) == (self.open().dtype == torch.float32)
        sizes = hidden >= 8 and hidden % 8 == 0 and 0 <= tokens * hidden <= self._elements
        return dtype in DTYPE_NAMES and alike and sizes

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: bool | None = None,
    ) -> bool:
        """Return whether this workspace serves such calls. The first of another hidden size makes
        memory.
        """
        self.open()
        tp_size, num_tokens = (
            integer("tp_size", tp_size, *INT64),
            integer("num_tokens", num_tokens, *INT64),
        )
        hidden_dim = integer("hidden_dim", hidden_dim, *INT64)
        instance("dtype", dtype, torch.dtype)
        if use_oneshot is not None:
            flags(use_oneshot=use_oneshot)
        return tp_size == self.world_size and self._fits(num_tokens, hidden_dim, dtype)

    def backend_for(self, use_oneshot: bool | None, rows: torch.Tensor, tokens: int) -> str:
        """The backend that a call's use_oneshot means, where it serves the size; else "auto"."""
        if use_oneshot is None:
            return "auto"
        flags(use_oneshot=use_oneshot)
        if not use_oneshot:
            return "twoshot"
        return "oneshot" if tokens <= self.serving(rows).config.direct else "auto"

    def run(
        self,
        x: torch.Tensor | None,
        prologue: MoEFinalize | None,
        backend: str,
        others: dict[str, Any],
        names: Mapping[str, str] = NAMES,
    ) -> Reduced:
        """One call of `weft.AllReduce.fused`.   names: what errors call its arguments."""
        try:
            rows = prologue.rows if x is None and prologue is not None else x
            reduce = self.open() if rows is None else self.serving(rows)
            return reduce.fused(x, prologue=prologue, backend=backend, **others)
        except UsageError as error:
            raise renamed(error, names) from error

    def scale(self, value: float) -> torch.Tensor:
        """float32 `[1]` that holds a scale given as a number; made once.

        Raises:
            InvalidArgument: a graph capture meets the number for the first time.
        """
        value = real("scale_factor", value, above=0.0)
        if value not in self._scales:
            fix = "pass it as a float32 tensor [1]"
            refuse_capture(self.group.device, f"scale_factor={value}", fix)
            self._scales[value] = torch.full(
                (1,), value, dtype=torch.float32, device=self.group.device
            )
        return self._scales[value]

    def expert_major(self, experts: int, tokens: int) -> torch.Tensor:
        """int32 `[tokens, experts]`: the index of token t's row of expert e; made once a size."""
        if (experts, tokens) not in self._indices:
            what = f"a MoE reduction of {experts} experts and {tokens} tokens"
            refuse_capture(self.group.device, what, "make one such call before the capture")
            rows = torch.arange(experts * tokens, dtype=torch.int32, device=self.group.device)
            self._indices[experts, tokens] = rows.view(experts, tokens).t().contiguous()
        return self._indices[experts, tokens]

    def check(self) -> None:
        """Raise what the device has recorded (`weft.AllReduce.check`)."""
        self.open()
        call_all(*(reduce.check for reduce in self._reduces.values()))

    def destroy(self) -> None:
        """Free the memory, and the group if it was not given. Local and idempotent."""
        closes = [reduce.close for reduce in self._reduces.values()]
        self._reduces.clear()
        self._scales.clear()
        self._indices.clear()
        call_all(*closes, self._release)

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
    """Make the memory that `allreduce_fusion` works in. Collective.

    Arguments of weft's own: timeout, first_timeout, as in weft.AllReduce.

    Args:
        backend: "auto" and "trtllm" mean the same; "mnnvl" is refused.
        gpus_per_node: Accepted and not used; all ranks are on one host.
        force_oneshot_support: Accepted and not used; all ranks are on one host.
        group: The ranks, a weft.Group or a process group; else those of comm_backend, else of
            torch.distributed's world.

    Raises:
        InvalidArgument: an argument is invalid.
        CreationFailed: a rank cannot do its part. Every rank raises it.
        GeometryMismatch: ranks pass different sizes.
        RendezvousFailed: the ranks do not meet.
    """
    refuse("backend", backend, ("auto", "trtllm"), MULTICAST)
    world_size = integer("world_size", world_size, 1, MAX_WORLD)
    return AllReduceFusionWorkspace(
        world_size,
        integer("rank", rank, 0, world_size - 1),
        integer("max_token_num", max_token_num),
        integer("hidden_dim", hidden_dim),
        one_of("dtype", dtype, DTYPE_NAMES),
        comm_backend,
        group,
        timeout=timeout,
        first_timeout=first_timeout,
    )
