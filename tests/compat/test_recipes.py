# SPDX-License-Identifier: Apache-2.0
"""FP8 numbers and scales of deep_ep and triton_dist: byte for byte the originals' arithmetic.

Weft's own are blocks that hold an Inf or a NaN, all of which is NaN, and triton_dist's blocks of
zeros, which stay zeros.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.compat.buffers import KINDS, layer_of
from weft.compat.deep_ep import Buffer
from weft.lowlatency import reference as low
from weft.reference import quantize

TOKENS, HIDDEN, EXPERTS, TOP_K = 16, 512, 8, 4
# (recipe, whether scales are powers of two, columns of a scale, whether scales are packed)
Recipe = tuple[str, bool, int, bool]
RECIPES: list[Recipe] = [
    *(("deep_ep", *rest) for rest in ((False, 128, False), (True, 128, False), (True, 128, True))),
    *(("triton_dist", False, size, False) for size in (32, 64, 128)),
]


def original(x: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 numbers and scales as the original computes them.

    deep_ep: the scale is amax, at least 1e-4, times the rounded 1 / 448, or the power of two at or
    above; numbers are multiplied by 448 / amax, or by the power's inverse. triton_dist: numbers are
    divided by amax times the rounded 1 / 448, on a GPU as Triton divides there.
    """
    name, rounded, size, _ = recipe
    blocks = x.float().unflatten(-1, (-1, size))
    amax = blocks.abs().amax(dim=-1)
    zeros = amax == 0
    if name == "deep_ep":
        amax = amax.clamp(min=1e-4)
    scales = amax * (torch.tensor(1.0, dtype=torch.float64) / 448).float().to(x.device)
    if name == "deep_ep":
        factors = torch.full_like(amax, 448.0) / amax
        if rounded:
            mantissa, exponent = torch.frexp(scales)
            powers = torch.where(mantissa == 0.5, exponent - 1, exponent)
            scales, factors = (torch.ldexp(torch.ones_like(amax), p) for p in (powers, -powers))
        values = blocks * factors[..., None]
    else:
        every = scales[..., None].expand_as(blocks)
        if x.device.type == "cuda":
            from tests.compat.triton_quotient import divided

            values = divided(blocks, every).clamp(-448, 448)
        else:
            values = (blocks / every).clamp(-448, 448)
    numbers = values.to(torch.float8_e4m3fn).view(torch.uint8)
    if name == "triton_dist":
        signs = blocks.signbit().to(torch.uint8) << 7
        numbers = torch.where(zeros[..., None], signs, numbers)
    whole = blocks.isfinite().all(dim=-1)
    numbers = torch.where(whole[..., None], numbers, 0x7F).flatten(-2)
    return numbers, torch.where(whole, scales, torch.nan)


def edged(seed: int, tokens: int = TOKENS) -> torch.Tensor:
    """Return rows of many sizes: zeros, tiny numbers, sizes around 1e-4, an Inf and a NaN.

    In three rows x / amax * 448 lies half way between two e4m3 numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-40, 20, (tokens, 1), generator=generator).double()
    x = (torch.randn((tokens, HIDDEN), generator=generator).double() * 2**powers).bfloat16()
    for row, most in enumerate((0.0, 1e-40, 2.0**-117, 9.96e-5, 1e-4, 1.01e-4, 448.0, 450.0)):
        x[row] = x[row].sign() * most
    x[8, 5], x[9, 200] = float("nan"), -float("inf")
    x[10] *= 2.0**-100
    halves = torch.arange(1, HIDDEN // 2, 2) % 32
    for row, power in ((11, -20), (12, 0), (13, 30)):
        x[row, : len(halves)] = (7 * halves * 2.0**power).bfloat16()
        x[row, ::128] = 7 * 32 * 2.0**power * (1.0, 1.125, 1.25)[row - 11]
    return x


def same(numbers: torch.Tensor, scales: torch.Tensor, want: tuple[torch.Tensor, ...]) -> None:
    assert torch.equal(numbers.view(torch.uint8), want[0])
    assert torch.equal(scales.nan_to_num(7.0), want[1].nan_to_num(7.0))


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if not recipe[3]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_and_scales_equal_the_originals(recipe, dtype):
    name, rounded, size, _ = recipe
    x = torch.cat([edged(seed) for seed in range(32)]).to(dtype)
    kind = "fp32_row" if name == "triton_dist" else "ue8m0" if rounded else "fp32_col"
    numbers, scales = low.compute_delivered_rows(x, "fp8", size, kind, name)
    assert scales is not None
    want = original(x, recipe)
    same(numbers, scales, want)
    if name == "deep_ep":
        assert scales[0].max() == scales[3].max() <= scales[5].min()  # amax counts as 1e-4
    own, _ = quantize(x, "fp8", size)  # and the cases are those in which the two differ
    assert not torch.equal(own.view(torch.uint8), want[0])


def delivered(group: weft.Group, recipe: Recipe) -> None:
    name, rounded, size, packed = recipe
    device, per_rank = group.device, EXPERTS // group.size
    sources = [edged(rank) for rank in range(group.size)]
    x = sources[group.rank].to(device)
    ids = (torch.arange(TOKENS)[:, None] % EXPERTS + torch.arange(TOP_K)) % EXPERTS
    ids, weights = ids.int().to(device), torch.ones(TOKENS, TOP_K, device=device)
    made: Any
    if name == "deep_ep":
        made = Buffer(group, low_latency_mode=True)
        (numbers, scales), counts, handle, _, _ = made.low_latency_dispatch(
            x, ids, TOKENS, EXPERTS, round_scale=rounded, use_ue8m0=packed
        )
        scales = low.unpack_scales(scales, HIDDEN // 128)
        source, ranges = handle[:2]
    else:
        made = layer_of(group, max_m=TOKENS, hidden=HIDDEN, fp8_gsize=size)
        numbers, scales, counts, handle = made.dispatch(x, None, ids)
        source, ranges = handle.recv_token_source_indices, handle.recv_token_source_count_and_start
    assert counts.tolist() == [TOKENS * TOP_K // EXPERTS * group.size] * per_rank
    for local in range(per_rank):
        for rank, rows in enumerate(sources):
            begin, count = int(ranges[local, rank]) >> 32, int(ranges[local, rank]) & (2**32 - 1)
            held = slice(begin, begin + count)
            want = original(rows[source[local, held].cpu().long()].to(device), recipe)
            same(numbers[local, held], scales[local, held], want)
    y = torch.zeros(numbers.shape, dtype=torch.bfloat16, device=device)
    if name == "deep_ep":
        made.low_latency_combine(y, ids, weights, handle)
    else:
        made.combine(y, ids, weights, handle)
    made.check()
    group.barrier()
    made.destroy() if name == "deep_ep" else made.finalize()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [each for each in RECIPES if each[2] != 64], ids=str)
def test_delivered_rows_equal_the_originals(ranks, kind, recipe):
    ranks(2, kind)(delivered, recipe)
