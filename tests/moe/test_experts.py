# SPDX-License-Identifier: Apache-2.0
"""Gating, single experts, also in FP8, and refused experts."""

from dataclasses import replace

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, GATINGS, dequantize_blocks
from weft.gemm import quantize_rows
from weft.moe import RELU2, SWIGLU, Expert, FP8Expert, Gating, Ungated
from weft.moe.experts.quantize import quantize_blocks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("gating", list(GATINGS), ids=["swiglu", "clamped", "relu2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gating(gating, dtype):
    h = (torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)) * 6).to(dtype)
    parts = gating.num_projections
    expected = GATINGS[gating](*h.float().chunk(parts, dim=-1))
    assert bool((h.float().abs() > 7).any()), "the limits must matter"
    out = torch.full((3, 5, 64 // parts), float("nan"), dtype=dtype)
    fresh = gating.apply(h.clone())
    assert gating.apply(h, out=out) is out
    assert torch.equal(fresh, out)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), expected, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("name", ["softmax", "gpt-oss", "nemotron"])
def test_an_expert_is_its_formula(name):
    config = replace(CONFIGS[name], dtype=torch.float32, shared=24)
    expert, shared = Expert.seeded(config, 3), Expert.seeded(config, 3, shared=True)
    x = torch.randn(4, config.hidden, generator=torch.Generator().manual_seed(1))
    biases = expert.gate_up_bias, expert.down_bias
    assert [bias is not None for bias in biases] == [config.biased] * 2
    up, down = (0.0 if bias is None else bias for bias in biases)
    parts = config.gating.num_projections
    gated = GATINGS[config.gating](*(x @ expert.gate_up.T + up).chunk(parts, dim=-1))
    torch.testing.assert_close(expert(x), gated @ expert.down.T + down)
    assert not torch.equal(Expert.seeded(config, 4).down, expert.down)
    assert shared.down.shape == (config.hidden, 24)
    assert shared.gate_up_bias is None
    assert shared.gating is (RELU2 if name == "nemotron" else SWIGLU)


def fp8_expert(gating: Gating | Ungated, hidden: int = 384, inner: int = 128) -> Expert:
    seed = torch.Generator().manual_seed(3)
    rows = gating.num_projections * inner
    gate_up = torch.randn(rows, hidden, generator=seed) * hidden**-0.5
    down = torch.randn(hidden, inner, generator=seed) * inner**-0.5
    return Expert(gate_up.bfloat16(), down.bfloat16(), gating=gating)


def round_to_fp8(x: torch.Tensor) -> torch.Tensor:
    return weft.reference.dequantize(*weft.reference.quantize(x, "fp8"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 1, 200])
@pytest.mark.parametrize("gating", list(GATINGS), ids=["swiglu", "clamped", "relu2"])
def test_an_expert_in_fp8(gating: Gating | Ungated, tokens: int, device: str):
    plain = fp8_expert(gating)
    x = torch.randn(tokens, 384, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    got = FP8Expert.from_expert(plain).to(device)(x.to(device))
    assert got.dtype == torch.bfloat16
    gate_up = dequantize_blocks(*quantize_blocks(plain.gate_up[None]))[0]
    down = dequantize_blocks(*quantize_blocks(plain.down[None]))[0]
    gated = GATINGS[gating](*(round_to_fp8(x) @ gate_up.T).chunk(gating.num_projections, dim=-1))
    expected = round_to_fp8(gated) @ down.T
    # A product in another order may round to the neighbour in FP8: 2^-3 of one number of 128.
    slack = 0.04 * float(expected.abs().max()) if tokens else 0.0
    torch.testing.assert_close(got.float().cpu(), expected, rtol=2.0**-7, atol=slack)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_have_the_bits_of_the_reference(dtype: torch.dtype, device: str):
    x = torch.randn(21, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, :128], x[1, 5], x[2, 300] = 0, torch.nan, torch.inf
    x[3] *= 1e-4
    q, scales = quantize_rows(x.to(device))
    theirs, their_scales = weft.reference.quantize(x, "fp8")
    assert torch.equal(q.cpu().float().nan_to_num(-1), theirs.float().nan_to_num(-1))
    assert torch.equal(scales.cpu().nan_to_num(-1), their_scales.nan_to_num(-1))
