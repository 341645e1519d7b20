"""Which kernel and which tiles make a product fastest, as far as it was measured."""

from __future__ import annotations

import functools
import math

import torch

from weft.arguments import flags, instance, integer, one_of
from weft.gemm.hopper import (
    BLOCK_ROWS,
    FP8_ROWS,
    MAX_EXPERTS,
    NUMBERS,
    PAIR,
    WgmmaPlan,
)
from weft.gemm.plan import DTYPES, FP8, MAX_SIZE, GemmPlan, tile_plan

# One H200, 2026-11-21: of one expert, tiles of 128 rows beat 160, and 64 or 128 beat 96, at any
# number of rows; those of 256 take 1 % less from 4096 rows on.
HEIGHTS_OF_ONE = (128, 64, 32)
# Of 32 experts in FP8, rows by chance: the means up to which tiles of so many rows are fastest. Up
# to 96 rows that is those that nearly every expert fits into; experts with more are cut.
FP8_MEANS = {128: 120, 160: 136}
MANY_ROWS = 768  # of each expert: from here on a plan changes at multiples of 64 rows alone
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
    biased: bool = False,
    out: torch.dtype = torch.bfloat16,
    tells: bool = False,
    device: torch.device | None = None,
) -> GemmPlan | WgmmaPlan:
    """The plan for a mean of about `rows_per_expert` rows; arguments as in `plan`.

    biased: a bias is added.   out: dtype of what is stored, if it is not FP8.   tells: as in Push;
        a WgmmaPlan then where there is one at all.
    device: where it will run. A WgmmaPlan on Hopper wherever there is one, but for one expert alone
    in FP8 only; else what `plan` says. One expert gets so low tiles that they fill the GPU. Equal
    bits either way. Raises InvalidArgument.
    """
    one_of("dtype", dtype, DTYPES)
    flags(gated=gated, biased=biased, tells=tells)
    instance("out", out, torch.dtype)
    if device is not None:
        instance("device", device, torch.device)
    return best_plan(
        integer("experts", experts, 0, MAX_SIZE),
        integer("rows_per_expert", rows_per_expert, 0, MAX_SIZE),
        integer("n", n, 1, MAX_SIZE),
        integer("k", k, 1, MAX_SIZE),
        dtype,
        gated=gated,
        biased=biased,
        out=out,
        tells=tells,
        device=device,
    )


def best_plan(
    experts: int,
    rows_per_expert: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    biased: bool = False,
    out: torch.dtype = torch.bfloat16,
    tells: bool = False,
    device: torch.device | None = None,
) -> GemmPlan | WgmmaPlan:
    """`fastest_plan` of sizes that were checked: it stands in every call."""
    serves = _wgmma_serves(experts, n, dtype, gated, biased, out)
    measured = dtype == FP8 or experts > 1  # of one expert in two bytes a number, nothing was
    if not is_hopper(device) or not serves or not (measured or tells):
        rows = -(-rows_per_expert // TILES_OF_ONE) if experts == 1 else rows_per_expert
        return tile_plan(experts, rows, n, k, dtype, gated=gated)
    if experts == 1:
        return WgmmaPlan(_rows_of_one(rows_per_expert, n // PAIR))
    # Most experts have fewer rows than three deviations above the mean: they are one tile.
    fullest = rows_per_expert + 3 * math.sqrt(rows_per_expert)
    if dtype != FP8:
        return WgmmaPlan(next((high for high in BLOCK_ROWS if high >= fullest), BLOCK_ROWS[-1]))
    for high in FP8_ROWS:
        mean = FP8_MEANS.get(high)
        if fullest <= high if mean is None else rows_per_expert <= mean:
            return WgmmaPlan(high)
    return WgmmaPlan(FP8_ROWS[-1])


def _wgmma_serves(
    experts: int, n: int, dtype: torch.dtype, gated: bool, biased: bool, out: torch.dtype
) -> bool:
    """Is there a WgmmaPlan for it?"""
    if experts > MAX_EXPERTS:
        return False
    if dtype == FP8:
        return n % PAIR == 0 and not biased and (gated or out in NUMBERS)
    return dtype in NUMBERS and out in NUMBERS


@functools.cache
def is_hopper(device: torch.device | None) -> bool:
    """Has the device the instructions that WgmmaPlan's kernel is made of?"""
    if device is None or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def _rows_of_one(rows: int, pairs: int) -> int:
    """The highest tiles that still are enough to fill the GPU; the lowest, if none are."""
    return next(
        (block for block in HEIGHTS_OF_ONE if -(-rows // block) * pairs >= FULL),
        HEIGHTS_OF_ONE[-1],
    )
