"""How a grouped product runs: one frozen object that its maker and its consumers share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from weft.arguments import adopt, flags, integer, one_of
from weft.errors import InvalidArgument

FP8 = torch.float8_e4m3fn
DTYPES = (FP8, torch.bfloat16, torch.float16)
MAX_SIZE = 2**31 - 1
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
    flatten: loads of the next tile start before this one is stored.

    Raises InvalidArgument for a number out of its range.
    """

    block_rows: int
    block_columns: int = COLUMNS
    block_depth: int = 128
    swap: bool = False
    stages: int = 4
    warps: int = 4
    ctas_per_sm: int = 1
    flatten: bool = True

    def __post_init__(self) -> None:
        """Refuse what the kernel has no tile for."""
        choices: dict[str, Collection[object]] = {
            "block_rows": (16, 32, 64, 128),
            "block_columns": (COLUMNS, 2 * COLUMNS),
            "block_depth": (64, 128),
            "warps": (4, 8, 16),
        }
        for name, allowed in choices.items():
            adopt(self, **{name: one_of(name, getattr(self, name), allowed)})
        for name, high in (("stages", 16), ("ctas_per_sm", 8)):
            adopt(self, **{name: integer(name, getattr(self, name), 1, high)})
        flags(swap=self.swap, flatten=self.flatten)
        if self.block_rows < 64 and not self.swap:
            raise InvalidArgument(
                f"block_rows is {self.block_rows}: tiles below 64 rows need swap=True"
            )

    def column_blocks(self, columns: int, gated: bool = False) -> int:
        """Tiles beside each other that `columns` columns of the weights take."""
        step = COLUMNS if gated else self.block_columns
        return -(-(columns // 2 if gated else columns) // step)

    def max_row_blocks(self, rows: int, experts: int) -> int:
        """As many row blocks as `rows` rows of `experts` experts can at most make."""
        return rows // self.block_rows + min(rows, experts)


def plan(
    experts: int,
    rows_per_expert: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> GemmPlan:
    """The plan for a mean of about `rows_per_expert` rows over `experts` experts.

    n, k: columns of the product and of a.   dtype: of a and b.   gated: for Gated and GatedQuant.
    Any number of rows is served by any plan. Raises InvalidArgument for sizes that cannot be and
    another dtype.
    """
    one_of("dtype", dtype, DTYPES)
    integer("experts", experts, 0, MAX_SIZE)
    rows_per_expert = integer("rows_per_expert", rows_per_expert, 0, MAX_SIZE)
    n, k = integer("n", n, 1, MAX_SIZE), integer("k", k, 1, MAX_SIZE)
    flags(gated=gated)
    return tile_plan(experts, rows_per_expert, n, k, dtype, gated=gated)


def tile_plan(
    experts: int,
    rows_per_expert: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> GemmPlan:
    """`plan` of sizes that were checked: it stands in every call."""
    depth = 128 if dtype == FP8 else 64
    few_steps = k <= 32 * depth  # a tile is short: its end is worth hiding
    tile = _gated_tile(rows_per_expert) if gated else _tile(rows_per_expert, few_steps)
    if not gated and n % tile.block_columns:  # half of the last tile would be nobody's
        tile = replace(tile, block_columns=COLUMNS, stages=6)
    return replace(tile, block_depth=depth)


# Near the fastest on one H200 for FP8 and 32 experts of DeepSeek-V3 whose rows vary by chance about
# the mean, each plan with six drawings of rows, 2026-11-21. A tile holds more than the mean, so
# that most experts are one row block: 16 x 32 tiles then are just below whole turns of the grid,
# and a few second blocks would cost a turn (at a mean of 32, tiles of 32 rows took 282 us in a
# layer, not 247). BF16 has the same tiles in bytes, and was not measured for this.
def _tile(rows: int, few_steps: bool) -> GemmPlan:
    if rows <= 8:
        return GemmPlan(16, swap=True, stages=3, ctas_per_sm=3, flatten=False)
    if rows <= 20:
        return GemmPlan(32, swap=True, stages=5, ctas_per_sm=2, flatten=few_steps)
    if rows <= 80:
        return GemmPlan(64, stages=4, ctas_per_sm=2, flatten=few_steps)
    if rows <= 192:
        return GemmPlan(64, stages=3, ctas_per_sm=3, flatten=False)
    return GemmPlan(128, 2 * COLUMNS, stages=4, warps=8, flatten=False)


def _gated_tile(rows: int) -> GemmPlan:
    if rows <= 8:
        return GemmPlan(16, 2 * COLUMNS, swap=True, stages=5)
    if rows <= 20:
        return GemmPlan(32, 2 * COLUMNS, swap=True, stages=3, ctas_per_sm=2, flatten=False)
    if rows <= 72:
        return GemmPlan(64, 2 * COLUMNS, stages=5, flatten=False)
    return GemmPlan(128, 2 * COLUMNS, stages=4, warps=8, flatten=False)
