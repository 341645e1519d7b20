"""What may be sent of experts' results, and in which parts: checks of `ExpertGroups.send`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.arguments import integer
from weft.errors import InvalidArgument, OutOfOrder
from weft.ops.alltoall import AllToAll
from weft.ops.check import check_alignment, check_columns, check_tensor

COLUMNS = 128  # parts begin at multiples of it: a block of FP8
LANE_COLUMNS = 16  # and tiles at multiples of these, where nothing is made FP8
MAX_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Signal:
    """How a product that still runs tells which of its results are there.

    It overlaps as far as the product makes one block of columns after the other, for all experts.

    cells: int32 `[ceil(hidden / block_columns)]`, zeros before the product begins. It adds 1 to the
        cell of a tile's columns for each tile that it has stored: `atom.add.release.gpu` by one
        thread of a CTA, behind a barrier of the CTA's stores. The send empties them.
    block_rows, block_columns: of a tile. Each expert's rows are tiles of their own, so a cell
        counts up to the sum over experts of `ceil(counts[e] / block_rows)`.
    """

    cells: torch.Tensor
    block_rows: int
    block_columns: int

    def check(self, a2a: AllToAll, columns: tuple[int, int] | None) -> None:
        """Raise InvalidArgument naming what is wrong and what it may be."""
        shape = a2a._geometry.shape
        if columns is not None:
            raise InvalidArgument(
                f"columns is {columns} beside a signal, by which all columns are sent in one call: "
                "pass one of the two"
            )
        unit = COLUMNS if shape.way == "fp8" else LANE_COLUMNS
        for name, value, step in (
            ("block_rows", self.block_rows, 1),
            ("block_columns", self.block_columns, unit),
        ):
            if integer(f"signal.{name}", value, 1, MAX_BLOCK) % step:
                raise InvalidArgument(
                    f"signal.{name} is {value}; it must be a multiple of {step} in 1..{MAX_BLOCK}"
                )
        blocks = -(-shape.hidden // self.block_columns)
        numbers, device = (torch.int32,), a2a.group.device
        check_tensor("signal.cells", self.cells, shape=(blocks,), dtypes=numbers, device=device)
        check_alignment("signal.cells", self.cells, self.cells.itemsize)


def check_sends(a2a: AllToAll) -> None:
    """Raise InvalidArgument for an all-to-all whose experts' ranks cannot send by themselves."""
    way = a2a._geometry.shape.way
    if way == "pull":
        raise InvalidArgument(
            "send on an all-to-all with combine_by='pull', whose owners fetch the rows: build it "
            "with combine_by='push', 'fp8' or 'choices', or use scatter"
        )
    if not a2a._build.halves:
        raise InvalidArgument("send on an all-to-all built without halves; pass halves=True")


def check_scatters(a2a: AllToAll) -> None:
    """Raise InvalidArgument for an all-to-all without an output to scatter into."""
    if a2a._geometry.shape.way == "choices":
        raise InvalidArgument(
            "scatter on an all-to-all with combine_by='choices', whose rows are summed at their "
            "owners: use send, or build it with combine_by='pull', 'push' or 'fp8'"
        )


def check_homes(a2a: AllToAll) -> None:
    """Raise InvalidArgument for an all-to-all whose rows have no homes of their own."""
    way = a2a._geometry.shape.way
    if way != "choices":
        raise InvalidArgument(
            f"sent on an all-to-all with combine_by={way!r}, which has no homes to store rows at: "
            "use send, or build it with combine_by='choices'"
        )


def next_columns(columns: tuple[int, int] | None, hidden: int, sent: int) -> tuple[int, int]:
    """The columns of this send: all of them, or the next part.

    sent: columns that earlier parts of this round took.

    Raises InvalidArgument for what is no part of a row, OutOfOrder for a part that is not the next.
    """
    if columns is None:
        columns = (0, hidden)
    first, end = check_columns(columns, hidden, COLUMNS)
    if first != sent:
        raise OutOfOrder(
            f"columns is {columns}, and columns 0..{sent} of this round have been sent: parts come "
            f"in order, the next begins at {sent}"
        )
    return first, end
