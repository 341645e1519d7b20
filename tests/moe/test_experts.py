# SPDX-License-Identifier: Apache-2.0
"""Gating, one expert, and many stacked."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.moe.layers import CONFIGS, GATINGS
from weft.errors import InvalidArgument
from weft.moe import (
    CLAMPED_SWIGLU,
    MODELS,
    SWIGLU,
    Expert,
    ExpertWeights,
    GatedExpert,
    MoEConfig,
)


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


def test_clamped_swiglu_in_numbers():
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


def test_a_shared_expert_behind_a_gate():
    config = replace(CONFIGS["softmax"], shared=24, dtype=torch.float32)
    shared = Expert.seeded(config, 1, shared=True)
    x, gate = torch.randn(3, config.hidden), torch.randn(1, config.hidden)
    wanted = torch.sigmoid((x * gate).sum(dim=1, keepdim=True)) * shared(x)
    torch.testing.assert_close(GatedExpert(shared, gate)(x), wanted)
    with pytest.raises(InvalidArgument, match=r"gate is \[2, 4\] torch.int64; it must be \[1, hid"):
        GatedExpert(shared, torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(InvalidArgument, match="gate is a NoneType; it must be a torch.Tensor"):
        GatedExpert(shared, None)  # type: ignore[arg-type]


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
    with pytest.raises(InvalidArgument, match="expert 0 has gate_up_bias None"):
        ExpertWeights.stack(config, [plain])
    with pytest.raises(InvalidArgument, match=r"down \[128, 16\]; they must be"):
        Expert(plain.gate_up, plain.down[:, :16])
    small = Expert(plain.gate_up[:32], plain.down[:, :16])
    with pytest.raises(InvalidArgument, match=r"expert 1 has gate_up \[32, 128\]"):
        ExpertWeights.stack(CONFIGS["softmax"], [plain, small])
    with pytest.raises(InvalidArgument, match="gate_up_bias is a NoneType"):
        replace(stacked, gate_up_bias=None).check(config, 3, torch.device("cpu"))


def test_a_model_that_is_not_known_is_refused_with_the_nearest_one():
    for name, near in (("GLM", "glm-4.5-air"), ("deepseek-v2", "deepseek-v3")):
        with pytest.raises(InvalidArgument, match=f"did you mean '{near}'"):
            MODELS[name]
    assert "GLM" not in MODELS


def test_configs():
    for name, config in MODELS.items():
        assert config.hidden % 64 == 0, name
        assert config.routing.num_experts % 8 == 0, name
        assert config.biased == (name == "gpt-oss-120b")
    for hidden, intermediate, shared in ((0, 8, 0), (8, 0, 0), (8, 8, -1)):
        with pytest.raises(InvalidArgument, match="it must be an integer in [01]"):
            MoEConfig(hidden, intermediate, MODELS["kimi-k2"].routing, shared=shared)
    assert MoEConfig(64, 32, MODELS["qwen3-30b-a3b"].routing).gating is SWIGLU
