"""Workspaces that equal all-to-alls of one process share, because their rounds never overlap.

Engines make one all-to-all for each layer and run one layer at a time. All that ask for the same
sizes get the same symmetric memory. Which call makes it and which gives it back follows from the
sequence of calls alone, so it is the same on every rank, as collective creation needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from weft.alltoall.api import AllToAll
from weft.alltoall.received import Payload
from weft.errors import InvalidArgument
from weft.memory import Group
from weft.runtime.stream import capturing
from weft.shape import DTYPE_NAMES

RowBytes = tuple[int, ...]  # of each payload: what a dispatch's memory follows from


@dataclass(frozen=True, slots=True)
class Terms:
    """What two callers must have in common to share a workspace.

    bytes_asked: a caller that asks for another size wants memory of its own, as in flashinfer.comm:
        engines keep rounds that may overlap in objects of different sizes.
    """

    group: Group
    max_tokens: int
    top_k: int
    num_experts: int
    stats: int
    bytes_asked: int
    timeout: float
    first_timeout: float


@dataclass(frozen=True, slots=True)
class CombineRow:
    """The rows that a combine returns; fp8: FP8 numbers and scales travel in their stead."""

    hidden: int
    dtype: torch.dtype
    fp8: bool = False

    def __str__(self) -> str:
        return f"[{self.hidden}] {self.dtype}" + (" as FP8" if self.fp8 else "")


class SharedWorkspace:
    """One AllToAll for each list of payload sizes and each combine row that calls have brought.

    expected: the combine row that rounds of a payload list turned out to have.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms, self.users = terms, 0
        self.expected: dict[RowBytes, CombineRow] = {}
        self._operators: dict[tuple[RowBytes, CombineRow], AllToAll] = {}
        self._silence: torch.Tensor | None = None
        if terms.stats:
            device = terms.group.device
            self._silence = torch.zeros(terms.stats, dtype=torch.int32, device=device)

    def operator(self, payloads: RowBytes, row: CombineRow) -> AllToAll:
        """The all-to-all of these sizes; collective when it is new.

        Raises InvalidArgument in a graph capture that is the first to need it, and what AllToAll
        raises.
        """
        key = (payloads, row)
        if key not in self._operators:
            terms = self.terms
            if capturing(terms.group.device):
                raise InvalidArgument(
                    f"payload rows of {list(payloads)} bytes and combine rows {row} come for the "
                    "first time in a graph capture, where no memory can be made: run one such "
                    "round on all ranks before it"
                )
            self._operators[key] = AllToAll(
                terms.group,
                max_tokens=terms.max_tokens,
                top_k=terms.top_k,
                num_experts=terms.num_experts,
                hidden=row.hidden,
                dtype=row.dtype,
                payloads=[Payload((size,), torch.uint8) for size in payloads],
                combine_dtype="fp8" if row.fp8 else None,
                stats=terms.stats,
                timeout=terms.timeout,
                first_timeout=terms.first_timeout,
            )
        return self._operators[key]

    def settle(self, payloads: RowBytes, row: CombineRow) -> None:
        """Rounds with these payloads return `row`; what was made for another guess goes."""
        guessed = self.expected.get(payloads)
        self.expected[payloads] = row
        if guessed is None:
            for key in [k for k in self._operators if k[0] == payloads and k[1] != row]:
                self._operators.pop(key).close()

    def drop(self, operators: Collection[AllToAll]) -> None:
        """Close those of them that run: a caller has left in their round, and peers hear of it.

        Local. Where every rank left, the next call that needs one makes it anew on all of them.
        Those that are broken stay, to raise why in later calls.
        """
        for key, each in list(self._operators.items()):
            if each in operators and not each.broken:
                self._operators.pop(key).close()

    def stats(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """What a dispatch says: zeros stand for statistics that a call does not bring."""
        return self._silence if given is None else given

    def check(self) -> None:
        """Raise what the device has recorded for any of its all-to-alls."""
        for operator in self._operators.values():
            operator.check()

    def close(self) -> None:
        """Give the memory back. Local."""
        for operator in self._operators.values():
            operator.close()
        self._operators.clear()


def guess(payloads: Sequence[Payload], hidden: int | None) -> CombineRow:
    """The combine row of a first round: as wide as the model's hidden size, in its dtype.

    The first payload is x: in its own dtype, or quantised, a byte for one number or for two.
    """
    first = payloads[0]
    dtype = first.dtype if first.dtype in DTYPE_NAMES else torch.bfloat16
    if hidden is None:
        packed = 2 if first.dtype == torch.uint8 else 1
        hidden = first.row_bytes // first.dtype.itemsize * packed
        vector = 16 // dtype.itemsize  # rows are whole vectors
        hidden = -(-hidden // vector) * vector
    return CombineRow(hidden, dtype)


_shared: dict[Terms, SharedWorkspace] = {}


def lease(terms: Terms) -> SharedWorkspace:
    """The workspace of these terms. Local: its memory is made when calls bring their sizes."""
    workspace = _shared.get(terms)
    if workspace is None:
        workspace = _shared[terms] = SharedWorkspace(terms)
    workspace.users += 1
    return workspace


def release(workspace: SharedWorkspace) -> None:
    """Give a lease back; the last one frees the memory. Local."""
    workspace.users -= 1
    if not workspace.users:
        del _shared[workspace.terms]
        workspace.close()
