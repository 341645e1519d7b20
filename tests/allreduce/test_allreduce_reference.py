# SPDX-License-Identifier: Apache-2.0
"""The reference of the fused all-reduce, compared with torch's arithmetic."""

from typing import Any

import pytest
import torch

from tests.sums import Sum
from weft import reference
from weft.allreduce.call import FP8Group, FP8Static, FP8Token, MoEFinalize
from weft.allreduce.reference import pack_ue8m0, quantize_norm, round_to, to_e4m3

CPU = torch.device("cpu")


fused: Any = reference.allreduce_fused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [8, 264, 2880, 7168])
def test_sums_and_norms_equal_torchs(dtype, hidden):
    case = Sum(7, hidden, dtype, bias=1.0)
    xs = [case.rows(rank, CPU) for rank in range(5)]
    residual, weight = case.shared(CPU)
    got = fused(xs, residual, weight, 1e-5, 1.0)
    total = torch.stack([x.double() for x in xs]).sum(dim=0)
    assert torch.allclose(got.out.double(), total, rtol=1e-2, atol=2e-2)
    assert torch.equal(got.residual, (got.out.float() + residual.float()).to(dtype))
    norm = torch.nn.functional.rms_norm(
        got.residual.double(), (hidden,), weight.double() + 1.0, 1e-5
    )
    assert torch.allclose(got.norm.double(), norm, rtol=2e-2 if dtype != torch.float32 else 1e-5)
    alone = fused([x[2:3] for x in xs], residual[2:3], weight, 1e-5, 1.0)
    assert torch.equal(alone.norm, got.norm[2:3]), "a row does not depend on its batch"


def test_sums_are_in_rank_order():
    big, one = torch.full((1, 8), 2.0**24), torch.ones(1, 8)
    for xs, want in (([big, one, -big], 0.0), ([big, -big, one], 1.0), ([one, big, -big], 0.0)):
        assert fused(xs).out.unique().tolist() == [want]


def test_zeros_keep_their_sign_and_nans_are_canonical():
    negative = torch.full((1, 8), -0.0)
    out = fused([negative, negative]).out
    assert torch.signbit(out).all()
    odd = torch.full((1, 8), -1, dtype=torch.int16).view(torch.bfloat16)
    out = fused([odd, odd]).out
    assert out.view(torch.int16).unique().tolist() == [0x7FFF]


def test_powers_of_two_equal_flashinfers():
    """The scale is amax / 448, at least 1e-10, rounded up to a power of two."""
    generator = torch.Generator().manual_seed(4)
    norm = torch.randn((64, 1024), generator=generator).double()
    norm *= 2.0 ** torch.randint(-50, 100, (64, 1), generator=generator)
    norm = norm.bfloat16().float()
    norm[0], norm[1], norm[2] = 0, 448 * 2.0**-33, 450 * 2.0**-33
    norm[3:40, ::128] = norm[3:40].abs().amax(dim=1, keepdim=True).log2().ceil().exp2() * 1.75
    q, packed = quantize_norm(norm, FP8Group(128, "ue8m0"))
    groups = norm.view(64, 8, 128)
    amax = groups.abs().amax(dim=2)
    scale = (amax * torch.tensor(1 / 448)).clamp(min=1e-10)
    mantissa, exponent = torch.frexp(scale)
    power = torch.where(mantissa == 0.5, exponent - 1, exponent)
    raw = packed.contiguous().view(torch.uint8)
    assert torch.equal(raw.int(), power + 127)
    numbers = groups.double() / 2.0 ** power.double()[..., None]
    assert torch.equal(q.view(torch.uint8), to_e4m3(numbers.float()).flatten(1).view(torch.uint8))


def test_one_scale_for_a_row():
    """The equation of flashinfer.comm; torch on GPUs multiplies by a constant's reciprocal."""
    norm = torch.randn(64, 512, generator=torch.Generator().manual_seed(5)).bfloat16()
    norm[1] = 0
    norm[2, 5], norm[3, 6] = float("inf"), float("nan")
    norm[4] *= 1e-5
    norm[5] = norm[5].sign() * 2.0**-9
    for row in range(6, 40):  # halves between two numbers, if 448 / amax were exact
        norm[row, :256] = 7 * torch.arange(256).bfloat16()
        norm[row, 256:] = 7 * 256 * (1 + (row - 6) / 32)
    q, scale = quantize_norm(norm, FP8Token())
    assert scale[[2, 3]].isnan().all()
    assert q[[2, 3]].float().isnan().all()
    reciprocal = torch.tensor(1 / 448, dtype=torch.float32)
    whole = torch.cat((norm[:2], norm[4:])).float()
    amax = whole.abs().amax(dim=1, keepdim=True)
    expected = (amax * reciprocal).clamp(min=2.0**-9 / 448)
    result = torch.cat((q[:2], q[4:])).view(torch.uint8)
    assert torch.equal(torch.cat((scale[:2], scale[4:])), expected)
    theirs = (whole / expected).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(result, theirs)
    fixed, same = quantize_norm(norm, FP8Static(torch.tensor([0.001])))
    assert fixed[0].float().abs().max() == 448
    assert same.item() == pytest.approx(0.001)


def test_rounding_and_packing():
    x = torch.tensor([500.0, -500.0, float("nan"), 447.9])
    assert to_e4m3(x).view(torch.uint8).tolist() == [0x7E, 0xFE, 0x7F, 0x7E]
    nan = round_to(torch.tensor([float("nan")]), torch.float32)
    assert nan.view(torch.int32).item() == 2**31 - 1
    packed = pack_ue8m0(torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.uint8))
    assert packed.tolist() == [[0x04030201, 5]]


def test_experts_rows_are_added_in_order():
    rows = torch.tensor([[2.0**24] * 8, [1.0] * 8, [-(2.0**24)] * 8])
    index = torch.tensor([[0, 1, 2], [0, 2, 1], [-1, 9, 1]], dtype=torch.int32)
    out = reference.finalize_moe(MoEFinalize(rows, index, None, torch.ones(3, 8)))
    assert out[:, 0].tolist() == [1.0, 2.0, 2.0]
    scaled = reference.finalize_moe(MoEFinalize(rows, index, torch.full((3, 3), 0.5)))
    assert scaled[:, 0].tolist() == [0.0, 0.5, 0.5]
