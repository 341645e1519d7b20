"""Rows to the ranks that a table names, packed source after source, and sums of rows back.

Each exchange is a `weft.AllToAll` whose experts are the ranks: a token's ids are the ranks that it
goes to. Its received rows have one group, so `weft.grouping` packs them in the order of source
rank, then token. Every call is a whole round, so calls may come in any order that is the same on
all ranks, and be captured in graphs one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.alltoall.api import AllToAll
from weft.alltoall.received import Payload
from weft.grouping.entry import Grouping
from weft.grouping.rounds import GroupRounds
from weft.memory import Group

VECTOR_BYTES = 16
NO_ROW = 8  # columns of bfloat16 that a combine must have where none is needed


class RowDispatch:
    """Rows of several payloads to the ranks of each token, into tensors of the caller's.

    row_bytes: of each payload.   options: of the all-to-all.
    Collective. Raises what AllToAll and its grouping raise.
    """

    def __init__(
        self, group: Group, max_tokens: int, row_bytes: Sequence[int], options: dict[str, Any]
    ) -> None:
        self.max_tokens = max_tokens
        self.a2a = AllToAll(
            group,
            max_tokens=max_tokens,
            hidden=NO_ROW,
            payloads=[Payload((size,), torch.uint8) for size in row_bytes],
            **_between_ranks(group),
            **options,
        )
        self._packed = _packed(self.a2a)

    def run(
        self, payloads: Sequence[torch.Tensor], ranks: torch.Tensor, into: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Send each token's rows; fill `into` with what came, in order of source, then token.

        payloads: uint8 `[tokens, row_bytes]` each.   ranks: int32 `[tokens, ep_size]`, entry r is r
        where the token goes to rank r, else -1.   into: uint8 `[rows, row_bytes]` each; rows that
        do not fit are dropped, and refused by `check`.

        Returns int32 `[ep_size * max_tokens]`, the slot `source * max_tokens + token` of each row,
        overwritten by the next call.
        """
        self._packed.gather(self.a2a.dispatch(payloads, ranks), into)
        self.a2a._rounds.finish()
        return self._packed.buffers.slot

    def close(self) -> None:
        """Give the memory back. Local."""
        self._packed.close()
        self.a2a.close()


class RowCombine:
    """Sums at each token's owner of the rows that the ranks of the token have.

    hidden, dtype: of a row.   options: of the all-to-all.
    Collective. Raises what AllToAll and its grouping raise.
    """

    def __init__(
        self,
        group: Group,
        max_tokens: int,
        hidden: int,
        dtype: torch.dtype,
        options: dict[str, Any],
    ) -> None:
        self.max_tokens = max_tokens
        self.a2a = AllToAll(
            group,
            max_tokens=max_tokens,
            hidden=hidden,
            dtype=dtype,
            payloads=[Payload((VECTOR_BYTES,), torch.uint8)],
            combine="gemm_push",
            split_phase=True,
            **_between_ranks(group),
            **options,
        )
        self._packed = _packed(self.a2a)
        # Only the ranks of the tokens travel; a payload there must be.
        size, device = (group.size * max_tokens, VECTOR_BYTES), group.device
        self._blank = torch.zeros(size, dtype=torch.uint8, device=device)
        self._received = torch.zeros(size, dtype=torch.uint8, device=device)

    def run(
        self, rows: torch.Tensor, ranks: torch.Tensor, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `out[t] = sum over ranks + add[t]`, in fp32 and rank order, rounded once.

        rows: `[rows, hidden]` in the order that RowDispatch packs.   ranks: those of the dispatch.
        add: `[tokens, hidden]`.
        """
        received = self.a2a.dispatch(self._blank[: len(ranks)], ranks)
        self._packed.gather(received, (self._received[: len(rows)],))
        self._packed.send(rows, tuple(rows.shape))
        return self.a2a.combine_recv(add=add)

    def close(self) -> None:
        """Give the memory back. Local."""
        self._packed.close()
        self.a2a.close()


class Announcement:
    """Integers of each rank that all ranks read.

    size: integers of one rank.   options: of the all-to-all. Collective.
    """

    def __init__(self, group: Group, size: int, options: dict[str, Any]) -> None:
        self.a2a = AllToAll(
            group,
            max_tokens=1,
            hidden=NO_ROW,
            payloads=[Payload((VECTOR_BYTES,), torch.uint8)],
            stats=size,
            **_between_ranks(group),
            **options,
        )
        nothing: dict[str, Any] = {"device": group.device}
        self._row = torch.zeros((0, VECTOR_BYTES), dtype=torch.uint8, **nothing)
        self._ranks = torch.zeros((0, group.size), dtype=torch.int32, **nothing)

    def tell(self, numbers: torch.Tensor) -> torch.Tensor:
        """Send int32 `[size]`; return a view `[ep_size, size]` that is valid until `finish`."""
        told = self.a2a.dispatch(self._row, self._ranks, stats=numbers).stats
        assert told is not None
        return told

    def finish(self) -> None:
        """All that reads the view has been enqueued."""
        self.a2a._rounds.finish()

    def close(self) -> None:
        """Give the memory back. Local."""
        self.a2a.close()


def exchange_bytes(
    ranks: int, max_tokens: int, row_bytes: Sequence[int], hidden: int, dtype: torch.dtype
) -> int:
    """Bytes of symmetric memory of a RowDispatch and a RowCombine. Raises InvalidArgument."""
    sizes: dict[str, Any] = {"ranks": ranks, "top_k": ranks, "num_experts": ranks}
    sizes["max_tokens"] = max_tokens
    planes = [Payload((size,), torch.uint8) for size in row_bytes]
    blank = [Payload((VECTOR_BYTES,), torch.uint8)]
    there = AllToAll.memory_bytes(**sizes, hidden=NO_ROW, payloads=planes)
    back = AllToAll.memory_bytes(
        **sizes, hidden=hidden, dtype=dtype, payloads=blank, combine="gemm_push"
    )
    return there + back


def _between_ranks(group: Group) -> dict[str, Any]:
    return {"top_k": group.size, "num_experts": group.size}


def _packed(a2a: AllToAll) -> GroupRounds:
    shape = a2a._geometry.shape
    grouping = Grouping("contiguous", 1, shape.ranks * shape.tokens, 1)
    try:
        return GroupRounds(a2a, grouping, True, own_rows=False)
    except BaseException:
        a2a.close()
        raise
