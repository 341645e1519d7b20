"""Rows to the ranks that a table names, packed source after source, and sums of rows back.

Each exchange is a `weft.AllToAll` whose experts are the ranks: a token's ids are the ranks that it
goes to. Its received rows have one group, so `weft.grouping` packs them in the order of source
rank, then token; a kernel of this folder stores such rows back at their owners. Every call is a
whole round, so calls may come in any order that is the same on all ranks, and be captured in graphs
one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from weft.alltoall.api import AllToAll
from weft.alltoall.received import Payload
from weft.compat.return_rows import ReturnArgs, load_entries
from weft.grouping.entry import Grouping
from weft.grouping.rounds import GroupRounds
from weft.memory import Group
from weft.runtime.entries import Build
from weft.runtime.stream import finish
from weft.runtime.watched import one_call


class Closes(Protocol):
    """What is given back by `close`."""

    def close(self) -> None:
        """Give it back."""


T = TypeVar("T", bound=Closes)

VECTOR_BYTES = 16
NO_ROW = 8  # columns of bfloat16 that a combine must have where none is needed


@dataclass(frozen=True, slots=True)
class Returning:
    """Where the packed rows of a dispatch came from, and who has rows of this rank's tokens.

    tokens: int32 `[rows]`, each row's token at its source.
    until: int32 `[ep_size, ep_size]`: rows that ranks up to i sent to rank j.
    in_rank: bool `[tokens, ep_size]`: does the token have a row on that rank?
    """

    tokens: torch.Tensor
    until: torch.Tensor
    in_rank: torch.Tensor


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
    Collective. Raises what AllToAll raises.
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
        self._watched = self.a2a._watched
        build = Build(defines=self.a2a._build.defines)
        self._entries = _voted(
            self.a2a, lambda: load_entries(group.device, self.a2a._geometry.shape, build)
        )
        self._nothing = _no_tokens(group)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=group.device)
        self._args = ReturnArgs(site=self.a2a._workspace.site, arrived=self._arrived.data_ptr())
        finish(group.device)

    def run(self, rows: torch.Tensor, to: Returning, add: torch.Tensor | None) -> torch.Tensor:
        """Return `out[t] = sum over ranks + add[t]`, in fp32 and rank order, rounded once.

        rows: `[rows, hidden]` in the order that RowDispatch packs.   add: `[tokens, hidden]`.
        """
        # A dispatch of no tokens: peers have read what an earlier combine brought them.
        self.a2a.dispatch(*self._nothing)
        self._send(rows, to)
        return self.a2a.combine_recv(add=add)

    @one_call("combine")
    def _send(self, rows: torch.Tensor, to: Returning) -> None:
        args = self._args
        args.rows, args.limit = rows.data_ptr(), len(rows)
        args.tokens, args.until = to.tokens.data_ptr(), to.until.data_ptr()
        args.in_rank, args.own_tokens = to.in_rank.data_ptr(), len(to.in_rank)
        self.a2a._rounds.expect_send()
        self._entries.run("return_rows", args, 0)
        self.a2a._rounds.sent(len(to.in_rank))

    def close(self) -> None:
        """Give the memory back. Local."""
        self._entries.close()
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
        self._nothing = _no_tokens(group)

    def tell(self, numbers: torch.Tensor) -> torch.Tensor:
        """Send int32 `[size]`; return a view `[ep_size, size]` that is valid until `finish`."""
        told = self.a2a.dispatch(*self._nothing, stats=numbers).stats
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


def _no_tokens(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload and ids of a dispatch that sends none."""
    return (
        torch.zeros((0, VECTOR_BYTES), dtype=torch.uint8, device=group.device),
        torch.zeros((0, group.size), dtype=torch.int32, device=group.device),
    )


def _packed(a2a: AllToAll) -> GroupRounds:
    shape = a2a._geometry.shape
    grouping = Grouping("contiguous", 1, shape.ranks * shape.tokens, 1)
    return _voted(a2a, lambda: GroupRounds(a2a, grouping, True, own_rows=False))


def _voted(a2a: AllToAll, make: Callable[[], T]) -> T:
    """What an all-to-all needs beside itself; where one rank cannot make it, none has either."""
    made: list[T] = []
    problem: Exception | None = None
    try:
        made.append(make())
    except Exception as error:  # whatever it is, every rank hears of it
        problem = error
        a2a.close()

    def undo() -> None:
        made[0].close()
        a2a.close()

    a2a.group.vote(problem, doing="preparing an exchange of rows", undo=undo)
    return made[0]
