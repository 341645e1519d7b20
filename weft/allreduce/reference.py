# SPDX-License-Identifier: Apache-2.0
"""Bitwise specification of the fused all-reduce in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.allreduce.call import FP8Group, FP8Static, FP8Token, MoEFinalize, Quant, Reduced
from weft.fp8 import block_amax, power_above, power_of_two, quantize
from weft.runtime.ambient import disable_autocast

CANONICAL_NANS = {
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float32: (torch.int32, 0x7FFFFFFF),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
}
MIN_ROW_SCALE = 2.0**-9 / 448  # allreduce/rmsnorm.cuh


@disable_autocast
def allreduce_fused(
    xs: Sequence[torch.Tensor],
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    quant: Quant | None = None,
) -> Reduced:
    """Compute all outputs of a fused all-reduce.

    Args:
        xs: Rows `[tokens, hidden]` of each rank.
        residual: `[tokens, hidden]`, added to the rounded sum.
        weight: `[hidden]`, of the rows' dtype or float32; weight of the RMSNorm.
        eps: Epsilon of the RMSNorm.
        weight_bias: Added to `weight`.
        quant: Quantisation of the normed rows; needs a weight.
    """
    dtype = xs[0].dtype
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    out = round_to(total, dtype)
    rows = out if residual is None else round_to(out.float() + residual.float(), dtype)
    residual_out = None if residual is None else rows
    if weight is None:
        return Reduced(out=out, residual=residual_out)
    product = rows.float() * (full_like(weight, weight_bias) + weight.float())
    norm = round_to(product * inverse_rms(rows, eps), dtype)
    if quant is None:
        return Reduced(out=out, residual=residual_out, norm=norm)
    q, scale = quantize_norm(norm, quant)
    return Reduced(out=out, residual=residual_out, norm=norm, quant=q, scale=scale)


def finalize_moe(prologue: MoEFinalize) -> torch.Tensor:
    """Compute the rows `[tokens, hidden]` of a prologue, which the all-reduce sums."""
    rows, index = prologue.rows, prologue.index.long()
    valid = (index >= 0) & (index < rows.shape[0])
    size = (index.shape[0], rows.shape[1])
    total = torch.zeros(size, dtype=torch.float32, device=rows.device)
    for k in range(index.shape[1]):
        row = rows[torch.where(valid[:, k], index[:, k], 0)].float()
        if prologue.scales is not None:
            row = row * prologue.scales[:, k : k + 1].float()
        total = torch.where(valid[:, k : k + 1], total + row, total)
    total = total * full_like(total, prologue.routed_scaling_factor)
    if prologue.shared is not None:
        total = total + prologue.shared.float()
    return round_to(total, rows.dtype)


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round x to nearest even and replace every NaN by the canonical NaN of GPUs."""
    integer, bits = CANONICAL_NANS[dtype]
    rounded = x.to(dtype)
    nan = torch.full((), bits, dtype=integer, device=x.device)  # torch.tensor cannot be captured
    return torch.where(x.isnan(), nan, rounded.view(integer)).view(dtype)


def full_like(x: torch.Tensor, value: float) -> torch.Tensor:
    """Create a float32 tensor filled with `value`.

    Dividing by such a tensor is exact; torch replaces a division by a number with a product.
    """
    return torch.full(x.shape, value, dtype=torch.float32, device=x.device)


def inverse_rms(rows: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute 1 / sqrt(mean of squares + eps) as `[tokens, 1]`.

    The sums have the order that allreduce/rmsnorm.cuh specifies.
    """
    tokens, hidden = rows.shape
    width = 16 // rows.element_size()
    x = rows.float().view(tokens, hidden // width, width)
    sums = torch.zeros(x.shape[:2], dtype=torch.float32, device=rows.device)
    for i in range(width):
        sums = sums + x[:, :, i] * x[:, :, i]
    partials = _sum_lanes(_pad_to_lanes(sums))
    lanes = _pad_to_lanes(partials)
    total = torch.zeros((tokens, 32), dtype=torch.float32, device=rows.device)
    for i in range(lanes.shape[1]):
        total = total + lanes[:, i]
    squares = _sum_lanes(total[:, None])
    mean = squares / full_like(squares, hidden)
    # torch's float32 sqrt on CPUs (2.13) can be off by one ulp; a rounded float64 root is exact.
    root = (mean + full_like(mean, eps)).double().sqrt().float()
    return full_like(root, 1.0) / root


def quantize_norm(norm: torch.Tensor, quant: Quant) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise normed rows to float8_e4m3fn `[tokens, hidden]` and scales."""
    match quant:
        case FP8Static():
            one = torch.ones_like(quant.scale, dtype=torch.float32)
            scaled = norm.float() * (one / quant.scale.float())
            return to_e4m3(scaled), quant.scale
        case FP8Token():
            return _quantize_by_division(norm.float()[:, None])
        case FP8Group():
            if quant.scale == "fp32":
                return quantize(norm, "fp8")
            return _quantize_by_powers(norm.float().view(norm.shape[0], norm.shape[1] // 128, 128))


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round x to e4m3, saturating at 448."""
    return round_to(x.clamp(-448.0, 448.0), torch.float8_e4m3fn)


def pack_ue8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Pack bytes `[tokens, groups]` into column-major int32 `[tokens, ceil(groups / 4)]`."""
    tokens, groups = exponents.shape
    columns, pitch = -(-groups // 4), -(-tokens // 4) * 4
    packed = torch.zeros((columns, pitch, 4), dtype=torch.uint8, device=exponents.device)
    for group in range(groups):
        packed[group // 4, :tokens, group % 4] = exponents[:, group]
    return packed.view(torch.int32).view(columns, pitch).t()[:tokens]


def _quantize_by_division(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    amax, is_invalid = block_amax(blocks)
    scale = amax * full_like(amax, 1 / 448)
    scale = torch.maximum(scale, full_like(amax, MIN_ROW_SCALE))
    q = torch.where(is_invalid[..., None], torch.nan, blocks / scale[..., None])
    return to_e4m3(q).flatten(1), torch.where(is_invalid, torch.nan, scale)


def _quantize_by_powers(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    amax, is_invalid = block_amax(blocks)
    power = torch.where(amax == 0, -33, power_above(amax)).clamp(min=-33)
    exponent = torch.where(is_invalid, 255, power + 127).to(torch.uint8)
    q = torch.where(is_invalid[..., None], torch.nan, blocks * power_of_two(-power)[..., None])
    return to_e4m3(q).flatten(1), pack_ue8m0(exponent)


def _pad_to_lanes(sums: torch.Tensor) -> torch.Tensor:
    """Pad `[tokens, n]` with zeros to `[tokens, ceil(n / 32), 32]`."""
    tokens, count = sums.shape
    padded = torch.nn.functional.pad(sums, (0, -count % 32))
    return padded.view(tokens, -(-count // 32), 32)


def _sum_lanes(lanes: torch.Tensor) -> torch.Tensor:
    """Sum `[tokens, n, 32]` over the lanes in the order of a butterfly shuffle."""
    for step in (16, 8, 4, 2, 1):
        lanes = lanes[..., :step] + lanes[..., step : 2 * step]
    return lanes[..., 0]
