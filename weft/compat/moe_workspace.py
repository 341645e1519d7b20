# SPDX-License-Identifier: Apache-2.0
"""The all-to-alls of equal `MoeAlltoAll` objects, which `weft.lease` shares among them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll
from weft.compat.refusals import refuse_capture
from weft.errors import UsageError
from weft.memory import Group
from weft.runtime.identity import MAX_LAYERS
from weft.runtime.operator import call_all
from weft.shape import DTYPE_NAMES

RowBytes = tuple[int, ...]  # of each payload: the memory of a dispatch follows from them


@dataclass(frozen=True, slots=True)
class CombineRow:
    """The rows that a combine returns.   fp8: they travel as FP8 numbers and scales."""

    hidden: int
    dtype: torch.dtype
    fp8: bool = False

    def __str__(self) -> str:
        return f"[{self.hidden}] {self.dtype}" + (" as FP8" if self.fp8 else "")


class MoeWorkspace:
    """One AllToAll for each list of payload sizes and each combine row that calls have brought.

    size_asked: only objects that ask for the same size share, as in flashinfer.comm: engines keep
        rounds that may overlap in objects of different sizes.
    rows: the combine row of each payload list, once a round has shown it.
    """

    def __init__(
        self,
        group: Group,
        *,
        max_tokens: int,
        top_k: int,
        num_experts: int,
        stats: int,
        size_asked: int,
        timeout: float,
        first_timeout: float,
    ) -> None:
        self.group, self.size_asked = group, size_asked
        self._max_tokens, self._top_k, self._num_experts = max_tokens, top_k, num_experts
        self._timeout, self._first_timeout = timeout, first_timeout
        self._stats = stats
        self.rows: dict[RowBytes, CombineRow] = {}
        self._operators: dict[tuple[RowBytes, CombineRow], AllToAll] = {}
        self._unseen: list[UsageError] = []  # of all-to-alls that are closed
        self._layers = 0
        # What a dispatch sends that brings no statistics.
        self.no_stats: torch.Tensor | None = None
        if stats:
            self.no_stats = torch.zeros(stats, dtype=torch.int32, device=group.device)

    def _next_layer(self) -> int:
        """Return the number of another object that shares this workspace, from 1 on."""
        self._layers += 1
        return (self._layers - 1) % (MAX_LAYERS - 1) + 1

    def operator(self, payloads: RowBytes, row: CombineRow) -> AllToAll:
        """The all-to-all of these sizes; collective when it is new.

        Raises InvalidArgument in a graph capture that is the first to need it, and what AllToAll
        raises.
        """
        key = (payloads, row)
        if key not in self._operators:
            what = f"a round with payload rows of {list(payloads)} bytes and combine rows {row}"
            refuse_capture(self.group.device, what, "run one such round on all ranks before it")
            self._operators[key] = AllToAll(
                self.group,
                max_tokens=self._max_tokens,
                top_k=self._top_k,
                num_experts=self._num_experts,
                hidden=row.hidden,
                dtype=row.dtype,
                payloads=[Payload((size,), torch.uint8) for size in payloads],
                combine_dtype="fp8" if row.fp8 else None,
                stats=self._stats,
                timeout=self._timeout,
                first_timeout=self._first_timeout,
            )
        return self._operators[key]

    def learn(self, payloads: RowBytes, row: CombineRow) -> None:
        """Rounds with these payloads return `row`; an all-to-all made for another row is closed."""
        first = payloads not in self.rows
        self.rows[payloads] = row
        if first:
            for key in [k for k in self._operators if k[0] == payloads and k[1] != row]:
                try:
                    self._operators.pop(key).close()
                except UsageError as error:  # refused ids: the round of this call was another one
                    self._unseen.append(error)

    def drop(self, operators: Collection[AllToAll]) -> None:
        """Close those of them that work: a caller has left their round, and peers are told.

        Local. Where every rank left, the next call that needs one makes it anew on all of them.
        Broken ones stay, to raise the reason in later calls.
        """
        left = [k for k, each in self._operators.items() if each in operators and not each.broken]
        call_all(*(self._operators.pop(key).close for key in left))

    def check(self) -> None:
        """Raise what the device has recorded for any of its all-to-alls."""
        call_all(*(operator.check for operator in self._operators.values()), self._raise_unseen)

    def close(self) -> None:
        """Give the memory back. Local."""
        closes = [operator.close for operator in self._operators.values()]
        self._operators.clear()
        call_all(*closes, self._raise_unseen)

    def _raise_unseen(self) -> None:
        if self._unseen:
            raise self._unseen.pop()

    def _check_open(self) -> None:
        """A lease may share it: nobody else closes it."""


def likely_row(payloads: Sequence[Payload], hidden: int | None) -> CombineRow:
    """The combine row that a first round is built for: as wide as the model, in its dtype.

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
