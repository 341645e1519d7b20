"""Received rows by expert, as grouped GEMMs want them, and the way back.

A `Received` has a slot for every token that could come, most of them empty. `ExpertGroups` packs
what came, expert after expert. The order follows from the ids alone (source rank, token, place in
the top k), so equal rounds give equal bits. See docs/grouping.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from weft.alltoall.config import AllToAllConfig
from weft.alltoall.operator import AllToAll
from weft.alltoall.received import Received
from weft.arguments import flags, instance, integer, one_of, refuse
from weft.errors import InvalidArgument
from weft.grouping.entry import MAX_GROUPS, Grouping
from weft.grouping.rounds import GroupRounds, buffer_bytes

Layout = Literal["contiguous", "masked"]
MAX_ALIGN = 1 << 16
MAX_ROWS = 2**31 - 1  # rows are counted in int32


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows by expert: views of buffers that the next gather overwrites.

    `R` is `[max_rows]` (contiguous) or `[local_experts, max_rows]` (masked).

    rows: each payload, `[*R, *row]`. Expert e's rows are the `counts[e]` from row `offsets[e]` of
        the flat buffer on. From there to the next multiple of `align` rows are zero; all others
        hold what earlier calls left.
    offsets: int32 `[local_experts + 1]`, multiples of `align`; the last is the end of all rows.
        `offsets[1:]` is what `torch.nn.functional.grouped_mm` takes for `offs`.
    counts: int32 `[local_experts]`, rows that carry a token.
    slot: int32 `[*R]`, `source * max_tokens + token`; -1 where a row carries none.
    weight: float32 `[*R]`, the token's weight for this expert; 0 where a row carries none.
    dst_addr: with combine="gemm_push": int64 `[*R]`, where the row's result is stored at the
        token's owner: an address in this process, for `[hidden]` of the all-to-all's dtype in
        16-byte vectors; 0 where a row carries none. Any kernel may store the result there.
    """

    rows: tuple[torch.Tensor, ...]
    offsets: torch.Tensor
    counts: torch.Tensor
    slot: torch.Tensor
    weight: torch.Tensor
    dst_addr: torch.Tensor | None = None

    @property
    def abort_flag(self) -> None:
        """None: no owner polls these rows; `sent` says when all are stored."""

    @property
    def x(self) -> torch.Tensor:
        """The first payload's rows."""
        return self.rows[0]


class ExpertGroups:
    """Gather the rows of each local expert, and scatter the experts' results into `output()`.

    All memory is allocated here. A call allocates nothing, synchronises with no host, waits for no
    peer, and may be captured in a CUDA graph, between the dispatch and the combine of its round.

    a2a: the all-to-all whose rounds are grouped; it must stay open.
    max_rows: contiguous: rows of the buffer, padding included; masked: rows of each expert.
        Default: the worst case, `ep_size * max_tokens * min(top_k, local_experts)` rows, and
        `align - 1` more for each expert that can have one; masked: `ep_size * max_tokens`.
    align: experts start at multiples of it, and max_rows must be one.
    layout: "contiguous", expert after expert; "masked", a block of max_rows rows for each expert.
    programmatic_launch: as in AllToAll.

    Entries beyond max_rows get no row and count for nothing in scatter; `a2a.check()` then raises
    TokenOverflow with both numbers. Raises InvalidArgument, and CompileError.
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
        flags(programmatic_launch=programmatic_launch)
        _check_a2a(a2a)
        self.layout, self.num_local_experts = layout, a2a.num_local_experts
        grouping = by_expert(a2a.config, self.num_local_experts, max_rows, align, layout)
        self.max_rows, self.align = grouping.rows, grouping.align
        self._rounds = GroupRounds(a2a, grouping, programmatic_launch)
        experts, buffers = self.num_local_experts, self._rounds.buffers
        # A rank without experts has the buffers of one, and shows none of it.
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
        """Bytes that an ExpertGroups of these arguments allocates on this rank.

        Raises InvalidArgument as the constructor does.
        """
        _check_a2a(a2a)
        geometry = a2a.config
        grouping = by_expert(geometry, a2a.num_local_experts, max_rows, align, layout)
        return buffer_bytes(geometry, grouping, a2a.group.device)

    def gather(self, received: Received) -> Grouped:
        """Group what the last dispatch of the all-to-all brought.

        Returns the same tensors at every call. Raises InvalidArgument when `received` is another
        all-to-all's, OutOfOrder outside of a round, and what broke the group.
        """
        self._rounds.gather(received)
        return self._grouped

    def scatter(self, y: torch.Tensor) -> None:
        """Write `output()[s, t] = sum over k of weights[s, t, k] * y[row of (s, t, k)]`.

        y: `[max_rows, hidden]`, masked `[local_experts, max_rows, hidden]`, in the all-to-all's
            dtype: one result for each row of the last gather; others are not read.

        Products and sums are rounded to fp32, in top-k order from 0; the sum is rounded once to the
        output's dtype. Combine then takes it from there without a copy. Raises InvalidArgument,
        OutOfOrder without a gather in this round, and what broke the group.
        """
        self._rounds.scatter(y, self._y_shape)

    def send(self, y: torch.Tensor) -> None:
        """Scatter and `combine_send` in one: every token's sum straight into its owner's inbox, or
        with combine="gemm_push" every row to its `dst_addr`.

        y: as in scatter.

        Bits are those of scatter, then `combine_send`; `output()` is not written, and
        `combine_recv` is the next call. Needs `split_phase=True` and rows that are not pulled.
        Raises InvalidArgument, OutOfOrder without a gather in this round, and what broke the group.
        """
        self._rounds.send(y, self._y_shape)

    def sent(self) -> None:
        """Publish to the peers that every result has been stored at its `Grouped.dst_addr`.

        For kernels that store their rows there themselves, before this call in the stream; then
        `combine_recv` follows. (`combine` is both in one.) Needs `split_phase=True` and
        combine="gemm_push". Raises InvalidArgument, OutOfOrder, and what broke the group.
        """
        self._rounds.sent()

    def close(self) -> None:
        """Give memory and kernels back; waits for this rank's own work. Idempotent."""
        self._rounds.close()
        vars(self).pop("_grouped", None)


def _check_a2a(a2a: AllToAll) -> None:
    instance("a2a", a2a, AllToAll, "rows of a LowLatencyAllToAll lie by expert as they come")
    a2a._check_open()


def by_expert(
    geometry: AllToAllConfig, experts: int, max_rows: int | None, align: int, layout: Layout
) -> Grouping:
    """How rows of a rank with so many experts are grouped; max_rows as given, or by default.

    Raises InvalidArgument with value and limits.
    """
    shape = geometry.shape
    one_of("layout", layout, get_args(Layout))
    align = integer("align", align, 1, MAX_ALIGN)
    if experts > MAX_GROUPS:
        raise InvalidArgument(f"{experts} local experts; grouping serves at most {MAX_GROUPS}")
    if max_rows is None:
        tokens = shape.ranks * shape.tokens
        if layout == "masked":
            max_rows = -(-tokens // align) * align
        else:
            entries = tokens * min(shape.top_k, experts)
            max_rows = (entries + min(experts, entries) * (align - 1)) // align * align
            max_rows = max(max_rows, align)  # also without experts there is a buffer
    max_rows = integer("max_rows", max_rows, 1, MAX_ROWS)
    if max_rows % align:
        refuse("max_rows", max_rows, f"a positive multiple of align, {align}")
    total = max_rows * (max(experts, 1) if layout == "masked" else 1)
    if total > MAX_ROWS:
        raise InvalidArgument(
            f"{layout} rows for {experts} experts with max_rows={max_rows} are {total}; at most "
            f"{MAX_ROWS} can be numbered: pass a smaller max_rows"
        )
    return Grouping(layout, max(experts, 1), max_rows, align)
