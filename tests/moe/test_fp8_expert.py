# SPDX-License-Identifier: Apache-2.0
"""One expert in FP8 against the same numbers in float32."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.moe.layers import widened
from weft.errors import InvalidArgument
from weft.gemm import quantize_rows
from weft.moe import CLAMPED_SWIGLU, SWIGLU, Expert, FP8Expert, Gating
from weft.moe.experts import to_blocks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def expert(gating: Gating, hidden: int = 384, inner: int = 128) -> Expert:
    seed = torch.Generator().manual_seed(3)
    gate_up = torch.randn(2 * inner, hidden, generator=seed) * hidden**-0.5
    down = torch.randn(hidden, inner, generator=seed) * inner**-0.5
    return Expert(gate_up.bfloat16(), down.bfloat16(), gating=gating)


def wanted(plain: Expert, x: torch.Tensor, clamped: bool) -> torch.Tensor:
    """The same roundings to FP8, everything else in float32."""
    gate_up = widened(*to_blocks(plain.gate_up[None]))[0]
    down = widened(*to_blocks(plain.down[None]))[0]
    rows = weft.reference.dequantize(*weft.reference.quantize(x, "fp8"))
    gate, up = (rows @ gate_up.T).chunk(2, dim=-1)
    gated = (weft.reference.clamped_swiglu if clamped else weft.reference.swiglu)(gate, up)
    return weft.reference.dequantize(*weft.reference.quantize(gated, "fp8")) @ down.T


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 200])
@pytest.mark.parametrize("gating", [SWIGLU, CLAMPED_SWIGLU], ids=["swiglu", "clamped"])
def test_an_expert_in_fp8(gating: Gating, tokens: int, device: str):
    plain = expert(gating)
    x = torch.randn(tokens, 384, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    got = FP8Expert.of(plain).to(device)(x.to(device))
    assert got.dtype == torch.bfloat16
    assert got.shape == x.shape
    want = wanted(plain, x, gating is CLAMPED_SWIGLU)
    # A product in another order may round to the neighbour in FP8: 2^-3 of one number of 128.
    slack = 0.03 * float(want.abs().max()) if tokens else 0.0
    torch.testing.assert_close(got.float().cpu(), want, rtol=2.0**-7, atol=slack)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_have_the_bits_of_the_reference(dtype: torch.dtype, device: str):
    x = torch.randn(21, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, :128], x[1, 5], x[2, 300] = 0, torch.nan, torch.inf
    x[3] *= 1e-4
    q, scales = quantize_rows(x.to(device))
    theirs, their_scales = weft.reference.quantize(x, "fp8")
    assert torch.equal(q.cpu().view(torch.uint8), theirs.view(torch.uint8)) or torch.equal(
        q.cpu().float().nan_to_num(-1), theirs.float().nan_to_num(-1)
    )
    assert torch.equal(scales.cpu().nan_to_num(-1), their_scales.nan_to_num(-1))


def test_refusals():
    biased = Expert(torch.ones(256, 128), torch.ones(128, 128), down_bias=torch.ones(128))
    with pytest.raises(InvalidArgument, match="has biases"):
        FP8Expert.of(biased)
    with pytest.raises(InvalidArgument, match="blocks are 128 x 128"):
        FP8Expert.of(Expert(torch.ones(200, 128), torch.ones(128, 100)))
    q, scale = to_blocks(torch.ones(1, 256, 128))
    down, down_scale = to_blocks(torch.ones(1, 128, 128))
    with pytest.raises(InvalidArgument, match="gate_up_scale has shape"):
        FP8Expert(q[0], down_scale[0], down[0], down_scale[0])
    for wrong in (torch.ones(3, 100), torch.ones(128), torch.ones(3, 128).int()):
        with pytest.raises(InvalidArgument):
            quantize_rows(wrong)
    with pytest.raises(InvalidArgument, match="strides"):
        quantize_rows(torch.ones(128, 128).T[:, :128].t()[::2])
