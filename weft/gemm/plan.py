"""How a grouped product runs: one frozen object that its maker and its consumers share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from weft.errors import InvalidArgument

Order = Literal["expert", "column"]
FP8 = torch.float8_e4m3fn
DTYPES = (FP8, torch.bfloat16, torch.float16)
COLUMNS = 128  # of the weights that one accumulator covers: a block of their scales


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """Tiles and threads of a grouped product. No field changes what it means.

    block_rows: rows of a tile: 16, 32, 64 or 128.
    block_columns: rows of the weights that a tile multiplies with: 128 or 256. Half of 256 are up
        where there is gating, which needs 256.
    block_depth: columns of k in a step, 64 or 128; FP8 has 128.
    swap: the weights are the first operand, so few rows waste no work; needs at most 64 rows.
    stages: steps in flight.   warps: 4, 8 or 16.   ctas_per_sm: of the persistent grid.
    order: "expert": (expert, columns, rows), or "column": (columns, expert, rows).
    flatten: loads of the next tile start before this one is stored.
    defer: FP8, 128 columns: a step's part is scaled and added beside the next step's product.
    ahead: scales are loaded into registers a step ahead, not staged in shared memory.
    unroll: steps of k in one turn of the loop.

    Raises InvalidArgument for a number out of its range.
    """

    block_rows: int
    block_columns: int = COLUMNS
    block_depth: int = 128
    swap: bool = False
    stages: int = 4
    warps: int = 4
    ctas_per_sm: int = 1
    order: Order = "expert"
    flatten: bool = True
    defer: bool = False
    ahead: bool = False
    unroll: int = 1

    def __post_init__(self) -> None:
        """Refuse what the kernel has no tile for."""
        choices = {
            "block_rows": (16, 32, 64, 128),
            "block_columns": (COLUMNS, 2 * COLUMNS),
            "block_depth": (64, 128),
            "stages": tuple(range(1, 17)),
            "warps": (4, 8, 16),
            "ctas_per_sm": tuple(range(1, 9)),
            "unroll": (1, 2, 4),
            "order": get_args(Order),
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise InvalidArgument(f"{name} is {value!r}; it must be one of {allowed}")
        if self.defer and self.block_columns != COLUMNS:
            raise InvalidArgument(f"defer with block_columns {self.block_columns}: want {COLUMNS}")
        if self.block_rows < 64 and not self.swap:
            raise InvalidArgument(
                f"block_rows is {self.block_rows}: tiles below 64 rows need swap=True"
            )

    def column_blocks(self, columns: int, gated: bool = False) -> int:
        """Tiles beside each other that `columns` columns of the weights take."""
        step = COLUMNS if gated else self.block_columns
        return -(-(columns // 2 if gated else columns) // step)

    def row_blocks(self, counts: torch.Tensor) -> torch.Tensor:
        """Tiles above each other of each expert: int32 `[experts]`, on the device of `counts`."""
        return (counts + (self.block_rows - 1)) // self.block_rows

    def max_row_blocks(self, rows: int, experts: int) -> int:
        """As many row blocks as `rows` rows of `experts` experts can at most make."""
        return rows // self.block_rows + min(rows, experts)

    def cells(self, rows: int, experts: int, columns: int, gated: bool = False) -> int:
        """Cells of a signal: one for each column block, or for as many row blocks as can be."""
        if self.order == "column":
            return self.column_blocks(columns, gated)
        return self.max_row_blocks(rows, experts)


def plan(
    experts: int,
    rows_per_expert: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    order: Order = "expert",
    gated: bool = False,
) -> GemmPlan:
    """The plan for about `rows_per_expert` rows of each of `experts` experts.

    n, k: columns of the product and of a.   dtype: of a and b.   gated: for Gated and GatedQuant.
    Any number of rows is served by any plan. Raises InvalidArgument for another dtype.
    """
    if dtype not in DTYPES:
        raise InvalidArgument(f"dtype is {dtype}; a grouped product takes {DTYPES}")
    depth = 128 if dtype == FP8 else 64
    few_steps = k <= 32 * depth  # a tile is short: its end is worth hiding
    tile = _gated_tile(rows_per_expert) if gated else _tile(rows_per_expert, few_steps)
    return replace(tile, block_depth=depth, order=order)


# The fastest of benchmarks/gemm_sweep.py on one H200, FP8, 32 experts of DeepSeek-V3, 2026-11-21.
# BF16 has the same tiles in bytes and was not chosen by a measurement of its own.
def _tile(rows: int, few_steps: bool) -> GemmPlan:
    if rows <= 16:
        return GemmPlan(16, swap=True, stages=3, ctas_per_sm=3, flatten=False)
    if rows <= 32:
        return GemmPlan(32, swap=True, stages=5, ctas_per_sm=2)
    if rows <= 64:
        return GemmPlan(64, stages=4, ctas_per_sm=2, flatten=few_steps)
    return GemmPlan(128, 2 * COLUMNS, stages=4, warps=8, flatten=False)


def _gated_tile(rows: int) -> GemmPlan:
    if rows <= 32:
        return GemmPlan(16 if rows <= 16 else 32, 2 * COLUMNS, swap=True, stages=5)
    if rows <= 64:
        return GemmPlan(64, 2 * COLUMNS, stages=5, warps=8)
    return GemmPlan(128, 2 * COLUMNS, stages=4, warps=8, flatten=False)
