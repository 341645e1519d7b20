# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights: rounding, packing, decoding, and refused tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gemm.cases import Case, decode_mxfp4, gated, spread_scales
from weft.errors import InvalidArgument
from weft.gemm import (
    Gated,
    GatedQuant,
    GemmPlan,
    WgmmaPlan,
    grouped_gemm,
    pack_mxfp4,
    quantize_mxfp4,
    unpack_mxfp4,
)
from weft.gemm.config import MXFP4
from weft.gemm.mxfp4 import UNIT_BYTES


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).byte()


@pytest.mark.parametrize("k", [32, 128, 288])
def test_packing_loses_nothing(k: int):
    """Test every byte with every exponent in a row's range, also where k ends within a unit."""
    seed = torch.Generator().manual_seed(2)
    values, scales = codes(2, 256, k // 2), spread_scales(2, 256, k, seed, 14)
    b, b_scale = pack_mxfp4(values, scales.view(torch.float8_e8m0fnu))
    blocks = -(-k // 128)
    assert b.shape == (2, 4, blocks, UNIT_BYTES)
    assert b.dtype == MXFP4
    assert b_scale.shape == (2, 256)
    wide = unpack_mxfp4(b, b_scale)
    assert torch.equal(wide[..., :k].double(), decode_mxfp4(values, scales))
    signs = torch.stack((values >> 3 & 1, values >> 7), dim=-1).flatten(-2).bool()
    assert torch.equal(wide[..., :k].signbit(), signs), "-0 keeps its sign"
    assert not bool(wide[..., k:].any())
    again = pack_mxfp4(values.view(torch.int8), scales)
    assert torch.equal(again[0], b)


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 14), (240, 254), (254, 254), (1, 9)])
def test_extreme_scales_are_exact(low: int, high: int):
    """A row's factor stays a normal float32."""
    values = codes(1, 128, 32) & 0x11  # at most 0.5
    scales = torch.tensor([low, high]).repeat(1, 128, 1).byte()
    b, b_scale = pack_mxfp4(values, scales)
    assert bool(((b_scale >= 2.0**-126) & b_scale.isfinite()).all())
    assert torch.equal(unpack_mxfp4(b, b_scale)[..., :64].double(), decode_mxfp4(values, scales))


def test_scales_of_zeros_are_ignored():
    values = codes(1, 128, 32) | 1
    values[..., :16] &= 0x88
    near, far = torch.tensor([120, 120]), torch.tensor([7, 120])
    result = [pack_mxfp4(values, s.repeat(1, 128, 1).byte()) for s in (near, far)]
    assert torch.equal(unpack_mxfp4(*result[0]), unpack_mxfp4(*result[1]))
    nothing = pack_mxfp4(values & 0x88, far.repeat(1, 128, 1).byte())
    assert not bool(unpack_mxfp4(*nothing).any())


def test_rounding_is_to_nearest_even_of_the_ocp_rule():
    """Test all midpoints between two values, both signs, and values above 6 after scaling."""
    x = torch.zeros(1, 1, 64)
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 4.0])
    x[0, 0, :8], x[0, 0, 8:16], x[0, 0, 16] = halves, -halves, 7.9
    x[0, 0, 32:34] = torch.tensor([1.0, -0.0])
    values, scales = quantize_mxfp4(x)
    assert scales.tolist() == [[[127, 125]]]
    result = decode_mxfp4(values, scales)[0, 0]
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0], dtype=torch.float64)
    assert torch.equal(result[:8], even)
    assert torch.equal(result[8:16], -even)
    assert result[16] == 6
    assert result[32] == 1
    assert bool(result[[8, 33]].signbit().all())


def call(**other: Any) -> object:
    made = Case(MXFP4).make()
    return grouped_gemm(**{"a": made.a, "b": made.b, **made.given, **other})


def pack_scales(row: list[int]) -> object:
    """Pack weights of which one row has other scales than the rest."""
    scales = torch.full((2, 128, 4), 120).byte()
    scales[1, 3] = torch.tensor(row)
    return pack_mxfp4(codes(2, 128, 64) | 1, scales)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: pack_mxfp4([1], codes(1, 128, 1)), "values"),  # type: ignore[arg-type]
    (lambda: pack_mxfp4(codes(1, 64, 16), codes(1, 64, 1)), "n is 64; .* multiple of 128"),
    (lambda: pack_mxfp4(codes(1, 128, 8), codes(1, 128, 1)), "k is 16; .* multiple of 32"),
    (lambda: pack_mxfp4(codes(1, 128, 32), codes(1, 128, 1)), r"scales has shape"),
    (lambda: pack_mxfp4(codes(1, 128, 32).int(), codes(1, 128, 2)), "values has dtype"),
    (lambda: pack_scales([255, 120, 120, 120]), "expert 1, row 3 has a scale of 255, which is NaN"),
    (lambda: pack_scales([105, 120, 119, 118]), r"1, row 3 has .* 2\^-22 and 2\^-7; .* 2\^14"),
    (lambda: quantize_mxfp4(codes(1, 128, 32)), "weights has dtype"),
    (lambda: quantize_mxfp4(torch.ones(1, 128, 40)), "k is 40"),
    (lambda: call(plan=GemmPlan(64)), "GemmPlan.* does not support MXFP4 weights: use a WgmmaPlan"),
    (lambda: call(plan=WgmmaPlan(256)), "block_m is 256"),
    (lambda: call(a=torch.zeros(30, 256).bfloat16()), "a has dtype"),
    (lambda: call(b=codes(3, 256, 128)), r"b has shape"),
    (lambda: call(b_scale=torch.ones(3, 2, 2)), r"b_scale has shape"),
    (lambda: call(epilogue=Gated()), "gates FP8 with GatedQuant"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_refused(make: Callable[[], Any], words: str):
    with pytest.raises(InvalidArgument, match=words):
        make()


def test_the_largest_range_is_packed_and_nan_has_no_scale():
    pack_scales([106, 120, 119, 118])
    for bad in (torch.nan, torch.inf):
        x = torch.ones(1, 128, 64)
        x[0, 70, 40] = bad
        assert quantize_mxfp4(x)[1][0, 70].tolist()[1] == 255


SHAPES = {
    "contiguous": Case(MXFP4),
    "masked": Case(MXFP4, masked=True, k_major=True),
    "packed": Case(MXFP4, align=1, slack=0, counts=(3, 1, 7, 0, 2), k=384),
    "bias": Case(MXFP4, bias=True),
    "no rows": Case(MXFP4, counts=(0, 0)),
    "half": Case(MXFP4, n=384),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_reference_multiplies_decoded_weights(name: str):
    made = SHAPES[name].make()
    made.call().agrees(made.oracle())
    stored, received = made.pushed()
    whole = made.call().numbers.view(stored.shape)
    assert torch.equal(stored[received], whole[received])
    if made.case.n % 256 == 0:
        how = GatedQuant(1.702, 1.0, 0.7)
        made.call(how).agrees(gated(how, made.oracle()), tolerance=0.08)
