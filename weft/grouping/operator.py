# SPDX-License-Identifier: Apache-2.0
"""Packing of received rows by expert for grouped GEMMs, and the return of the results.

A `Received` has a slot for every token that could arrive, and most slots are empty. `ExpertGroups`
packs the received rows by expert. Their order depends only on the ids (source rank, token, top-k
index), so equal rounds give bitwise equal results. See docs/user/grouping.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from weft.alltoall.config import AllToAllConfig
from weft.alltoall.operator import AllToAll, State
from weft.alltoall.received import Received
from weft.arguments import check_bools, check_instance
from weft.cuda.driver import relaxed_capture
from weft.errors import InvalidArgument, OutOfOrder
from weft.grouping.config import GroupArgs, GroupConfig, Layout, build_group_config
from weft.grouping.kernels import load_kernels
from weft.heap.local import Allocate, TensorSpec, allocate_local, allocate_meta
from weft.keywords import internal
from weft.runtime.ambient import disable_inference_mode
from weft.runtime.check import check_alignment, check_tensor
from weft.runtime.kernels import Build, Kernels
from weft.runtime.operator import exclusive_call
from weft.runtime.stream import synchronize_stream

# Reason and fix if a call does not support the combine mode of the all-to-all.
COMBINE_FIXES = {
    "scatter": "its rows are summed by their owners: use send, or combine='pull' or 'push'",
    "send": "its rows are fetched by their owners: use scatter, or combine='push' or 'gemm_push'",
    "sent": "its rows have no dst_addr: use send, or combine='gemm_push'",
}


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows grouped by expert, as views of buffers that the next gather overwrites.

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
    """Memory of one RowGroups; grouping/layout.cuh documents the sizes."""

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
    def allocate(
        cls,
        a2a: AllToAllConfig,
        config: GroupConfig,
        allocate: Allocate,
        *,
        on_gpu: bool,
        has_rows: bool = True,
    ) -> Buffers:
        """Allocate all buffers, filled with zeros by `allocate`.

        A masked GEMM therefore reads finite values from rows that were never written. Without
        `has_rows` there are no payload rows, and each gather gets them from its caller.
        """
        shape, total = a2a.shape, config.total
        entries = (shape.ranks, shape.tokens, shape.top_k)

        payloads = a2a.payloads if has_rows else ()
        specs: dict[str, TensorSpec] = {
            "slot": ((total,), torch.int32),
            "weight": ((total,), torch.float32),
            "offsets": ((config.groups + 1,), torch.int32),
            "counts": ((config.groups,), torch.int32),
            "position": (entries, torch.int32),
            # Counts that the first of two kernels passes to the second.
            "within": (entries if on_gpu else (0,), torch.int32),
            "before": ((config.tiles(shape) if on_gpu else 0, config.groups), torch.int32),
            "arrived": ((1,), torch.int32),
            "dst_addr": ((total if shape.combine == "gemm_push" else 0,), torch.int64),
        }
        row_specs = [((total, *p.shape), p.dtype) for p in payloads]
        tensors = allocate([*row_specs, *specs.values()])
        rows, others = tensors[: len(payloads)], tensors[len(payloads) :]
        return cls(rows=tuple(rows), **dict(zip(specs, others, strict=True)))

    def bytes(self) -> int:
        """Return the total size in bytes."""
        tensors = (*self.rows, *self[1:])
        return sum(t.numel() * t.element_size() for t in tensors)


class RowGroups:
    """Base of objects that group the rows of an all-to-all: buffers, kernels and call order.

    Args:
        a2a: All-to-all whose rows are grouped.
        config: Sizes of the groups.
        use_pdl: Whether kernels use programmatic dependent launch.
        has_rows: See `Buffers.allocate`.
    """

    def __init__(
        self, a2a: AllToAll, config: GroupConfig, use_pdl: bool, *, has_rows: bool = True
    ) -> None:
        a2a.check_running()
        shape, device = a2a.config.shape, a2a.group.device
        self._a2a, self.config = a2a, config
        self.begin_call, self.end_call = a2a.begin_call, a2a.end_call
        self.debug_checks = a2a.debug_checks
        self._gathered_round = 0  # number of the round whose rows are grouped
        sends = shape.combine != "pull" and a2a.build.split_phase
        build = Build(use_pdl=use_pdl, defines=a2a.build.defines)
        self._kernels: Kernels | None = load_kernels(device, shape, config, build, sends=sends)
        on_gpu = device.type == "cuda"
        with relaxed_capture(device), disable_inference_mode():
            allocate = partial(allocate_local, a2a.group)
            buffers = Buffers.allocate(
                a2a.config, config, allocate, on_gpu=on_gpu, has_rows=has_rows
            )
            synchronize_stream(device)
        self.buffers = buffers
        self._args = GroupArgs(site=a2a.site, row_limit=config.total)
        for plane, rows in enumerate(buffers.rows):
            self._args.rows[plane] = rows.data_ptr()
        for name in buffers._fields[1:]:
            setattr(self._args, name, getattr(buffers, name).data_ptr())
        a2a.on_restart(self._discard_calls)

    def _discard_calls(self) -> None:
        """Clear the counter of an unfinished round, and addresses in the memory of dead ranks."""
        if self._kernels is not None:
            self.buffers.arrived.zero_()
            self.buffers.dst_addr.zero_()
            self._gathered_round = 0

    @internal
    @exclusive_call("gather")
    def gather_rows(self, received: Received, into: Sequence[torch.Tensor] = ()) -> None:
        """Group the rows of the last dispatch.

        Args:
            received: Result of that dispatch.
            into: Buffers to write without `has_rows`: a contiguous `[rows, *row]` on the device for
                each payload, with equal numbers of rows. Rows that do not fit are dropped and
                reported.
        """
        kernels = self._get_round_kernels("gather")
        check_instance(
            "received", received, Received, "pass what dispatch of this all-to-all returned"
        )
        expected, actual = self._a2a.latest_received.ids.data_ptr(), received.ids.data_ptr()
        if expected != actual:
            raise InvalidArgument(
                f"received.ids is at {actual:#x}, but the ids of this all-to-all are at "
                f"{expected:#x}: pass the result of its own dispatch, not a copy"
            )
        self._args.source_rows = self._a2a.get_source_rows()
        if not self.buffers.rows:
            for plane, rows in enumerate(into):
                self._args.rows[plane] = rows.data_ptr()
            self._args.row_limit = min(len(into[0]), self.config.total)
        kernels.run("gather", self._args, 0)
        self._gathered_round = self._a2a.round_number

    def close(self) -> None:
        """Unload the kernels after they have finished, and free the buffers."""
        if self._kernels is None:
            return
        kernels, self._kernels = self._kernels, None
        try:
            kernels.close()
        finally:
            del self.buffers

    def _get_kernels(self, call: str) -> Kernels:
        """Return the kernels. Raises OutOfOrder after close."""
        if self._kernels is None:
            raise OutOfOrder(f"{call} after close: create a new object")
        self._a2a.check_running()
        return self._kernels

    def _get_round_kernels(self, call: str) -> Kernels:
        """Return the kernels. Raises OutOfOrder unless a dispatch awaits its combine."""
        kernels = self._get_kernels(call)
        if self._a2a.state is not State.RECEIVED:
            raise OutOfOrder(
                f"{call} outside of a round: call it after dispatch and before combine"
            )
        return kernels


class ExpertGroups(RowGroups):
    """Pack the rows of each local expert, and scatter the experts' results into `output()`.

    The constructor allocates all memory. A call allocates nothing, does not synchronise with the
    host or wait for a peer, and may be captured between the dispatch and the combine of its round.
    Entries beyond max_rows get no row and count as zero; `a2a.check()` then raises TokenOverflow.

    Args:
        a2a: All-to-all whose rows are grouped. It must stay open.
        max_rows: Contiguous: rows of the buffer with padding. Masked: rows of each expert. Default:
            the worst case, which is `ep_size * max_tokens * min(top_k, local_experts)` rows and
            `align - 1` more for each expert or, if masked, `ep_size * max_tokens`.
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
        config = build_group_config(a2a.config, self.num_local_experts, max_rows, align, layout)
        super().__init__(a2a, config, programmatic_launch)
        self.max_rows, self.align = config.rows, config.align
        experts, buffers = self.num_local_experts, self.buffers
        # A rank without experts allocates buffers for one, and returns empty views.
        shape: tuple[int, ...]
        if layout == "masked":
            shape = (experts, self.max_rows)
        else:
            shape = (self.max_rows if experts else 0,)
        size = math.prod(shape)
        self.y_shape = (*shape, a2a.config.shape.hidden)
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
        """Return the bytes that an ExpertGroups with these arguments allocates on this rank.

        Args:
            a2a: See the constructor.
            max_rows: See the constructor.
            align: See the constructor.
            layout: See the constructor.

        Raises:
            InvalidArgument: an argument is invalid.
        """
        _check_a2a(a2a)
        config = build_group_config(a2a.config, a2a.num_local_experts, max_rows, align, layout)
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
        self.gather_rows(received)
        return self._grouped

    @exclusive_call("scatter")
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
        kernels = self._get_round_kernels("scatter")
        self._check_combine("scatter", ("pull", "push", "push_fp8"))
        self._bind_results(y, "scatter")
        kernels.run("scatter", self._args, 0)
        self._gathered_round = 0

    @exclusive_call("send")
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
        kernels = self._get_kernels("send")
        self._check_combine("send", ("push", "push_fp8", "gemm_push"))
        self._a2a.expect_state(State.RECEIVED, "send")
        self._bind_results(y, "send")
        kernels.run("send", self._args, 0)
        self._a2a.mark_sent()
        self._gathered_round = 0

    def sent(self) -> None:
        """Signal the peers that every result has been stored at its `Grouped.dst_addr`.

        Call it after the kernels that store the rows, in stream order, and then `combine_recv`;
        `combine` does both. Needs split_phase=True and combine="gemm_push".

        Raises:
            InvalidArgument: the all-to-all was built with other options.
            OutOfOrder: there was no gather in this round.
            GroupError: the group is broken.
        """
        self._get_round_kernels("sent")
        self._check_combine("sent", ("gemm_push",))
        self._check_gathered("sent")
        self._a2a.combine_send()
        self._gathered_round = 0

    def close(self) -> None:
        """Free the memory and unload the kernels after this rank's work. Idempotent."""
        super().close()
        vars(self).pop("_grouped", None)

    def _bind_results(self, y: torch.Tensor, call: str) -> None:
        """Check the experts' results and set their address in the kernel arguments."""
        self._check_gathered(call)
        a2a = self._a2a
        check_tensor("y", y, shape=self.y_shape, dtypes=(a2a.dtype,), device=a2a.group.device)
        check_alignment("y", y, a2a.config.shape.out_bytes)
        self._args.y = y.data_ptr()

    def _check_gathered(self, call: str) -> None:
        if self._gathered_round != self._a2a.round_number:
            raise OutOfOrder(f"{call} without a gather: call gather after this round's dispatch")

    def _check_combine(self, call: str, supported: tuple[str, ...]) -> None:
        """Raise InvalidArgument if a call does not support the combine mode of the all-to-all."""
        combine = self._a2a.config.shape.combine
        if combine not in supported:
            raise InvalidArgument(
                f"{call} on an all-to-all with combine={combine!r}; {COMBINE_FIXES[call]}"
            )
        if call != "scatter" and not self._a2a.build.split_phase:
            raise InvalidArgument(
                f"{call} on an all-to-all built without split_phase; pass split_phase=True"
            )


def _check_a2a(a2a: AllToAll) -> None:
    check_instance(
        "a2a", a2a, AllToAll, "rows of a LowLatencyAllToAll are grouped by expert already"
    )
    a2a.check_open()


def buffer_bytes(a2a: AllToAllConfig, config: GroupConfig, device: torch.device) -> int:
    """Return the bytes that `ExpertGroups` allocates on a rank's device for a config."""
    on_gpu = device.type == "cuda"
    return Buffers.allocate(a2a, config, allocate_meta, on_gpu=on_gpu).bytes()
