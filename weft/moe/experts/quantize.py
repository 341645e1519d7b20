# SPDX-License-Identifier: Apache-2.0
"""Conversions of expert weights to FP8 with one scale per block of 128 x 128."""

from __future__ import annotations

import torch

from weft.errors import InvalidArgument
from weft.gemm.config import FP8
from weft.gemm.mxfp4 import (
    BIAS,
    BLOCK,
    HIGHEST,
    NAN,
    dequantize_mxfp4,
)
from weft.reference import quantize
from weft.runtime.check import raise_not_tensor
from weft.shape import FP8_BLOCK


def quantize_blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `[experts, rows, columns]` to FP8 with one scale per block of 128 x 128.

    The rule is that of `weft.reference.quantize`.

    Returns:
        float8_e4m3fn of the same shape, and float32 scales `[experts, rows / 128, columns / 128]`.

    Raises:
        InvalidArgument: a size is not a multiple of 128.
    """
    if not isinstance(weights, torch.Tensor):
        raise_not_tensor("weights", weights)
    if weights.dim() != 3 or not weights.is_floating_point():
        raise InvalidArgument(
            f"weights are {list(weights.shape)} {weights.dtype}; they must be [experts, rows, "
            "columns] of floating-point numbers"
        )
    experts, rows, columns = weights.shape
    if rows % FP8_BLOCK or columns % FP8_BLOCK:
        raise InvalidArgument(
            f"weights are {list(weights.shape)}; blocks are {FP8_BLOCK} x {FP8_BLOCK}: pad them"
        )
    grid = row_blocks, column_blocks = rows // FP8_BLOCK, columns // FP8_BLOCK
    q = torch.empty(weights.shape, dtype=FP8, device=weights.device)
    scales = torch.empty((experts, *grid), dtype=torch.float32, device=weights.device)
    for expert, matrix in enumerate(weights):  # one expert at a time limits the fp32 copies
        blocks = matrix.view(row_blocks, FP8_BLOCK, column_blocks, FP8_BLOCK).transpose(1, 2)
        block_q, scale = quantize(blocks.flatten(2), "fp8", columns=FP8_BLOCK * FP8_BLOCK)
        rows_q = block_q.view(*grid, FP8_BLOCK, FP8_BLOCK).transpose(1, 2)
        q[expert] = rows_q.reshape(rows, columns)
        scales[expert] = scale.squeeze(-1)
    return q, scales


def convert_to_fp8(
    values: torch.Tensor, scale: torch.Tensor | None, block: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert a stored matrix to FP8 with one scale per 128 x 128 block.

    If the scales within such a block differ by powers of two (MXFP8, or one scale per matrix), the
    block uses the largest one. Values below 2^-6 of it are rounded to multiples of 2^-9 of it, and
    all others stay exact. Matrices with other scales are rounded as by `quantize_blocks`.
    """
    if values.dtype == FP8 and scale is not None and block == (FP8_BLOCK, FP8_BLOCK):
        return values, scale
    rows, columns = values.shape
    values_fp32 = values.float()
    if scale is not None:
        factors = expand_scales(scale, block, slice(0, rows), columns)
        if values.dtype == FP8:
            blocks = factors.view(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
            max_scale = blocks.amax(dim=(1, 3))
            fp8_block = (FP8_BLOCK, FP8_BLOCK)
            ratios = factors / expand_scales(max_scale, fp8_block, slice(0, rows), columns)
            if bool(torch.frexp(ratios).mantissa.eq(0.5).all()):
                return values_fp32.mul_(ratios).to(FP8), max_scale
        values_fp32.mul_(factors)
    q, q_scale = quantize_blocks(values_fp32.unsqueeze(0))
    return q[0], q_scale[0]


def convert_mxfp4_to_fp8(
    values: torch.Tensor, scale: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert MXFP4 `[rows, columns / 2]` to FP8, with power-of-two scales per 128 x 128 block.

    The scale maps a block's highest power to 2^6: every E2M1 value times 2^6 is an E4M3 value.
    """
    if bool(scale.eq(NAN).any()):
        raise InvalidArgument(f"{name} has a scale of {NAN}, which is NaN; weights must be finite")
    elements = dequantize_mxfp4(values, torch.full_like(scale, BIAS))
    rows, columns = elements.shape
    nonzero = elements.view(rows, columns // BLOCK, BLOCK).ne(0).any(dim=-1)
    power = torch.where(nonzero, scale.int() - BIAS, -BIAS)
    row_blocks, column_blocks = rows // FP8_BLOCK, columns // FP8_BLOCK
    blocks = power.view(row_blocks, FP8_BLOCK, column_blocks, FP8_BLOCK // BLOCK)
    max_power = blocks.amax(dim=(1, 3)).clamp(min=HIGHEST - 126)  # keeps the scale normal
    shift = (blocks - max_power.view(row_blocks, 1, column_blocks, 1)).view(rows, -1, 1) + HIGHEST
    values_fp32 = torch.ldexp(elements.view(rows, columns // BLOCK, BLOCK), shift).view(
        rows, columns
    )
    ones = torch.ones_like(max_power, dtype=torch.float32)
    return values_fp32.to(FP8), torch.ldexp(ones, max_power - HIGHEST)


def expand_scales(
    scale: torch.Tensor, block: tuple[int, int], rows: slice, columns: int
) -> torch.Tensor:
    """Return the scale of each element for some rows of a matrix."""
    row = torch.arange(rows.start, rows.stop, device=scale.device) // block[0]
    return scale[row][:, torch.arange(columns, device=scale.device) // block[1]]
