# SPDX-License-Identifier: Apache-2.0
"""All-to-alls that `MoeAlltoAll` objects of equal sizes share through `weft.lease`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from weft.alltoall.config import Payload
from weft.alltoall.operator import AllToAll
from weft.compat.checks import check_not_capturing
from weft.errors import UsageError
from weft.group import Group
from weft.runtime.identity import MAX_LAYERS
from weft.runtime.operator import run_all
from weft.shape import DTYPE_NAMES

RowBytes = tuple[int, ...]  # row size of each payload; it determines the memory of a dispatch


@dataclass(frozen=True, slots=True)
class CombineRow:
    """Format of the rows that a combine returns; with `fp8`, rows are sent as FP8 with scales."""

    hidden: int
    dtype: torch.dtype
    fp8: bool = False

    def __str__(self) -> str:
        return f"[{self.hidden}] {self.dtype}" + (" as FP8" if self.fp8 else "")


class MoeWorkspace:
    """One AllToAll per combination of payload sizes and combine row.

    Attributes:
        size_asked: The requested size. Only objects that request the same size share a workspace,
            as in flashinfer.comm: engines use different sizes for rounds that may overlap.
        combine_rows: The combine row of each payload list, known after its first round.
    """

    def __init__(
        self,
        group: Group,
        *,
        max_tokens: int,
        top_k: int,
        num_experts: int,
        stats: int,
        requested_size: int,
        timeout: float,
        first_timeout: float,
    ) -> None:
        self.group, self.requested_size = group, requested_size
        self._max_tokens, self._top_k, self._num_experts = max_tokens, top_k, num_experts
        self._timeout, self._first_timeout = timeout, first_timeout
        self._stats = stats
        self.combine_rows: dict[RowBytes, CombineRow] = {}
        self._operators: dict[tuple[RowBytes, CombineRow], AllToAll] = {}
        self._unreported_errors: list[
            UsageError
        ] = []  # errors of all-to-alls that have been closed
        self._layers = 0
        # Sent by dispatches without statistics.
        self.zero_stats: torch.Tensor | None = None
        if stats:
            self.zero_stats = torch.zeros(stats, dtype=torch.int32, device=group.device)

    def allocate_layer_number(self) -> int:
        """Return a layer number for a new object, starting at 1."""
        self._layers += 1
        return (self._layers - 1) % (MAX_LAYERS - 1) + 1

    def get_operator(self, payloads: RowBytes, row: CombineRow) -> AllToAll:
        """Return the all-to-all of these sizes. Collective if it is new.

        Raises InvalidArgument if it is new in a graph capture, and errors of AllToAll's
        constructor.
        """
        key = (payloads, row)
        if key not in self._operators:
            label = f"a round with payload rows of {list(payloads)} bytes and combine rows {row}"
            check_not_capturing(
                self.group.device, label, "run one such round on all ranks before it"
            )
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

    def record_combine_row(self, payloads: RowBytes, row: CombineRow) -> None:
        """Record the combine row of these payloads, and close all-to-alls with another row."""
        first = payloads not in self.combine_rows
        self.combine_rows[payloads] = row
        if first:
            for key in [k for k in self._operators if k[0] == payloads and k[1] != row]:
                try:
                    self._operators.pop(key).close()
                except UsageError as error:  # invalid ids of an earlier round
                    self._unreported_errors.append(error)

    def close_operators(self, operators: Collection[AllToAll]) -> None:
        """Close the operators whose round a caller abandoned, except for broken ones. Local.

        Peers are notified. If every rank closes them, the next call creates them again on all
        ranks. Broken operators stay, so that later calls raise the reason.
        """
        keys = [
            key
            for key, operator in self._operators.items()
            if operator in operators and not operator.broken
        ]
        run_all(*(self._operators.pop(key).close for key in keys))

    def check(self) -> None:
        """Raise errors that the device recorded for any of the all-to-alls."""
        run_all(*(operator.check for operator in self._operators.values()), self._raise_unreported)

    def close(self) -> None:
        """Free the memory. Local."""
        close_functions = [operator.close for operator in self._operators.values()]
        self._operators.clear()
        run_all(*close_functions, self._raise_unreported)

    def _raise_unreported(self) -> None:
        if self._unreported_errors:
            raise self._unreported_errors.pop()

    def check_open(self) -> None:
        """Do nothing: only the lease closes a shared workspace."""


def guess_combine_row(payloads: Sequence[Payload], hidden: int | None) -> CombineRow:
    """Guess the combine row of a first round from the payloads and the model's hidden size.

    The first payload is x, in its own dtype or quantized with one or two values per byte.
    """
    first = payloads[0]
    dtype = first.dtype if first.dtype in DTYPE_NAMES else torch.bfloat16
    if hidden is None:
        values_per_byte = 2 if first.dtype == torch.uint8 else 1
        hidden = first.row_bytes // first.dtype.itemsize * values_per_byte
        vector = 16 // dtype.itemsize  # rows are whole vectors
        hidden = -(-hidden // vector) * vector
    return CombineRow(hidden, dtype)
