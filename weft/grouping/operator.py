# SPDX-License-Identifier: Apache-2.0
"""Packing of received rows by expert for grouped GEMMs, and the return of their results.

A `Received` has a slot for every token that could arrive; most are empty. `ExpertGroups` packs the
received rows, expert after expert. The order depends on the ids alone (source rank, token, top-k
index), so equal rounds give equal bits. See docs/user/grouping.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.alltoall.config import AllToAllConfig
from weft.alltoall.operator import AllToAll, State
from weft.alltoall.received import Received
from weft.arguments import check_bools, check_instance
from weft.cuda.driver import relaxed_capture
from weft.errors import InvalidArgument, OutOfOrder
from weft.grouping.config import GroupArgs, GroupConfig, Layout, expert_group_config
from weft.grouping.kernels import load_kernels
from weft.runtime.ambient import plain_tensors
from weft.runtime.check import check_alignment, check_tensor
from weft.runtime.kernels import Build, Kernels
from weft.runtime.operator import one_call
from weft.runtime.stream import synchronize_stream

# The fix if a call does not support the all-to-all's combine mode.
COMBINE_FIXES = {
    "scatter": "its rows are summed at their owners: use send, or combine='pull' or 'push'",
    "send": "owners fetch the rows: use scatter, or combine='push' or 'gemm_push'",
    "sent": "its rows have no addresses: use send, or combine='gemm_push'",
}


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows by expert: views of buffers that the next gather overwrites.

    `R` is `[max_rows]` (contiguous) or `[local_experts, max_rows]` (masked).

    Attributes:
        rows: Payloads `[*R, *row]`. Expert e has `counts[e]` rows from row `offsets[e]` of the flat
            buffer on. Rows up to the next multiple of `align` are zero, others hold stale data.
        offsets: int32 `[local_experts + 1]`, multiples of `align`. Pass `offsets[1:]` to
            `torch.nn.functional.grouped_mm` as `offs`.
        counts: int32 `[local_experts]`, rows of each expert without padding.
        slot: int32 `[*R]`, `source * max_tokens + token`; -1 for a row without a token.
        weight: float32 `[*R]`, the token's weight for this expert; 0 for a row without a token.
        dst_addr: int64 `[*R]` with combine="gemm_push": address at the token's owner where the
            row's result `[hidden]` is stored; 0 for a row without a token.
    """

    rows: tuple[torch.Tensor, ...]
    offsets: torch.Tensor
    counts: torch.Tensor
    slot: torch.Tensor
    weight: torch.Tensor
    dst_addr: torch.Tensor | None = None

    @property
    def x(self) -> torch.Tensor:
        """Rows of the first payload."""
        return self.rows[0]


class Buffers(NamedTuple):
    """All memory of one object; sizes in grouping/layout.cuh."""

    rows: tuple[torch.Tensor, ...]
    slot: torch.Tensor
    weight: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor
    position: torch.Tensor
    within: torch.Tensor
    before: torch.Tensor
    arrived: torch.Tensor
    dst_addr: torch.Tensor

    @classmethod
    def make(
        cls,
        a2a: AllToAllConfig,
        config: GroupConfig,
        device: torch.device,
        *,
        on_gpu: bool,
        own_rows: bool = True,
    ) -> Buffers:
        """Allocate all buffers.

        They are zeroed, so that a masked GEMM reads finite values from rows that were never
        written. Without `own_rows` there are no payload rows, and each gather passes its own.
        """
        shape, total = a2a.shape, config.total
        entries = (shape.ranks, shape.tokens, shape.top_k)

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            rows=tuple(
                zeros(total * size, dtype=torch.uint8).view(p.dtype).view(total, *p.shape)
                for p, size in zip(a2a.payloads, shape.row_bytes, strict=True)
                if own_rows
            ),
            slot=zeros(total),
            weight=zeros(total, dtype=torch.float32),
            offsets=zeros(config.groups + 1),
            counts=zeros(config.groups),
            position=zeros(*entries),
            # Counts that the first of the GPU's two passes hands to the second.
            within=zeros(*(entries if on_gpu else (0,))),
            before=zeros(config.tiles(shape) if on_gpu else 0, config.groups),
            arrived=zeros(1),
            dst_addr=zeros(total if shape.combine == "gemm_push" else 0, dtype=torch.int64),
        )

    def bytes(self) -> int:
        """Return the bytes of all buffers."""
        tensors = (*self.rows, *self[1:])
        return sum(t.numel() * t.element_size() for t in tensors)


class RowGroups:
    """Grouping of the rows of one all-to-all: buffers, kernels and the order of calls.

    Args:
        a2a: All-to-all whose rounds are grouped.
        config: Sizes of the groups.
        programmatic: Whether kernels use programmatic dependent launch.
        own_rows: As in `Buffers.make`.
    """

    def __init__(
        self, a2a: AllToAll, config: GroupConfig, programmatic: bool, *, own_rows: bool = True
    ) -> None:
        a2a.check_running()
        shape, device = a2a.config.shape, a2a.group.device
        self._a2a, self.config = a2a, config
        self.begin_call, self.end_call = a2a.begin_call, a2a.end_call
        self.debug_checks = a2a.debug_checks
        self._gathered = 0  # number of the round whose rows are grouped
        sends = shape.combine != "pull" and a2a.build.split_phase
        build = Build(programmatic=programmatic, defines=a2a.build.defines)
        self._kernels: Kernels | None = load_kernels(device, shape, config, build, sends=sends)
        on_gpu = device.type == "cuda"
        with relaxed_capture(device), plain_tensors():
            buffers = Buffers.make(a2a.config, config, device, on_gpu=on_gpu, own_rows=own_rows)
            synchronize_stream(device)
        self._buffers = buffers
        self._args = GroupArgs(site=a2a.site, row_limit=config.total)
        for plane, rows in enumerate(buffers.rows):
            self._args.rows[plane] = rows.data_ptr()
        for name in buffers._fields[1:]:
            setattr(self._args, name, getattr(buffers, name).data_ptr())
        a2a.on_restart(self._discard_calls)

    def _discard_calls(self) -> None:
        """Clear the counter of a broken round, and addresses at ranks that are gone."""
        if self._kernels is not None:
            self._buffers.arrived.zero_()
            self._buffers.dst_addr.zero_()
            self._gathered = 0

    @one_call("gather")
    def _gather_rows(self, received: Received, into: Sequence[torch.Tensor] = ()) -> None:
        """Group the rows of this round's dispatch.

        into: Outputs if there are no own buffers: for each payload a contiguous `[rows, *row]` on
            the device, with equal numbers of rows. Rows that do not fit are dropped and reported.
        """
        kernels = self._running("gather")
        check_instance(
            "received", received, Received, "pass what dispatch of this all-to-all returned"
        )
        expected, actual = self._a2a.latest_received.ids.data_ptr(), received.ids.data_ptr()
        if expected != actual:
            raise InvalidArgument(
                f"received has its ids at {actual:#x}, this all-to-all at {expected:#x}: "
                "pass what its own dispatch returned, not a copy"
            )
        self._args.source_rows = self._a2a.source_rows()
        if not self._buffers.rows:
            for plane, rows in enumerate(into):
                self._args.rows[plane] = rows.data_ptr()
            self._args.row_limit = min(len(into[0]), self.config.total)
        kernels.run("gather", self._args, 0)
        self._gathered = self._a2a._round

    def close(self) -> None:
        """Unload the kernels after they have finished, and free the buffers."""
        if self._kernels is None:
            return
        kernels, self._kernels = self._kernels, None
        try:
            kernels.close()
        finally:
            del self._buffers

    def _open(self, doing: str) -> Kernels:
        if self._kernels is None:
            raise OutOfOrder(f"{doing} after close: make a new one")
        self._a2a.check_running()
        return self._kernels

    def _running(self, doing: str) -> Kernels:
        kernels = self._open(doing)
        if self._a2a._state is not State.RECEIVED:
            raise OutOfOrder(f"{doing} outside of a round: call it after dispatch, before combine")
        return kernels


class ExpertGroups(RowGroups):
    """Pack the rows of each local expert, and scatter the experts' results into `output()`.

    The constructor allocates all memory. A call allocates nothing, does not synchronise with the
    host, waits for no peer, and may be captured between the dispatch and the combine of its round.
    Entries beyond max_rows get no row and count as zero; `a2a.check()` then raises TokenOverflow.

    Args:
        a2a: All-to-all whose rounds are grouped. It must stay open.
        max_rows: Contiguous: rows of the buffer with padding. Masked: rows of each expert. Default:
            the worst case, `ep_size * max_tokens * min(top_k, local_experts)` rows and `align - 1`
            more for each expert; masked, `ep_size * max_tokens`.
        align: Alignment of each expert's first row; max_rows must be a multiple.
        layout: "contiguous": one expert after the other. "masked": max_rows rows for each expert.
        programmatic_launch: As in AllToAll.

    Raises:
        InvalidArgument: an argument is invalid.
        CompileError: a kernel does not compile.
    """

    def __init__(
        self,
        a2a: AllToAll,
        *,
        max_rows: int | None = None,
        align: int = 1,
        layout: Layout = "contiguous",
        programmatic_launch: bool = True,
    ) -> None:
        check_bools(programmatic_launch=programmatic_launch)
        _check_a2a(a2a)
        self.layout, self.num_local_experts = layout, a2a.num_local_experts
        config = expert_group_config(a2a.config, self.num_local_experts, max_rows, align, layout)
        super().__init__(a2a, config, programmatic_launch)
        self.max_rows, self.align = config.rows, config.align
        experts, buffers = self.num_local_experts, self._buffers
        # A rank without experts allocates buffers for one, and returns empty views.
        shape: tuple[int, ...]
        if layout == "masked":
            shape = (experts, self.max_rows)
        else:
            shape = (self.max_rows if experts else 0,)
        size = math.prod(shape)
        self._y_shape = (*shape, a2a.config.shape.hidden)
        self._grouped = Grouped(
            rows=tuple(rows[:size].view(*shape, *rows.shape[1:]) for rows in buffers.rows),
            offsets=buffers.offsets[: experts + 1],
            counts=buffers.counts[:experts],
            slot=buffers.slot[:size].view(shape),
            weight=buffers.weight[:size].view(shape),
            dst_addr=buffers.dst_addr[:size].view(shape) if buffers.dst_addr.numel() else None,
        )

    @staticmethod
    def memory_bytes(
        a2a: AllToAll,
        *,
        max_rows: int | None = None,
        align: int = 1,
        layout: Layout = "contiguous",
    ) -> int:
        """Return the bytes that an ExpertGroups of these arguments allocates on this rank.

        Args:
            a2a: As in the constructor.
            max_rows: As in the constructor.
            align: As in the constructor.
            layout: As in the constructor.

        Raises:
            InvalidArgument: an argument is invalid.
        """
        _check_a2a(a2a)
        config = expert_group_config(a2a.config, a2a.num_local_experts, max_rows, align, layout)
        return buffer_bytes(a2a.config, config, a2a.group.device)

    def gather(self, received: Received) -> Grouped:
        """Pack the rows of the all-to-all's last dispatch.

        Args:
            received: Result of that dispatch.

        Returns:
            The packed rows, in the same tensors at every call.

        Raises:
            InvalidArgument: `received` belongs to another all-to-all.
            OutOfOrder: there is no open round.
            GroupError: the group is broken.
        """
        self._gather_rows(received)
        return self._grouped

    @one_call("scatter")
    def scatter(self, y: torch.Tensor) -> None:
        """Write `output()[s, t] = sum over k of weights[s, t, k] * y[row of (s, t, k)]`.

        Products and sums are rounded to fp32, in top-k order; the sum is rounded once to the
        output's dtype. Combine reads it there without a copy.

        Args:
            y: `[max_rows, hidden]`, masked `[local_experts, max_rows, hidden]`, in the all-to-all's
                dtype: one result for each row of the last gather. Other rows are not read.

        Raises:
            InvalidArgument: y has the wrong shape, dtype or device.
            OutOfOrder: there was no gather in this round.
            GroupError: the group is broken.
        """
        kernels = self._running("scatter")
        self._check_combine("scatter", ("pull", "push", "push_fp8"))
        self._set_results(y, "scatter")
        kernels.run("scatter", self._args, 0)
        self._gathered = 0

    @one_call("send")
    def send(self, y: torch.Tensor) -> None:
        """Run scatter and `combine_send` as one kernel that stores sums in their owners' inboxes.

        With combine="gemm_push" it stores every row at its `dst_addr`. The bits are those of
        scatter and `combine_send`; `output()` is not written, and `combine_recv` is the next call.
        Needs split_phase=True and a combine that pushes rows.

        Args:
            y: As in `scatter`.

        Raises:
            InvalidArgument: y is invalid, or the all-to-all pulls rows.
            OutOfOrder: there was no gather in this round.
            GroupError: the group is broken.
        """
        kernels = self._open("send")
        self._check_combine("send", ("push", "push_fp8", "gemm_push"))
        self._a2a.expect_state(State.RECEIVED, "send")
        self._set_results(y, "send")
        kernels.run("send", self._args, 0)
        self._a2a.mark_sent()
        self._gathered = 0

    def sent(self) -> None:
        """Publish to the peers that every result has been stored at its `Grouped.dst_addr`.

        Call it after the kernels that stored the rows, in stream order, and then `combine_recv`.
        (`combine` does both.) Needs split_phase=True and combine="gemm_push".

        Raises:
            InvalidArgument: the all-to-all was built with other options.
            OutOfOrder: there was no gather in this round.
            GroupError: the group is broken.
        """
        self._running("sent")
        self._check_combine("sent", ("gemm_push",))
        self._check_gathered("sent")
        self._a2a.combine_send()
        self._gathered = 0

    def close(self) -> None:
        """Free memory and kernels. Waits for this rank's own work. Idempotent."""
        super().close()
        vars(self).pop("_grouped", None)

    def _set_results(self, y: torch.Tensor, doing: str) -> None:
        """Check the results of this round's rows, and set their address in the arguments."""
        self._check_gathered(doing)
        a2a = self._a2a
        check_tensor("y", y, shape=self._y_shape, dtypes=(a2a.dtype,), device=a2a.group.device)
        check_alignment("y", y, a2a.config.shape.out_bytes)
        self._args.y = y.data_ptr()

    def _check_gathered(self, doing: str) -> None:
        if self._gathered != self._a2a._round:
            raise OutOfOrder(f"{doing} without a gather: gather what this round's dispatch brought")

    def _check_combine(self, doing: str, supported: tuple[str, ...]) -> None:
        """Raise InvalidArgument if a call does not support the all-to-all's combine mode."""
        combine = self._a2a.config.shape.combine
        if combine not in supported:
            raise InvalidArgument(
                f"{doing} on an all-to-all with combine={combine!r}; {COMBINE_FIXES[doing]}"
            )
        if doing != "scatter" and not self._a2a.build.split_phase:
            raise InvalidArgument(
                f"{doing} on an all-to-all built without split_phase; pass split_phase=True"
            )


def _check_a2a(a2a: AllToAll) -> None:
    check_instance(
        "a2a", a2a, AllToAll, "rows of a LowLatencyAllToAll are grouped by expert already"
    )
    a2a.check_open()


def buffer_bytes(a2a: AllToAllConfig, config: GroupConfig, device: torch.device) -> int:
    """Return the bytes that an object of this config allocates on a rank's device."""
    on_gpu = device.type == "cuda"
    return Buffers.make(a2a, config, torch.device("meta"), on_gpu=on_gpu).bytes()
