# SPDX-License-Identifier: Apache-2.0
"""Gating, single experts, also in FP8, and stacked experts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, GATINGS, dequantize_blocks
from weft.errors import InvalidArgument
from weft.gemm import quantize_rows
from weft.moe import (
    CLAMPED_SWIGLU,
    MODELS,
    SWIGLU,
    Expert,
    ExpertWeights,
    FP8Expert,
    GatedExpert,
    Gating,
    MoEConfig,
)
from weft.moe.experts.quantize import quantize_blocks


@pytest.mark.parametrize("gating", list(GATINGS), ids=["swiglu", "clamped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gating(gating, dtype):
    h = (torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0)) * 6).to(dtype)
    wanted = GATINGS[gating](*h.float().chunk(2, dim=-1))
    assert bool((h.float().abs() > 7).any()), "the limits must matter"
    out = torch.full((3, 5, 32), float("nan"), dtype=dtype)
    fresh = gating.apply(h.clone())
    assert gating.apply(h, out=out) is out
    assert torch.equal(fresh, out)
    assert fresh.is_contiguous()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), wanted, rtol=4 * eps, atol=4 * eps)


def test_clamped_swiglu_values():
    h = torch.tensor([[9.0, -9.0, 0.5, 20.0, -20.0, 2.0]])
    limited = [(7.0, 7.0), (-9.0, -7.0), (0.5, 2.0)]
    wanted = [g / (1 + math.exp(-1.702 * g)) * (u + 1) for g, u in limited]
    assert CLAMPED_SWIGLU.apply(h)[0].tolist() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", ["softmax", "gpt-oss"])
def test_an_expert_is_its_formula(name):
    config = replace(CONFIGS[name], dtype=torch.float32)
    expert = Expert.seeded(config, 3)
    x = torch.randn(4, config.hidden, generator=torch.Generator().manual_seed(1))
    h = x @ expert.gate_up.T
    if config.biased:
        assert expert.gate_up_bias is not None
        h = h + expert.gate_up_bias
    y = GATINGS[config.gating](*h.chunk(2, dim=-1)) @ expert.down.T
    if config.biased:
        assert expert.down_bias is not None
        y = y + expert.down_bias
    torch.testing.assert_close(expert(x), y)
    assert torch.equal(Expert.seeded(config, 3).down, expert.down)
    assert not torch.equal(Expert.seeded(config, 4).down, expert.down)


def test_shared_experts_have_their_own_size_and_no_bias():
    config = replace(CONFIGS["gpt-oss"], shared=24)
    shared = Expert.seeded(config, 1, shared=True)
    assert shared.down.shape == (config.hidden, 24)
    assert shared.gate_up_bias is None
    assert shared.gating is SWIGLU


def test_a_gated_shared_expert():
    config = replace(CONFIGS["softmax"], shared=24, dtype=torch.float32)
    shared = Expert.seeded(config, 1, shared=True)
    x, gate = torch.randn(3, config.hidden), torch.randn(1, config.hidden)
    wanted = torch.sigmoid((x * gate).sum(dim=1, keepdim=True)) * shared(x)
    torch.testing.assert_close(GatedExpert(shared, gate)(x), wanted)


def test_stacking():
    config = CONFIGS["gpt-oss"]
    experts = [Expert.seeded(config, seed) for seed in range(3)]
    stacked = ExpertWeights.stack(config, experts)
    stacked.check(config, 3, torch.device("cpu"))
    assert stacked.down_bias is not None
    for place, expert in enumerate(experts):
        assert torch.equal(stacked.gate_up[place], expert.gate_up)
        assert expert.down_bias is not None
        assert torch.equal(stacked.down_bias[place], expert.down_bias)
    none = ExpertWeights.stack(config, [])
    none.check(config, 0, torch.device("cpu"))
    assert none.gate_up.shape == (0, 2 * config.intermediate, config.hidden)
    plain = Expert.seeded(CONFIGS["softmax"], 0)
    small = Expert(plain.gate_up[:32], plain.down[:, :16])
    unbiased = replace(stacked, gate_up_bias=None)
    for words, use in (
        ("expert 0 has gate_up_bias None", lambda: ExpertWeights.stack(config, [plain])),
        (r"down \[128, 16\]; they must be", lambda: Expert(plain.gate_up, plain.down[:, :16])),
        (
            r"expert 1 has gate_up \[32, 128\]",
            lambda: ExpertWeights.stack(CONFIGS["softmax"], [plain, small]),
        ),
        ("gate_up_bias is a NoneType", lambda: unbiased.check(config, 3, torch.device("cpu"))),
    ):
        with pytest.raises(InvalidArgument, match=words):
            use()


def test_an_unknown_model_is_refused_with_a_suggestion():
    for name, near in (("GLM", "glm-4.5-air"), ("deepseek-v2", "deepseek-v3")):
        with pytest.raises(InvalidArgument, match=f"did you mean '{near}'"):
            MODELS[name]
    assert "GLM" not in MODELS


def test_configs():
    for name, config in MODELS.items():
        assert config.hidden % 64 == 0, name
        assert config.routing.num_experts % 8 == 0, name
        assert config.biased == (name == "gpt-oss-120b")
    assert MoEConfig(64, 32, MODELS["qwen3-30b-a3b"].routing).gating is SWIGLU


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def fp8_expert(gating: Gating, hidden: int = 384, inner: int = 128) -> Expert:
    seed = torch.Generator().manual_seed(3)
    gate_up = torch.randn(2 * inner, hidden, generator=seed) * hidden**-0.5
    down = torch.randn(hidden, inner, generator=seed) * inner**-0.5
    return Expert(gate_up.bfloat16(), down.bfloat16(), gating=gating)


def wanted(plain: Expert, x: torch.Tensor, clamped: bool) -> torch.Tensor:
    """Return the result with the same roundings to FP8, and otherwise in float32."""
    gate_up = dequantize_blocks(*quantize_blocks(plain.gate_up[None]))[0]
    down = dequantize_blocks(*quantize_blocks(plain.down[None]))[0]
    rows = weft.reference.dequantize(*weft.reference.quantize(x, "fp8"))
    gate, up = (rows @ gate_up.T).chunk(2, dim=-1)
    gated = (weft.reference.clamped_swiglu if clamped else weft.reference.swiglu)(gate, up)
    return weft.reference.dequantize(*weft.reference.quantize(gated, "fp8")) @ down.T


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 1, 200])
@pytest.mark.parametrize("gating", [SWIGLU, CLAMPED_SWIGLU], ids=["swiglu", "clamped"])
def test_an_expert_in_fp8(gating: Gating, tokens: int, device: str):
    plain = fp8_expert(gating)
    x = torch.randn(tokens, 384, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    got = FP8Expert.from_expert(plain).to(device)(x.to(device))
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


def test_invalid_fp8_experts_are_refused():
    biased = Expert(torch.ones(256, 128), torch.ones(128, 128), down_bias=torch.ones(128))
    odd = Expert(torch.ones(200, 128), torch.ones(128, 100))
    for expert, words in ((biased, "has biases"), (odd, "blocks are 128 x 128")):
        with pytest.raises(InvalidArgument, match=words):
            FP8Expert.from_expert(expert)
    q, scale = quantize_blocks(torch.ones(1, 256, 128))
    down, down_scale = quantize_blocks(torch.ones(1, 128, 128))
    with pytest.raises(InvalidArgument, match="gate_up_scale has shape"):
        FP8Expert(q[0], down_scale[0], down[0], down_scale[0])
