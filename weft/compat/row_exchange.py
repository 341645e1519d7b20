# SPDX-License-Identifier: Apache-2.0
"""Rows to the ranks that a table names, packed source after source, and sums of rows back.

Each exchange is a `weft.AllToAll` whose experts are the ranks: a token's ids are the ranks that it
goes to. `RowDispatch` carries a token's small rows; what it received has one group, so
`weft.grouping` packs it in the order of source rank, then token. With what it found out, `RowFetch`
fetches large rows, and `RowCombine` returns them, each by a kernel of this folder. Every call is a
whole round, so calls may come in any order that is the same on all ranks, and be captured in graphs
one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll, State
from weft.arguments import integer
from weft.compat.packed_rows import FetchArgs, PackedRows, ReturnArgs, load_entries
from weft.grouping.config import GroupConfig
from weft.grouping.operator import RowGroups
from weft.memory import Group
from weft.memory.driver import plain_tensors
from weft.runtime.kernels import Build, Kernels
from weft.runtime.operator import call_all, one_call
from weft.runtime.stream import synchronize_stream
from weft.shape import MAX_TOP_K

VECTOR_BYTES = 16
# A rank is an entry of a token's top k here, and the entries of a token are lanes of a warp.
MAX_ROW_RANKS = MAX_TOP_K
NO_ROW = 8  # columns of bfloat16 that a combine must have where none is needed
BLANK = (Payload((VECTOR_BYTES,), torch.uint8),)  # what a dispatch of no tokens carries
P = TypeVar("P", RowGroups, Kernels)


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the packed rows of a dispatch came from, and who has rows of this rank's tokens.

    tokens: int32 `[rows]`, each row's token at its source.
    until: int32 `[ep_size, ep_size]`: rows that ranks up to i sent to rank j.
    in_rank: bool `[tokens, ep_size]`: does the token have a row on that rank?
    """

    tokens: torch.Tensor
    until: torch.Tensor
    in_rank: torch.Tensor

    def packed(self, rows: int) -> PackedRows:
        """The packed rows as kernels take them, of which there are so many."""
        return PackedRows(
            tokens=self.tokens.data_ptr(),
            until=self.until.data_ptr(),
            limit=min(rows, len(self.tokens)),
        )


class RowExchange:
    """An all-to-all whose experts are the ranks.

    max_tokens: of a rank in one round.   options: of the all-to-all.
    Collective. Raises what AllToAll raises.
    """

    def __init__(self, group: Group, max_tokens: int, options: dict[str, Any]) -> None:
        ranks = integer("ranks of normal mode", group.size, 1, MAX_ROW_RANKS)
        self.max_tokens = max_tokens
        sizes = {"max_tokens": max_tokens, "hidden": NO_ROW, "payloads": BLANK}
        sizes |= {"top_k": ranks, "num_experts": ranks}
        self.a2a = self._operator = AllToAll(group, **{**sizes, **options})
        self._beside: list[RowGroups | Kernels] = []
        self._no_tokens = (
            torch.zeros((0, VECTOR_BYTES), dtype=torch.uint8, device=group.device),
            torch.zeros((0, group.size), dtype=torch.int32, device=group.device),
        )

    def _prepare(self, make: Callable[[], P]) -> P:
        """What is needed beside the all-to-all; where one rank cannot make it, none has either."""
        made: list[P] = []
        try:
            with self.a2a.group.creation() as creation:
                creation.add(self.a2a.heap)
                self.a2a.group.together(
                    lambda: made.append(make()), doing="preparing an exchange of rows"
                )
        except BaseException:
            for each in made:
                each.close()
            self.a2a.close()
            raise
        self._beside += made
        return made[0]

    def _entry(self, name: str) -> Kernels:
        """The kernel of packed_rows.ENTRIES for rows that all ranks may send here."""
        shape, group = self.a2a.config.shape, self.a2a.group
        build = Build(defines=self.a2a._build.defines)
        most = group.size * self.max_tokens
        return self._prepare(lambda: load_entries(group.device, name, shape, most, build))

    def close(self) -> None:
        """Give the memory back. Local."""
        call_all(*(each.close for each in (*self._beside, self.a2a)))


class RowDispatch(RowExchange):
    """Small rows of several payloads to the ranks of each token, into tensors of the caller's.

    It finds out which rows come. row_bytes: of each payload.
    """

    def __init__(
        self, group: Group, max_tokens: int, options: dict[str, Any], *row_bytes: int
    ) -> None:
        payloads = [Payload((size,), torch.uint8) for size in row_bytes]
        super().__init__(group, max_tokens, {"payloads": payloads, **options})
        config = GroupConfig("contiguous", 1, group.size * max_tokens, 1)
        self._packed = self._prepare(lambda: RowGroups(self.a2a, config, True, own_rows=False))

    def run(
        self, payloads: Sequence[torch.Tensor], ranks: torch.Tensor, into: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Send each token's rows; fill `into` with what came, in order of source, then token.

        payloads: uint8 `[tokens, row_bytes]` each.   ranks: int32 `[tokens, ep_size]`, entry r is r
        where the token goes to rank r, else -1.   into: uint8 `[rows, row_bytes]` each; rows that
        do not fit are dropped, and refused by `check`.

        Returns int32 `[rows]`, each row's token at its source, -1 for rows that no rank sent.
        """
        self._packed._gather_rows(self.a2a.dispatch(payloads, ranks), into)
        self.a2a._finish()
        slots = self._packed._buffers.slot[: len(into[0])]  # source * max_tokens + token
        return torch.where(slots < 0, -1, slots % self.max_tokens)


class RowFetch(RowExchange):
    """Rows, and their scales, that the ranks of each token fetch from its owner.

    row_bytes: of a row, whole 16-byte vectors.   scale_bytes: of its scales, whole words, or 0.
    A round dispatches no token: its dispatch says that all rows are in the outboxes, its combine
    that all have been fetched.
    """

    def __init__(
        self,
        group: Group,
        max_tokens: int,
        options: dict[str, Any],
        row_bytes: int,
        scale_bytes: int,
    ) -> None:
        pitch = row_bytes + -(-scale_bytes // VECTOR_BYTES) * VECTOR_BYTES
        # An outbox has rows for this rank's tokens, and no more.
        slots = -(-max_tokens // group.size)
        sizes = {"max_tokens": slots, "hidden": pitch // torch.bfloat16.itemsize}
        super().__init__(group, max_tokens, {**sizes, **options})
        self._entries = self._entry("fetch_rows")
        with plain_tensors():
            # In wide elements, which torch copies faster where rows are apart.
            outbox = self.a2a.output().view(group.size * slots, -1)
            self._rows = outbox.view(torch.int64)[:, : row_bytes // 8]
            self._scales = outbox.view(torch.int32)[:, row_bytes // 4 :][:, : scale_bytes // 4]
        self._args = FetchArgs(site=self.a2a._site)
        self._args.row_bytes, self._args.scale_bytes = row_bytes, scale_bytes

    def run(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        packing: Packing,
        into: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        """Fill `into`, rows and scales, with what this rank's packed rows are.

        rows, scales: `[tokens, *]` of this rank, as many bytes as row_bytes and scale_bytes say.
        into: `[rows, *]`, of the same dtypes.
        """
        self._rows[: len(rows)].copy_(rows.view(torch.int64))
        if scales is not None:
            self._scales[: len(scales)].copy_(scales.view(torch.int32))
        self.a2a.dispatch(*self._no_tokens)
        self._fetch(packing, into)
        self.a2a._finish()

    @one_call("dispatch")
    def _fetch(self, packing: Packing, into: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        args, (rows, scales) = self._args, into
        args.packed, args.rows = packing.packed(len(rows)), rows.data_ptr()
        args.scales = 0 if scales is None else scales.data_ptr()
        self._entries.run("fetch_rows", args, 0)

    def close(self) -> None:
        """Give the memory back. Local."""
        del self._rows, self._scales
        super().close()


class RowCombine(RowExchange):
    """Sums at each token's owner of the rows that the ranks of the token have.

    hidden, dtype: of a row.
    """

    def __init__(
        self,
        group: Group,
        max_tokens: int,
        options: dict[str, Any],
        hidden: int,
        dtype: torch.dtype,
    ) -> None:
        sizes = {"hidden": hidden, "dtype": dtype, "combine": "gemm_push", "split_phase": True}
        super().__init__(group, max_tokens, {**sizes, **options})
        self._entries = self._entry("return_rows")
        self._arrived = torch.zeros(1, dtype=torch.int32, device=group.device)
        self._args = ReturnArgs(site=self.a2a._site, arrived=self._arrived.data_ptr())
        self.a2a._on_recovery(self._start_anew)
        synchronize_stream(group.device)

    def run(self, rows: torch.Tensor, to: Packing, add: torch.Tensor | None) -> torch.Tensor:
        """Return `out[t] = sum over ranks + add[t]`, in fp32 and rank order, rounded once.

        rows: `[rows, hidden]` in the order that RowDispatch packs.   add: `[tokens, hidden]`.
        """
        # A dispatch of no tokens: peers have read what an earlier combine brought them.
        self.a2a.dispatch(*self._no_tokens)
        self._send(rows, to)
        return self.a2a.combine_recv(add=add)

    def _start_anew(self) -> None:
        """Forget what a broken round had counted."""
        self._arrived.zero_()

    @one_call("combine")
    def _send(self, rows: torch.Tensor, to: Packing) -> None:
        args = self._args
        args.rows, args.packed = rows.data_ptr(), to.packed(len(rows))
        args.in_rank, args.own_tokens = to.in_rank.data_ptr(), len(to.in_rank)
        self.a2a._expect(State.RECEIVED, "send")
        self._entries.run("return_rows", args, 0)
        self.a2a._sent(len(to.in_rank))


class Announcement(RowExchange):
    """Integers of each rank that all ranks read.   size: integers of one rank."""

    def __init__(self, group: Group, max_tokens: int, options: dict[str, Any], size: int) -> None:
        super().__init__(group, max_tokens, {"max_tokens": 1, "stats": size, **options})

    def tell(self, numbers: torch.Tensor) -> torch.Tensor:
        """Send int32 `[size]`; return a view `[ep_size, size]` that is valid until `finish`."""
        told = self.a2a.dispatch(*self._no_tokens, stats=numbers).stats
        assert told is not None
        return told

    def finish(self) -> None:
        """All that reads the view has been enqueued."""
        self.a2a._finish()


def exchange_bytes(ranks: int, max_tokens: int, row_bytes: int) -> int:
    """Bytes of symmetric memory of a RowFetch and a RowCombine in bfloat16. InvalidArgument."""
    ranks = integer("ranks", ranks, 1, MAX_ROW_RANKS)
    sizes: dict[str, Any] = {"ranks": ranks, "top_k": ranks, "num_experts": ranks}
    sizes |= {"hidden": row_bytes // torch.bfloat16.itemsize, "payloads": BLANK}
    there = AllToAll.memory_bytes(**sizes, max_tokens=-(-max_tokens // ranks))
    return there + AllToAll.memory_bytes(**sizes, max_tokens=max_tokens, combine="gemm_push")
