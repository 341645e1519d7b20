# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights: quantisation, and packing into the units that `grouped_gemm` reads.

A value is E2M1: a sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6. A byte holds two values, the lower nibble
first. Each 32 columns of a row share a power-of-two scale (UE8M0). gemm/expand.cuh documents the
layout of a unit: the values that a lane multiplies are adjacent, so the kernel does not permute
them.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from weft.errors import InvalidArgument
from weft.gemm.config import BLOCK_N, DTYPES_16BIT, MXFP4
from weft.runtime.check import check_tensor, raise_not_tensor

BLOCK = 32  # columns per scale
VALUE_DTYPES = (torch.uint8, torch.int8)
SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
UNIT_N, UNIT_K = 64, 128
VALUE_BYTES = UNIT_N * UNIT_K // 2
UNIT_BYTES = VALUE_BYTES + UNIT_N * UNIT_K // BLOCK
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_EXPONENT = 2  # exponent of the largest values
NAN, BIAS = 255, 127  # of UE8M0
# Every E2M1 value times 2^-8 to 2^6 is an E4M3 value. A unit stores an exponent as the byte offset
# of its table of values; a table has eight bytes.
LOWEST, HIGHEST = -8, 6
_TABLE_BYTES = 8
MIN_EXPONENT = -126  # of normal float32 numbers
# Each of four warps has 16 rows of a unit. A lane has two rows, eight apart, and eight of each
# 32 columns: four of the first 16 and the same four of the second 16.
_WARPS, _HALVES, _ROWS, _LANES, _COLUMNS = 4, 2, 8, 4, 4


def weight_sizes(b: torch.Tensor) -> tuple[int, int, int]:
    """Return the number of experts, n and k of the weights of a grouped GEMM."""
    experts, n, k = b.shape[:3]
    return (experts, n * UNIT_N, k * UNIT_K) if b.dtype == MXFP4 else (experts, n, k)


def quantize_mxfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights to MXFP4 values and scales.

    As in the OCP specification, the scale of a block is the largest power of two that is at most
    its maximum |x|, divided by 4. Values are rounded to nearest even and saturate at 6. A block
    with an Inf or a NaN has the scale 255 (NaN).

    Args:
        weights: float32, bfloat16 or float16 `[experts, n, k]`; k must be a multiple of 32.

    Returns:
        Values uint8 `[experts, n, k / 2]` and scales uint8 `[experts, n, k / 32]`.

    Raises:
        InvalidArgument: weights have the wrong shape or dtype.
    """
    dtypes = (torch.float32, *DTYPES_16BIT)
    check_tensor_like("weights", weights, weights, ("experts", "n", "k"), dtypes)
    experts, n, k = weights.shape
    _check_columns(k)
    packed = torch.empty((experts, n, k // 2), dtype=torch.uint8, device=weights.device)
    scales = torch.empty((experts, n, k // BLOCK), dtype=torch.uint8, device=weights.device)
    for expert, matrix in enumerate(weights):  # one expert at a time, because fp32 copies are large
        blocks = matrix.float().view(n, k // BLOCK, BLOCK)
        amax = blocks.abs().amax(dim=-1)
        is_invalid = ~amax.isfinite()
        _, exponent = torch.frexp(amax)  # amax = m * 2^exponent, m in [0.5, 1)
        power = (exponent - 1 - E2M1_EXPONENT).clamp(-BIAS, BIAS)
        power = torch.where((amax == 0) | is_invalid, 0, power)
        # float64 represents every power of two that occurs as a factor.
        x = torch.ldexp(blocks.double().nan_to_num(0.0, 0.0, 0.0), -power.unsqueeze(-1)).abs()
        code = (x > 0.25).byte()
        # Midpoints between neighbouring values, at which x is rounded up to an even code.
        midpoints = ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True))
        for midpoint, rounds_up in midpoints:
            code += (x >= midpoint) if rounds_up else (x > midpoint)
        code += x > 5
        code |= blocks.signbit().byte() << 3
        pairs = code.view(n, k // 2, 2)
        packed[expert] = pairs[..., 0] | pairs[..., 1] << 4
        scales[expert] = torch.where(is_invalid, NAN, power + BIAS).byte()
    return packed, scales


def dequantize_mxfp4(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Convert uint8 values `[..., k / 2]` and scales `[..., k / 32]` to float32 `[..., k]`."""
    codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
    elements = torch.tensor(E2M1 + tuple(-x for x in E2M1), device=values.device)[codes.int()]
    powers = scales.int() - BIAS
    blocks = torch.ldexp(elements.unflatten(-1, (-1, BLOCK)), powers.unsqueeze(-1))  # type: ignore[no-untyped-call]
    return torch.where(scales.eq(NAN).unsqueeze(-1), torch.nan, blocks).flatten(-2)


def pack_mxfp4(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack MXFP4 values and scales for `grouped_gemm` without loss. Synchronizes.

    Args:
        values: uint8 or int8 `[experts, n, k / 2]`; n must be a multiple of 128, k of 32.
        scales: uint8 or float8_e8m0fnu `[experts, n, k / 32]`.

    Returns:
        uint8 `[experts, n / 64, ceil(k / 128), 4352]`: units of 64 x 128 values, with zeros after
            k. float32 `[experts, n]`: a power of two for each row.

    Raises:
        InvalidArgument: a scale is NaN, or the scales of a row's non-zero blocks differ by more
            than 2^14. The text names the expert and the row.
    """
    check_tensor_like("values", values, values, ("experts", "n", "k / 2"), VALUE_DTYPES)
    device = values.device
    experts, n, k = values.shape[0], values.shape[1], values.shape[2] * 2
    _check_columns(k)
    if n % BLOCK_N or not n:
        raise InvalidArgument(f"n is {n}; it must be a positive multiple of {BLOCK_N}")
    check_tensor_like("scales", scales, values, (experts, n, k // BLOCK), SCALE_DTYPES)
    values, scales = values.view(torch.uint8), scales.view(torch.uint8)
    units, k_blocks = n // UNIT_N, -(-k // UNIT_K)
    b = torch.empty((experts, units, k_blocks, UNIT_BYTES), dtype=torch.uint8, device=device)
    b_scale = torch.empty((experts, n), dtype=torch.float32, device=device)
    for e in range(experts):
        pack_matrix(values[e], scales[e], b[e], b_scale[e], name=f"expert {e}")
    return b, b_scale


def pack_matrix(
    values: torch.Tensor, scales: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, *, name: str
) -> None:
    """Pack the weights of one expert.

    Args:
        values: `[n, k / 2]`.
        scales: `[n, k / 32]`.
        b: Units to write.
        b_scale: Row scales to write.
        name: Name of the matrix in errors.
    """
    exponents, row_power = _split_scales(name, values, scales)
    padding = b.shape[1] * UNIT_K - values.shape[1] * 2
    values = functional.pad(values, (0, padding // 2))
    exponents = functional.pad(exponents, (0, padding // BLOCK))
    b[..., :VALUE_BYTES] = _pack_values(values).flatten(2)
    b[..., VALUE_BYTES:] = _pack_exponents(exponents).flatten(2)
    b_scale.copy_(torch.ldexp(torch.ones_like(row_power, dtype=torch.float32), row_power))


def unpack_mxfp4(b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """Convert packed weights to float32 `[experts, n, k]`.

    Args:
        b: Units from `pack_mxfp4`.
        b_scale: Row scales from `pack_mxfp4`.

    Raises:
        InvalidArgument: a tensor has the wrong shape or dtype.
    """
    check_tensor_like("b", b, b, ("experts", "n / 64", "k / 128", UNIT_BYTES), (MXFP4,))
    experts, n, k = weight_sizes(b)
    check_tensor_like("b_scale", b_scale, b, (experts, n), (torch.float32,))
    units, k_blocks = n // UNIT_N, k // UNIT_K
    words_per_lane = VALUE_BYTES // (_WARPS * _HALVES * _ROWS * _LANES * 4)
    words = b[..., :VALUE_BYTES].reshape(
        experts, units, k_blocks, _WARPS, _HALVES, _ROWS, _LANES, words_per_lane, 2, 2
    )
    # A word has two bytes for each 16 columns. The nibbles of a byte are adjacent columns.
    magnitudes = torch.stack((words & 7, words >> 4 & 7), dim=-1).flatten(-2)
    signs = torch.stack((words >> 7, words >> 3 & 1), dim=-1).flatten(-3, -2).transpose(-2, -1)
    elements = torch.tensor(E2M1, device=b.device)[magnitudes.int()]
    elements = torch.where(signs.bool(), -elements, elements)
    # experts, units, k_blocks, warps, halves, rows, lanes, blocks, sixteens, columns
    order = (0, 1, 3, 4, 5, 2, 7, 8, 6, 9)
    elements = elements.permute(order).reshape(experts, n, k // BLOCK, BLOCK)
    powers = b[..., VALUE_BYTES:].reshape(
        experts, units, k_blocks, _WARPS, _ROWS, _HALVES, UNIT_K // BLOCK
    )
    powers = powers.permute(0, 1, 3, 5, 4, 2, 6).reshape(experts, n, k // BLOCK, 1)
    elements = torch.ldexp(elements, powers.int() // _TABLE_BYTES + LOWEST)
    return (elements * b_scale.view(experts, n, 1, 1)).flatten(2)


def check_tensor_like(
    name: str,
    tensor: torch.Tensor,
    like: torch.Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    *,
    strided: bool = False,
    aligned: int = 1,
) -> None:
    """Run `check_tensor` with the device of `like`. Requires a CPU or CUDA tensor."""
    for value in (tensor, like):
        if not isinstance(value, torch.Tensor):
            raise_not_tensor(name, value)
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{name} is on {tensor.device}; it must be on cpu or cuda")
    device = like.device
    check_tensor(
        name, tensor, shape=shape, dtypes=dtypes, device=device, strided=strided, aligned=aligned
    )


def _check_columns(k: int) -> None:
    if k % BLOCK or not k:
        raise InvalidArgument(f"k is {k}; it must be a positive multiple of {BLOCK}")


def _split_scales(
    name: str, values: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split scales into exponents to store `[n, k / 32]` and a power of two per row, int32 `[n]`.

    The largest scale of a row gets the highest exponent, which minimizes subnormal values.
    """
    n, blocks = scales.shape
    power = scales.int() - BIAS
    nonzero = (values.view(n, blocks, -1) & 0x77).ne(0).any(dim=-1)
    high = torch.where(nonzero, power, -BIAS).amax(dim=1)
    low = torch.where(nonzero, power, BIAS).amin(dim=1)
    row_power = (high - HIGHEST).clamp(min=MIN_EXPONENT)
    is_invalid = (low < row_power + LOWEST) & nonzero.any(dim=1) | scales.eq(NAN).any(dim=1)
    if bool(is_invalid.any()):
        row = int(is_invalid.nonzero()[0])
        if bool(scales[row].eq(NAN).any()):
            raise InvalidArgument(
                f"{name}, row {row} has a scale of {NAN}, which is NaN; weights must be finite"
            )
        raise InvalidArgument(
            f"{name}, row {row} has blocks with scales of 2^{int(low[row])} and "
            f"2^{int(high[row])}; "
            f"the scales of a row's non-zero blocks must not differ by more than "
            f"2^{HIGHEST - LOWEST}: requantise the smaller blocks, or use FP8 weights"
        )
    exponents = torch.where(nonzero, power - row_power.unsqueeze(1) - LOWEST, HIGHEST - LOWEST)
    return exponents.byte() * _TABLE_BYTES, row_power


def _pack_values(values: torch.Tensor) -> torch.Tensor:
    """Rearrange values `[n, k / 2]` into the words of units."""
    n, k = values.shape[0], values.shape[1] * 2
    codes = torch.stack((values & 15, values >> 4), dim=-1)
    sizes = (n // UNIT_N, _WARPS, _HALVES, _ROWS, k // UNIT_K, UNIT_K // BLOCK, 2, _LANES, _COLUMNS)
    # units, k_blocks, warps, halves, rows, lanes, blocks, sixteens, columns
    codes = codes.view(sizes).permute(0, 4, 1, 2, 3, 7, 5, 6, 8)
    magnitudes, signs = codes & 7, codes >> 3
    words = (magnitudes[..., ::2] | magnitudes[..., 1::2] << 4).flatten(-2)
    return words | signs[..., 0, :] << 7 | signs[..., 1, :] << 3


def _pack_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Rearrange exponents `[n, k / 32]` into those of units."""
    n, blocks = exponents.shape
    unit_blocks = UNIT_K // BLOCK
    sizes = (n // UNIT_N, _WARPS, _HALVES, _ROWS, blocks // unit_blocks, unit_blocks)
    return exponents.reshape(sizes).permute(0, 4, 1, 3, 2, 5).contiguous()
