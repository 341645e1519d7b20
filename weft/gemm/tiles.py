"""Which tile is where: from a tile's number to its expert, rows and columns, on the device.

Rows of an expert are cut into blocks of ROWS; blocks of all experts are numbered through, so empty
experts have none. A tile is a row block and a column block. No table is built: every CTA keeps the
running sum of blocks, one number for each expert, and finds its place by counting.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_ends(counts, most, EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Row blocks of experts 0..e together, for each e; int32 `[PADDED]`, a power of two.

    most: rows that an expert can have; a count that says more counts as that.
    """
    expert = tl.arange(0, PADDED)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    return tl.cumsum(tl.cdiv(tl.minimum(tl.maximum(count, 0), most), ROWS), 0)


@triton.jit
def locate(
    tile, ends, counts, starts, most, rows, BLOCKS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """(expert, column block, first row, rows that live) of a tile.

    Tiles go by (expert, column block, row block): the row blocks that share weights run together.
    """
    passed = ends * BLOCKS <= tile
    expert = tl.sum(passed.to(tl.int32))
    before = tl.max(tl.where(passed, ends, 0))
    count = tl.minimum(tl.load(counts + expert), most)
    own = tl.cdiv(count, ROWS)
    place = tile - before * BLOCKS
    column = place // own
    within = place % own
    if starts is None:
        first = expert * most
    else:
        first = tl.load(starts + expert)
    row = first + within * ROWS
    live = tl.minimum(count, rows - first) - within * ROWS
    return expert, column, row, live
