# SPDX-License-Identifier: Apache-2.0
"""Sends rows to each token's destination ranks, packed by source, and returns their sums.

Each exchange is a `weft.AllToAll` whose experts are the ranks: a token's ids are its destination
ranks. `RowDispatch` sends small rows, which `weft.grouping` packs by source rank, then token.
`RowFetch` then fetches large rows in the same order, and `RowCombine` returns them, each with a
kernel of this package. Every call is a complete round, so any order of calls that is the same on
all ranks is valid, and each call may be captured in a separate graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll, State
from weft.arguments import check_int
from weft.compat.packed_rows import FetchArgs, PackedRows, ReturnArgs, load_kernel
from weft.group import Group
from weft.grouping.config import GroupConfig
from weft.grouping.operator import RowGroups
from weft.runtime.ambient import disable_inference_mode
from weft.runtime.kernels import Build, Kernels
from weft.runtime.operator import exclusive_call, run_all
from weft.runtime.stream import synchronize_stream
from weft.shape import MAX_TOP_K

VECTOR_BYTES = 16
# Each rank is one of a token's top-k entries, and each entry is a lane of a warp.
MAX_ROW_RANKS = MAX_TOP_K
MIN_HIDDEN = 8  # bfloat16 columns of a combine row if no row is combined; the minimum
BLANK_PAYLOADS = (Payload((VECTOR_BYTES,), torch.uint8),)  # payload of a dispatch without tokens
P = TypeVar("P", RowGroups, Kernels)


@dataclass(frozen=True, slots=True)
class Packing:
    """Sources of a rank's packed rows, and destination ranks of its own tokens.

    Attributes:
        tokens: int32 `[rows]`, each row's token at its source.
        prefix: int32 `[ep_size, ep_size]`: rows that ranks up to i sent to rank j.
        in_rank: bool `[tokens, ep_size]`: whether the token has a row on that rank.
    """

    tokens: torch.Tensor
    prefix: torch.Tensor
    in_rank: torch.Tensor

    def pack_rows_arg(self, rows: int) -> PackedRows:
        """Build the kernel argument for this number of packed rows."""
        return PackedRows(
            tokens=self.tokens.data_ptr(),
            prefix=self.prefix.data_ptr(),
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
        sizes = {"max_tokens": max_tokens, "hidden": MIN_HIDDEN, "payloads": BLANK_PAYLOADS}
        sizes |= {"top_k": ranks, "num_experts": ranks}
        self.a2a = AllToAll(group, **{**sizes, **options})
        self.begin_call, self.end_call = self.a2a.begin_call, self.a2a.end_call
        self.debug_checks = self.a2a.debug_checks
        self._resources: list[RowGroups | Kernels] = []
        self._empty_inputs = (
            torch.zeros((0, VECTOR_BYTES), dtype=torch.uint8, device=group.device),
            torch.zeros((0, group.size), dtype=torch.int32, device=group.device),
        )

    def _create_resource(self, create: Callable[[], P]) -> P:
        """Create a resource on all ranks. If one rank fails, every rank closes its own."""
        created: list[P] = []
        try:
            with self.a2a.group.creation() as creation:
                creation.add_heap(self.a2a.heap)
                self.a2a.group.run_collective(
                    lambda: created.append(create()), action="creating a row exchange"
                )
        except BaseException:
            for resource in created:
                resource.close()
            self.a2a.close()
            raise
        self._resources += created
        return created[0]

    def _load_kernel(self, name: str) -> Kernels:
        """Load a kernel of packed_rows for the maximum number of rows that this rank may get."""
        shape, group = self.a2a.config.shape, self.a2a.group
        build = Build(defines=self.a2a.build.defines)
        max_rows = group.size * self.max_tokens
        return self._create_resource(
            lambda: load_kernel(group.device, name, shape, max_rows, build)
        )

    def close(self) -> None:
        """Free the memory. Local."""
        run_all(*(resource.close for resource in (*self._resources, self.a2a)))


class RowDispatch(RowExchange):
    """Sends small rows of several payloads to each token's ranks and packs the received ones.

    `row_bytes` are the payloads' row sizes.
    """

    def __init__(
        self, group: Group, max_tokens: int, options: dict[str, Any], *row_bytes: int
    ) -> None:
        payloads = [Payload((size,), torch.uint8) for size in row_bytes]
        super().__init__(group, max_tokens, {"payloads": payloads, **options})
        config = GroupConfig("contiguous", 1, group.size * max_tokens, 1)
        self._packed = self._create_resource(
            lambda: RowGroups(self.a2a, config, True, has_rows=False)
        )

    def run(
        self, payloads: Sequence[torch.Tensor], ranks: torch.Tensor, out: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Send each token's rows, and write the received ones to `out` by source, then token.

        Args:
            payloads: uint8 `[tokens, row_bytes]` each.
            ranks: int32 `[tokens, ep_size]`; entry r is r if the token goes to rank r, otherwise
                -1.
            out: uint8 `[rows, row_bytes]` each. Rows that do not fit are dropped, and `check`
                raises.

        Returns:
            int32 `[rows]`, each row's token at its source, -1 for rows that no rank sent.
        """
        self._packed.gather_rows(self.a2a.dispatch(payloads, ranks), out)
        self.a2a.finish_round()
        slots = self._packed.buffers.slot[: len(out[0])]  # source * max_tokens + token
        return torch.where(slots < 0, -1, slots % self.max_tokens)


class RowFetch(RowExchange):
    """Fetches rows and scales from the ranks that own the tokens.

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
        # The outbox has max_tokens rows per rank, and only this rank's tokens use it.
        tokens_per_share = -(-max_tokens // group.size)
        sizes = {"max_tokens": tokens_per_share, "hidden": pitch // torch.bfloat16.itemsize}
        super().__init__(group, max_tokens, {**sizes, **options})
        self._kernels = self._load_kernel("fetch_rows")
        with disable_inference_mode():
            # torch copies strided rows faster in wide elements.
            outbox = self.a2a.output().view(group.size * tokens_per_share, -1)
            self._rows = outbox.view(torch.int64)[:, : row_bytes // 8]
            self._scales = outbox.view(torch.int32)[:, row_bytes // 4 :][:, : scale_bytes // 4]
        self._args = FetchArgs(site=self.a2a.site)
        self._args.row_bytes, self._args.scale_bytes = row_bytes, scale_bytes

    def run(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        packing: Packing,
        out: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        """Write this rank's packed rows and their scales to `out`.

        Args:
            rows: This rank's rows, `[tokens, *]`, of row_bytes each.
            scales: Their scales, `[tokens, *]`, of scale_bytes each, or None.
            packing: Sources of the packed rows.
            out: Rows and scales `[rows, *]` of the same dtypes.
        """
        self.a2a.check_running()  # first: the outbox of a group asleep must not be written
        self._rows[: len(rows)].copy_(rows.view(torch.int64))
        if scales is not None:
            self._scales[: len(scales)].copy_(scales.view(torch.int32))
        self.a2a.dispatch(*self._empty_inputs)
        self._fetch(packing, out)
        self.a2a.finish_round()

    @exclusive_call("dispatch")
    def _fetch(self, packing: Packing, out: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        args, (rows, scales) = self._args, out
        args.packed, args.rows = packing.pack_rows_arg(len(rows)), rows.data_ptr()
        args.scales = 0 if scales is None else scales.data_ptr()
        self._kernels.run("fetch_rows", args, 0)

    def close(self) -> None:
        """Free the memory. Local."""
        del self._rows, self._scales
        super().close()


class RowCombine(RowExchange):
    """Sums each token's rows over the ranks that have one, on the rank that owns the token.

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
        self._kernels = self._load_kernel("return_rows")
        self._arrived = torch.zeros(1, dtype=torch.int32, device=group.device)
        self._args = ReturnArgs(site=self.a2a.site, arrived=self._arrived.data_ptr())
        self.a2a.on_restart(self._reset)
        synchronize_stream(group.device)

    def run(self, rows: torch.Tensor, packing: Packing, add: torch.Tensor | None) -> torch.Tensor:
        """Return `out[t] = sum over ranks + add[t]`, in fp32 and rank order, rounded once.

        Args:
            rows: `[rows, hidden]` in the order of RowDispatch.
            packing: The dispatch's packing.
            add: `[tokens, hidden]`, or None.
        """
        # An empty dispatch ensures that peers have read an earlier combine's rows.
        self.a2a.dispatch(*self._empty_inputs)
        self._send(rows, packing)
        return self.a2a.combine_recv(add=add)

    def _reset(self) -> None:
        """Reset the counter of a broken round."""
        self._arrived.zero_()

    @exclusive_call("combine")
    def _send(self, rows: torch.Tensor, packing: Packing) -> None:
        args = self._args
        args.rows, args.packed = rows.data_ptr(), packing.pack_rows_arg(len(rows))
        args.in_rank, args.num_tokens = packing.in_rank.data_ptr(), len(packing.in_rank)
        self.a2a.expect_state(State.RECEIVED, "send")
        self._kernels.run("return_rows", args, 0)
        self.a2a.mark_sent(len(packing.in_rank))


class StatsExchange(RowExchange):
    """Sends `size` integers of each rank to all ranks."""

    def __init__(self, group: Group, max_tokens: int, options: dict[str, Any], size: int) -> None:
        super().__init__(group, max_tokens, {"max_tokens": 1, "stats": size, **options})

    def all_gather_stats(self, values: torch.Tensor) -> torch.Tensor:
        """Send int32 `[size]` and return all ranks' `[ep_size, size]`, a view until `finish`."""
        gathered = self.a2a.dispatch(*self._empty_inputs, stats=values).stats
        assert gathered is not None
        return gathered

    def finish(self) -> None:
        """End the round. Call it after enqueueing all readers of the view."""
        self.a2a.finish_round()


def compute_exchange_bytes(ranks: int, max_tokens: int, row_bytes: int) -> int:
    """Compute the bytes of symmetric memory of a RowFetch and a RowCombine in bfloat16."""
    ranks = check_int("ranks", ranks, 1, MAX_ROW_RANKS)
    sizes: dict[str, Any] = {"ranks": ranks, "top_k": ranks, "num_experts": ranks}
    sizes |= {"hidden": row_bytes // torch.bfloat16.itemsize, "payloads": BLANK_PAYLOADS}
    fetch = AllToAll.memory_bytes(**sizes, max_tokens=-(-max_tokens // ranks))
    return fetch + AllToAll.memory_bytes(**sizes, max_tokens=max_tokens, combine="gemm_push")
