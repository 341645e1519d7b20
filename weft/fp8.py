# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 in plain torch, bitwise equal to the kernels."""

from __future__ import annotations

import torch


def quantize(
    x: torch.Tensor, kind: str, columns: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x `[..., hidden]` to FP8 with one scale per block of columns.

    A block of zeros (fp8: amax below 2^-117) is stored as zeros. A block with an Inf or a NaN
    gets a NaN scale and NaN values.

    Args:
        kind: "fp8" or "mxfp8".
        columns: Columns per block. Default: 128 for "fp8", 32 for "mxfp8".

    Returns:
        float8_e4m3fn `[..., hidden]` and scales `[..., hidden / columns]`. "fp8": float32, amax /
            448. "mxfp8": float8_e8m0fnu, the smallest power of two p with amax / p at most 448.
    """
    columns = columns or (32 if kind == "mxfp8" else 128)
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // columns, columns)
    amax, not_finite = block_amax(blocks)
    if kind == "mxfp8":
        power = torch.where(amax == 0, -127, power_above(amax)).clamp(min=-127)
        byte = torch.where(not_finite, 255, power + 127).to(torch.uint8)
        scales = byte.view(torch.float8_e8m0fnu)
        inverse = power_of_two(-power)
    else:
        small = amax < 2.0**-117
        # The divisor is a tensor: torch multiplies by the reciprocal of a Python number.
        scales = torch.where(small, 0.0, amax / torch.full_like(amax, 448.0))
        scales = torch.where(not_finite, torch.nan, scales)
        inverse = torch.where(small, 0.0, torch.full_like(amax, 448.0) / amax)
    q = torch.where(not_finite[..., None], torch.nan, blocks * inverse[..., None])
    return q.to(torch.float8_e4m3fn).flatten(-2), scales


def block_amax(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the amax of blocks `[..., columns]`, and a mask of blocks with an Inf or a NaN.

    The amax of a masked block is 1.
    """
    amax = torch.where(blocks.isnan(), torch.inf, blocks.abs()).amax(dim=-1)
    not_finite = amax.isinf()
    return torch.where(not_finite, 1.0, amax), not_finite


def power_above(amax: torch.Tensor) -> torch.Tensor:
    """Return the exponent of the smallest power of two p with amax / p at most 448.

    The amax must not be 0.
    """
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    return exponent - 9 + (mantissa > 0.875).int()


def power_of_two(power: torch.Tensor) -> torch.Tensor:
    """Return 2^power as float32, including subnormal results."""
    return torch.ldexp(torch.ones_like(power, dtype=torch.float32), power.double()).float()


def dequantize(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `q * scale` in float32."""
    columns = q.shape[-1] // scales.shape[-1]
    return q.float() * scales.float().repeat_interleave(columns, dim=-1)
