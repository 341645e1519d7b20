# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights: their rounding, and the units that `grouped_gemm` takes them in.

A number is E2M1 (0, 0.5, 1, 1.5, 2, 3, 4 or 6, and a sign), two to a byte, the lower nibble first;
each 32 columns of a row share a power of two (UE8M0). The layout of a unit is said in
gemm/expand.cuh: what a lane of a warp multiplies is in one place, so nothing is permuted later.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from weft.errors import InvalidArgument
from weft.gemm.config import BLOCK_N, DTYPES_16BIT, MXFP4
from weft.runtime.check import check_tensor, refuse_tensor

BLOCK = 32  # columns that share a power of two
PACKED = (torch.uint8, torch.int8)
SCALES = (torch.uint8, torch.float8_e8m0fnu)
UNIT_N, UNIT_K = 64, 128
VALUE_BYTES = UNIT_N * UNIT_K // 2
UNIT_BYTES = VALUE_BYTES + UNIT_N * UNIT_K // BLOCK
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_EXPONENT = 2  # of its largest numbers
NAN, BIAS = 255, 127  # of UE8M0
# 2^-8 to 2^6 times any number of E2M1 is a number of E4M3. Stored is how far the table of these
# numbers is from that of 2^-8, eight bytes each.
LOWEST, HIGHEST = -8, 6
_TABLE_BYTES = 8
MIN_EXPONENT, MAX_EXPONENT = -126, 127  # of normal float32 numbers
# In a unit: warps of 16 rows, of which a lane has two, eight apart; of each 32 columns it has four,
# and four more sixteen further on.
_WARPS, _HALVES, _ROWS, _LANES, _EACH = 4, 2, 8, 4, 4


def weight_sizes(b: torch.Tensor) -> tuple[int, int, int]:
    """Experts, n and k of the weights of a grouped GEMM of any dtype."""
    experts, n, k = b.shape[:3]
    return (experts, n * UNIT_N, k * UNIT_K) if b.dtype == MXFP4 else (experts, n, k)


def quantize_mxfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `[experts, n, k]` to MXFP4 values and scales.

    By the OCP rule, the power of two of a block is that of its largest |x| divided by 4. x is
    rounded to nearest even and saturates at 6. A block with an Inf or a NaN has the scale 255, a
    NaN.

    Args:
        weights: float32, bfloat16 or float16; k a multiple of 32.

    Returns:
        Values uint8 `[experts, n, k / 2]` and scales uint8 `[experts, n, k / 32]`.

    Raises:
        InvalidArgument: weights have another shape or dtype.
    """
    wide = (torch.float32, *DTYPES_16BIT)
    check_like("weights", weights, weights, ("experts", "n", "k"), wide)
    experts, n, k = weights.shape
    _check_columns(k)
    packed = torch.empty((experts, n, k // 2), dtype=torch.uint8, device=weights.device)
    scales = torch.empty((experts, n, k // BLOCK), dtype=torch.uint8, device=weights.device)
    for expert, matrix in enumerate(weights):  # one at a time: fp32 copies are large
        blocks = matrix.float().view(n, k // BLOCK, BLOCK)
        largest = blocks.abs().amax(dim=-1)
        broken = ~largest.isfinite()
        _, exponent = torch.frexp(largest)  # largest = m * 2^exponent, m in [0.5, 1)
        power = (exponent - 1 - E2M1_EXPONENT).clamp(-BIAS, BIAS)
        power = torch.where((largest == 0) | broken, 0, power)
        # In float64, where 2^127 is a factor, too.
        x = torch.ldexp(blocks.double().nan_to_num(0.0, 0.0, 0.0), -power.unsqueeze(-1)).abs()
        code = (x > 0.25).byte()
        for low, even in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True)):
            code += (x >= low) if even else (x > low)
        code += x > 5
        code |= blocks.signbit().byte() << 3
        pairs = code.view(n, k // 2, 2)
        packed[expert] = pairs[..., 0] | pairs[..., 1] << 4
        scales[expert] = torch.where(broken, NAN, power + BIAS).byte()
    return packed, scales


def dequantize_mxfp4(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 `[..., k]` of values `[..., k / 2]` and scales `[..., k / 32]`, both uint8."""
    codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
    numbers = torch.tensor(E2M1 + tuple(-x for x in E2M1), device=values.device)[codes.int()]
    powers = scales.int() - BIAS
    blocks = torch.ldexp(numbers.unflatten(-1, (-1, BLOCK)), powers.unsqueeze(-1))  # type: ignore[no-untyped-call]
    return torch.where(scales.eq(NAN).unsqueeze(-1), torch.nan, blocks).flatten(-2)


def pack_mxfp4(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack MXFP4 values and scales as `grouped_gemm` takes them.

    Nothing is rounded. Waits for the device.

    Args:
        values: uint8 or int8 `[experts, n, k / 2]`.
        scales: uint8 or float8_e8m0fnu `[experts, n, k / 32]`. n a multiple of 128, k of 32.

    Returns:
        uint8 `[experts, n / 64, ceil(k / 128), 4352]` and float32 `[experts, n]`: units of 64 x 128
            numbers with zeros after k, and a power of two for each row.

    Raises:
        InvalidArgument: a scale is NaN, or the scales of a row's non-zero blocks are more than 2^14
            apart. The text names the expert and the row.
    """
    check_like("values", values, values, ("experts", "n", "k / 2"), PACKED)
    device = values.device
    experts, n, k = values.shape[0], values.shape[1], values.shape[2] * 2
    _check_columns(k)
    if n % BLOCK_N or not n:
        raise InvalidArgument(f"n is {n}; it must be a positive multiple of {BLOCK_N}")
    check_like("scales", scales, values, (experts, n, k // BLOCK), SCALES)
    values, scales = values.view(torch.uint8), scales.view(torch.uint8)
    units, k_blocks = n // UNIT_N, -(-k // UNIT_K)
    b = torch.empty((experts, units, k_blocks, UNIT_BYTES), dtype=torch.uint8, device=device)
    b_scale = torch.empty((experts, n), dtype=torch.float32, device=device)
    for expert in range(experts):
        pack_matrix(
            *(values[expert], scales[expert], b[expert], b_scale[expert]), at=f"expert {expert}"
        )
    return b, b_scale


def pack_matrix(
    values: torch.Tensor, scales: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, *, at: str
) -> None:
    """Write one matrix, `[n, k / 2]` and `[n, k / 32]`, as `pack_mxfp4` does, into b and b_scale.

    at: what an error calls the matrix.
    """
    exponents, power = _relative(at, values, scales)
    missing = b.shape[1] * UNIT_K - values.shape[1] * 2
    values = functional.pad(values, (0, missing // 2))
    exponents = functional.pad(exponents, (0, missing // BLOCK))  # of zeros
    b[..., :VALUE_BYTES] = _values_of_units(values).flatten(2)
    b[..., VALUE_BYTES:] = _exponents_of_units(exponents).flatten(2)
    b_scale.copy_(torch.ldexp(torch.ones_like(power, dtype=torch.float32), power))


def unpack_mxfp4(b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """Return the numbers of packed weights as float32 `[experts, n, k]`.

    Args:
        b: Units, as `pack_mxfp4` returns them.
        b_scale: Row scales, as `pack_mxfp4` returns them.

    Raises:
        InvalidArgument: a tensor has another shape or dtype.
    """
    check_like("b", b, b, ("experts", "n / 64", "k / 128", UNIT_BYTES), (MXFP4,))
    experts, n, k = weight_sizes(b)
    check_like("b_scale", b_scale, b, (experts, n), (torch.float32,))
    units, k_blocks = n // UNIT_N, k // UNIT_K
    words_a_lane = VALUE_BYTES // (_WARPS * _HALVES * _ROWS * _LANES * 4)
    words = b[..., :VALUE_BYTES].reshape(
        experts, units, k_blocks, _WARPS, _HALVES, _ROWS, _LANES, words_a_lane, 2, 2
    )
    # A word's bytes, in pairs: [..., 2 second or first, 2]; a byte's nibbles are two neighbours.
    magnitudes = torch.stack((words & 7, words >> 4 & 7), dim=-1).flatten(-2)
    signs = torch.stack((words >> 7, words >> 3 & 1), dim=-1).flatten(-3, -2).transpose(-2, -1)
    numbers = torch.tensor(E2M1, device=b.device)[magnitudes.int()]
    numbers = torch.where(signs.bool(), -numbers, numbers)
    # experts, units, k_blocks, warps, halves, rows, lanes, blocks, sixteens, each
    order = (0, 1, 3, 4, 5, 2, 7, 8, 6, 9)
    numbers = numbers.permute(order).reshape(experts, n, k // BLOCK, BLOCK)
    powers = b[..., VALUE_BYTES:].reshape(
        experts, units, k_blocks, _WARPS, _ROWS, _HALVES, UNIT_K // BLOCK
    )
    powers = powers.permute(0, 1, 3, 5, 4, 2, 6).reshape(experts, n, k // BLOCK, 1)
    numbers = torch.ldexp(numbers, powers.int() // _TABLE_BYTES + LOWEST)
    return (numbers * b_scale.view(experts, n, 1, 1)).flatten(2)


def check_like(
    name: str,
    tensor: torch.Tensor,
    like: torch.Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    *,
    strided: bool = False,
    aligned: int = 1,
) -> None:
    """`check_tensor`, on the device of `like`, which is a CPU or a GPU."""
    for given in (tensor, like):
        if not isinstance(given, torch.Tensor):
            refuse_tensor(name, given)
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{name} is on {tensor.device}; it must be on cpu or cuda")
    device = like.device
    check_tensor(
        name, tensor, shape=shape, dtypes=dtypes, device=device, strided=strided, aligned=aligned
    )


def _check_columns(k: int) -> None:
    if k % BLOCK or not k:
        raise InvalidArgument(f"k is {k}; it must be a positive multiple of {BLOCK}")


def _relative(
    at: str, values: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored exponents of a matrix's blocks `[n, k / 32]`, and its rows' powers, int32 `[n]`.

    The highest block of a row has the highest exponent, so the fewest numbers are subnormal.
    """
    n, blocks = scales.shape
    power = scales.int() - BIAS
    some = (values.view(n, blocks, -1) & 0x77).ne(0).any(dim=-1)
    high = torch.where(some, power, -BIAS).amax(dim=1)
    low = torch.where(some, power, BIAS).amin(dim=1)
    row = (high - HIGHEST).clamp(min=MIN_EXPONENT)
    bad = (low < row + LOWEST) & some.any(dim=1) | scales.eq(NAN).any(dim=1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        at = f"{at}, row {first}"
        if bool(scales[first].eq(NAN).any()):
            raise InvalidArgument(f"{at} has a scale of {NAN}, which is NaN; weights are finite")
        raise InvalidArgument(
            f"{at} has blocks with scales of 2^{int(low[first])} and of 2^{int(high[first])}; in a "
            f"row they are at most {HIGHEST - LOWEST} powers apart, blocks of zeros aside: round "
            "the smaller blocks anew, or use FP8 weights"
        )
    exponents = torch.where(some, power - row.unsqueeze(1) - LOWEST, HIGHEST - LOWEST)
    return exponents.byte() * _TABLE_BYTES, row


def _values_of_units(values: torch.Tensor) -> torch.Tensor:
    """The words of units, in their order, of `[n, k / 2]`."""
    n, k = values.shape[0], values.shape[1] * 2
    codes = torch.stack((values & 15, values >> 4), dim=-1)
    sizes = (n // UNIT_N, _WARPS, _HALVES, _ROWS, k // UNIT_K, UNIT_K // BLOCK, 2, _LANES, _EACH)
    # units, k_blocks, warps, halves, rows, lanes, blocks, sixteens, each
    codes = codes.view(sizes).permute(0, 4, 1, 2, 3, 7, 5, 6, 8)
    magnitudes, signs = codes & 7, codes >> 3
    words = (magnitudes[..., ::2] | magnitudes[..., 1::2] << 4).flatten(-2)
    return words | signs[..., 0, :] << 7 | signs[..., 1, :] << 3


def _exponents_of_units(exponents: torch.Tensor) -> torch.Tensor:
    """The exponents of units, in their order, of `[n, k / 32]`."""
    n, blocks = exponents.shape
    each = UNIT_K // BLOCK
    sizes = (n // UNIT_N, _WARPS, _HALVES, _ROWS, blocks // each, each)
    return exponents.reshape(sizes).permute(0, 4, 1, 3, 2, 5).contiguous()
