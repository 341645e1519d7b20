"""Which kernel and which tiles make a product fastest, as far as it was measured."""

from __future__ import annotations

import functools
import math

import torch

from weft.gemm.hopper import BLOCK_ROWS, MAX_EXPERTS, NUMBERS, PAIR, WgmmaPlan
from weft.gemm.plan import FP8, GemmPlan, plan

# One H200, DeepSeek-V3's sizes, 32 experts whose rows vary by chance, 2026-11-21: up and down
# together 333 us for 357 of GemmPlan's at a mean of 8 rows, 358 for 363 at 32, 376 for 406 at 64,
# 649 for 670 at 128; slower at 256, where the tensor cores are the limit and not memory.
MOST_ROWS = 128
MOST_ROWS_OF_ONE = 512  # FP8Expert there: 77 us for 92 at 512 tokens, 117 for 113 at 1024
TILES_OF_ONE = 4  # row blocks to aim at with GemmPlan, where one expert must fill many SMs
FULL = 60  # clusters that nearly fill a GPU of 132 SMs


def fastest_plan(
    experts: int,
    rows_per_expert: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    out: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
) -> GemmPlan | WgmmaPlan:
    """The plan for a mean of about `rows_per_expert` rows; arguments as in `plan`.

    out: dtype of what is stored, if it is not gated.
    device: where it will run. A WgmmaPlan for FP8 on Hopper where memory is the limit, else what
    `plan` says; one expert alone gets so low tiles that they fill the GPU. Equal bits either way.
    """
    fits = dtype == FP8 and n % PAIR == 0 and experts <= MAX_EXPERTS and (gated or out in NUMBERS)
    wgmma = fits and is_hopper(device)
    if wgmma and experts == 1 and rows_per_expert <= MOST_ROWS_OF_ONE:
        return WgmmaPlan(_rows_of_one(rows_per_expert, n // PAIR))
    if not wgmma or rows_per_expert > MOST_ROWS:
        rows = -(-rows_per_expert // TILES_OF_ONE) if experts == 1 else rows_per_expert
        return plan(experts, rows, n, k, dtype, gated=gated)
    # Most experts have fewer rows than three deviations above the mean: they are one tile.
    fullest = rows_per_expert + 3 * math.sqrt(rows_per_expert)
    return WgmmaPlan(next(rows for rows in BLOCK_ROWS if rows >= fullest))


def wgmma_plans() -> tuple[WgmmaPlan, ...]:
    """Those that `fastest_plan` may choose for several experts."""
    most = MOST_ROWS + 3 * math.sqrt(MOST_ROWS)
    last = next(rows for rows in BLOCK_ROWS if rows >= most)
    return tuple(WgmmaPlan(rows) for rows in BLOCK_ROWS if rows <= last)


@functools.cache
def is_hopper(device: torch.device | None) -> bool:
    """Has the device the instructions that WgmmaPlan's kernel is made of?"""
    if device is None or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def _rows_of_one(rows: int, pairs: int) -> int:
    """The highest tiles that still are enough to fill the GPU; the lowest, if none are."""
    return next(
        (block for block in reversed(BLOCK_ROWS) if -(-rows // block) * pairs >= FULL),
        BLOCK_ROWS[0],
    )
