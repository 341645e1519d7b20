# SPDX-License-Identifier: Apache-2.0
"""The all-to-alls that equal `MoeAlltoAll` objects share through `weft.lease`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll
from weft.compat.refusals import refuse_capture
from weft.errors import UsageError
from weft.group import Group
from weft.runtime.identity import MAX_LAYERS
from weft.runtime.operator import run_all
from weft.shape import DTYPE_NAMES

RowBytes = tuple[int, ...]  # row size of each payload; it determines a dispatch's memory


@dataclass(frozen=True, slots=True)
class CombineRow:
    """The rows that a combine returns; with `fp8`, they are sent as FP8 with scales."""

    hidden: int
    dtype: torch.dtype
    fp8: bool = False

    def __str__(self) -> str:
        return f"[{self.hidden}] {self.dtype}" + (" as FP8" if self.fp8 else "")


class MoeWorkspace:
    """One AllToAll per list of payload sizes and combine row.

    Attributes:
        size_asked: The requested size. Only objects that request the same size share a workspace,
            as in flashinfer.comm: engines use different sizes for rounds that may overlap.
        rows: The combine row of each payload list, known after its first round.
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
        self._unseen: list[UsageError] = []  # errors of closed all-to-alls
        self._layers = 0
        # Sent by dispatches without statistics.
        self.no_stats: torch.Tensor | None = None
        if stats:
            self.no_stats = torch.zeros(stats, dtype=torch.int32, device=group.device)

    def allocate_layer_number(self) -> int:
        """Return the next object number, from 1 on."""
        self._layers += 1
        return (self._layers - 1) % (MAX_LAYERS - 1) + 1

    def operator(self, payloads: RowBytes, row: CombineRow) -> AllToAll:
        """Return the all-to-all of these sizes; collective if new.

        Raises InvalidArgument if it is new in a graph capture, and errors of AllToAll's
        constructor.
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
        """Record the combine row of these payloads, and close all-to-alls built for another row."""
        first = payloads not in self.rows
        self.rows[payloads] = row
        if first:
            for key in [k for k in self._operators if k[0] == payloads and k[1] != row]:
                try:
                    self._operators.pop(key).close()
                except UsageError as error:  # refused ids of an earlier round
                    self._unseen.append(error)

    def drop(self, operators: Collection[AllToAll]) -> None:
        """Close those operators that are not broken, because a caller left their round. Local.

        Peers are notified. If every rank left, the next call creates them again on all ranks.
        Broken operators stay, so that later calls raise the reason.
        """
        unbroken = [
            k for k, each in self._operators.items() if each in operators and not each.broken
        ]
        run_all(*(self._operators.pop(key).close for key in unbroken))

    def check(self) -> None:
        """Raise errors that devices recorded for any of the all-to-alls."""
        run_all(*(operator.check for operator in self._operators.values()), self._raise_unseen)

    def close(self) -> None:
        """Free the memory. Local."""
        closes = [operator.close for operator in self._operators.values()]
        self._operators.clear()
        run_all(*closes, self._raise_unseen)

    def _raise_unseen(self) -> None:
        if self._unseen:
            raise self._unseen.pop()

    def check_open(self) -> None:
        """Do nothing: a shared workspace is closed only by its lease."""


def likely_row(payloads: Sequence[Payload], hidden: int | None) -> CombineRow:
    """Return the combine row that a first round is built for: the model's width and dtype.

    The first payload is x, in its own dtype or quantized with one or two values per byte.
    """
    first = payloads[0]
    dtype = first.dtype if first.dtype in DTYPE_NAMES else torch.bfloat16
    if hidden is None:
        packed = 2 if first.dtype == torch.uint8 else 1
        hidden = first.row_bytes // first.dtype.itemsize * packed
        vector = 16 // dtype.itemsize  # rows are whole vectors
        hidden = -(-hidden // vector) * vector
    return CombineRow(hidden, dtype)
