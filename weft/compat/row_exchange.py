# SPDX-License-Identifier: Apache-2.0
"""Sends rows to the ranks that a table names, packed by source, and returns sums of rows.

Each exchange is a `weft.AllToAll` whose experts are the ranks: a token's ids are its destination
ranks. `RowDispatch` sends small rows, which `weft.grouping` packs by source rank, then token.
`RowFetch` then fetches large rows by the same packing, and `RowCombine` returns them, each by a
kernel of this package. Every call is a complete round, so calls may come in any order that is the
same on all ranks, and each may be captured in a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll, State
from weft.arguments import check_int
from weft.compat.packed_rows import FetchArgs, PackedRows, ReturnArgs, load_entries
from weft.group import Group
from weft.grouping.config import GroupConfig
from weft.grouping.operator import RowGroups
from weft.runtime.ambient import disable_inference_mode
from weft.runtime.kernels import Build, Kernels
from weft.runtime.operator import exclusive_call, run_all
from weft.runtime.stream import synchronize_stream
from weft.shape import MAX_TOP_K

VECTOR_BYTES = 16
# A rank is one of a token's top-k entries, and a token's entries are the lanes of a warp.
MAX_ROW_RANKS = MAX_TOP_K
NO_ROW = 8  # bfloat16 columns of a combine row; the smallest, if none is needed
BLANK = (Payload((VECTOR_BYTES,), torch.uint8),)  # payload of a dispatch without tokens
P = TypeVar("P", RowGroups, Kernels)


@dataclass(frozen=True, slots=True)
class Packing:
    """The sources of packed rows, and the ranks that have rows of this rank's tokens.

    Attributes:
        tokens: int32 `[rows]`, each row's token at its source.
        until: int32 `[ep_size, ep_size]`: rows that ranks up to i sent to rank j.
        in_rank: bool `[tokens, ep_size]`: whether the token has a row on that rank.
    """

    tokens: torch.Tensor
    until: torch.Tensor
    in_rank: torch.Tensor

    def packed(self, rows: int) -> PackedRows:
        """Return the kernel argument for this number of packed rows."""
        return PackedRows(
            tokens=self.tokens.data_ptr(),
            until=self.until.data_ptr(),
            limit=min(rows, len(self.tokens)),
        )


class RowExchange:
    """An all-to-all whose experts are the ranks. Collective; raises errors of AllToAll.

    Args:
        group: The ranks.
        max_tokens: Maximum tokens of a rank in one round.
        options: Options of the all-to-all.
    """

    def __init__(self, group: Group, max_tokens: int, options: dict[str, Any]) -> None:
        ranks = check_int("ranks of normal mode", group.size, 1, MAX_ROW_RANKS)
        self.max_tokens = max_tokens
        sizes = {"max_tokens": max_tokens, "hidden": NO_ROW, "payloads": BLANK}
        sizes |= {"top_k": ranks, "num_experts": ranks}
        self.a2a = AllToAll(group, **{**sizes, **options})
        self.begin_call, self.end_call = self.a2a.begin_call, self.a2a.end_call
        self.debug_checks = self.a2a.debug_checks
        self._resources: list[RowGroups | Kernels] = []
        self._no_tokens = (
            torch.zeros((0, VECTOR_BYTES), dtype=torch.uint8, device=group.device),
            torch.zeros((0, group.size), dtype=torch.int32, device=group.device),
        )

    def _prepare(self, make: Callable[[], P]) -> P:
        """Create a resource of the exchange on all ranks; if one rank fails, all close theirs."""
        created: list[P] = []
        try:
            with self.a2a.group.creation() as creation:
                creation.add_heap(self.a2a.heap)
                self.a2a.group.run_collective(
                    lambda: created.append(make()), action="preparing an exchange of rows"
                )
        except BaseException:
            for each in created:
                each.close()
            self.a2a.close()
            raise
        self._resources += created
        return created[0]

    def _entry(self, name: str) -> Kernels:
        """Load one of packed_rows.ENTRIES, for as many rows as all ranks may send here."""
        shape, group = self.a2a.config.shape, self.a2a.group
        build = Build(defines=self.a2a.build.defines)
        most = group.size * self.max_tokens
        return self._prepare(lambda: load_entries(group.device, name, shape, most, build))

    def close(self) -> None:
        """Free the memory. Local."""
        run_all(*(each.close for each in (*self._resources, self.a2a)))


class RowDispatch(RowExchange):
    """Sends small rows of several payloads to each token's ranks, and packs the received rows.

    `row_bytes` are the payloads' row sizes.
    """

    def __init__(
        self, group: Group, max_tokens: int, options: dict[str, Any], *row_bytes: int
    ) -> None:
        payloads = [Payload((size,), torch.uint8) for size in row_bytes]
        super().__init__(group, max_tokens, {"payloads": payloads, **options})
        config = GroupConfig("contiguous", 1, group.size * max_tokens, 1)
        self._packed = self._prepare(lambda: RowGroups(self.a2a, config, True, has_rows=False))

    def run(
        self, payloads: Sequence[torch.Tensor], ranks: torch.Tensor, into: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Send each token's rows, and fill `into` with the received ones, by source, then token.

        Args:
            payloads: uint8 `[tokens, row_bytes]` each.
            ranks: int32 `[tokens, ep_size]`; entry r is r if the token goes to rank r, otherwise
                -1.
            into: uint8 `[rows, row_bytes]` each. Rows that do not fit are dropped, and `check`
                raises.

        Returns:
            int32 `[rows]`, each row's token at its source, -1 for rows that no rank sent.
        """
        self._packed._gather_rows(self.a2a.dispatch(payloads, ranks), into)
        self.a2a.finish_round()
        slots = self._packed._buffers.slot[: len(into[0])]  # source * max_tokens + token
        return torch.where(slots < 0, -1, slots % self.max_tokens)


class RowFetch(RowExchange):
    """Rows and scales that each token's ranks fetch from its owner.

    A round dispatches no token: its dispatch signals that all rows are in the outboxes, and its
    combine that all have been fetched.

    Args:
        group: The ranks.
        max_tokens: Maximum tokens of a rank in one round.
        options: Options of the all-to-all.
        row_bytes: Bytes of a row, a multiple of 16.
        scale_bytes: Bytes of a row's scales, a multiple of 4, or 0.
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
        # An outbox has only rows for this rank's tokens.
        slots = -(-max_tokens // group.size)
        sizes = {"max_tokens": slots, "hidden": pitch // torch.bfloat16.itemsize}
        super().__init__(group, max_tokens, {**sizes, **options})
        self._entries = self._entry("fetch_rows")
        with disable_inference_mode():
            # torch copies strided rows faster in wide elements.
            outbox = self.a2a.output().view(group.size * slots, -1)
            self._rows = outbox.view(torch.int64)[:, : row_bytes // 8]
            self._scales = outbox.view(torch.int32)[:, row_bytes // 4 :][:, : scale_bytes // 4]
        self._args = FetchArgs(site=self.a2a.site)
        self._args.row_bytes, self._args.scale_bytes = row_bytes, scale_bytes

    def run(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        packing: Packing,
        into: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        """Fill `into` with this rank's packed rows and their scales.

        Args:
            rows: This rank's rows, `[tokens, *]`, of row_bytes each.
            scales: Their scales, `[tokens, *]`, of scale_bytes each, or None.
            packing: Sources of the packed rows.
            into: Rows and scales `[rows, *]` of the same dtypes.
        """
        self._rows[: len(rows)].copy_(rows.view(torch.int64))
        if scales is not None:
            self._scales[: len(scales)].copy_(scales.view(torch.int32))
        self.a2a.dispatch(*self._no_tokens)
        self._fetch(packing, into)
        self.a2a.finish_round()

    @exclusive_call("dispatch")
    def _fetch(self, packing: Packing, into: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        args, (rows, scales) = self._args, into
        args.packed, args.rows = packing.packed(len(rows)), rows.data_ptr()
        args.scales = 0 if scales is None else scales.data_ptr()
        self._entries.run("fetch_rows", args, 0)

    def close(self) -> None:
        """Free the memory. Local."""
        del self._rows, self._scales
        super().close()


class RowCombine(RowExchange):
    """Sums at each token's owner over the ranks that have a row of the token.

    Rows have `hidden` elements of `dtype`.
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
        self._args = ReturnArgs(site=self.a2a.site, arrived=self._arrived.data_ptr())
        self.a2a.on_restart(self._reset)
        synchronize_stream(group.device)

    def run(self, rows: torch.Tensor, to: Packing, add: torch.Tensor | None) -> torch.Tensor:
        """Return `out[t] = sum over ranks + add[t]`, in fp32 and rank order, rounded once.

        Args:
            rows: `[rows, hidden]` in the order that RowDispatch packs.
            to: The dispatch's packing.
            add: `[tokens, hidden]`, or None.
        """
        # An empty dispatch ensures that peers have read an earlier combine's rows.
        self.a2a.dispatch(*self._no_tokens)
        self._send(rows, to)
        return self.a2a.combine_recv(add=add)

    def _reset(self) -> None:
        """Reset the counter of a broken round."""
        self._arrived.zero_()

    @exclusive_call("combine")
    def _send(self, rows: torch.Tensor, to: Packing) -> None:
        args = self._args
        args.rows, args.packed = rows.data_ptr(), to.packed(len(rows))
        args.in_rank, args.own_tokens = to.in_rank.data_ptr(), len(to.in_rank)
        self.a2a.expect_state(State.RECEIVED, "send")
        self._entries.run("return_rows", args, 0)
        self.a2a.mark_sent(len(to.in_rank))


class Announcement(RowExchange):
    """Integers of each rank that all ranks read; `size` is their number per rank."""

    def __init__(self, group: Group, max_tokens: int, options: dict[str, Any], size: int) -> None:
        super().__init__(group, max_tokens, {"max_tokens": 1, "stats": size, **options})

    def tell(self, numbers: torch.Tensor) -> torch.Tensor:
        """Send int32 `[size]`; return a view `[ep_size, size]` that is valid until `finish`."""
        words = self.a2a.dispatch(*self._no_tokens, stats=numbers).stats
        assert words is not None
        return words

    def finish(self) -> None:
        """End the round, after all readers of the view have been enqueued."""
        self.a2a.finish_round()


def exchange_bytes(ranks: int, max_tokens: int, row_bytes: int) -> int:
    """Return the bytes of symmetric memory of a RowFetch and a RowCombine in bfloat16."""
    ranks = check_int("ranks", ranks, 1, MAX_ROW_RANKS)
    sizes: dict[str, Any] = {"ranks": ranks, "top_k": ranks, "num_experts": ranks}
    sizes |= {"hidden": row_bytes // torch.bfloat16.itemsize, "payloads": BLANK}
    fetch = AllToAll.memory_bytes(**sizes, max_tokens=-(-max_tokens // ranks))
    return fetch + AllToAll.memory_bytes(**sizes, max_tokens=max_tokens, combine="gemm_push")
