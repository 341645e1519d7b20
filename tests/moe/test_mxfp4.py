# SPDX-License-Identifier: Apache-2.0
"""A layer with MXFP4 experts: results, replicas and refused weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, EXPERTS, Case, dequantized
from tests.moe.test_layer import one_result
from tests.moe.test_relocation import LOADS, OTHER
from tests.ranks import on_ranks
from tests.rounds import synchronize
from weft.errors import InvalidArgument
from weft.gemm import config as gemm_config
from weft.gemm import quantize_mxfp4
from weft.gemm.mxfp4 import dequantize_mxfp4
from weft.moe import ExpertWeights, Gating, MoEConfig, Routing, balance
from weft.moe.layer.choice import MODES

LAYERS = ["deepseek", "gpt-oss", "deepseek-v4.1", "kimi-k3"]
SMALL = {name: replace(c, hidden=256, intermediate=128) for name, c in CONFIGS.items()}
ALL = SMALL | {
    "deepseek-v4.1": MoEConfig(
        256,
        768,  # 6 blocks: an odd number of pairs, as the 18 of its size
        Routing(EXPERTS, 3, score="sqrtsoftplus", correction=True, scale=1.5),
        gating=Gating(limit=1.0),
        shared=48,
    ),
    "kimi-k3": MoEConfig(
        256,
        128,
        Routing(EXPERTS, 6, score="sigmoid", correction=True),
        gating=Gating(beta=0.5, linear_beta=1.5),
    ),
}


def case_of(name: str, *tokens: int) -> Case:
    return Case(ALL[name], tokens, mxfp4=True)


@pytest.mark.parametrize(
    ("name", "mode", "kind"),
    [
        *(
            pytest.param(name, mode, "cuda", marks=pytest.mark.gpu)
            for name in LAYERS
            for mode in MODES
        ),
        ("deepseek", "throughput", "threads"),
        ("gpt-oss", "low_latency", "threads"),
        ("kimi-k3", "throughput", "threads"),
        pytest.param("deepseek-v4.1", "low_latency", "threads", marks=pytest.mark.slow),
    ],
)
def test_a_layer_matches_its_decoded_weights(ranks, kind, mode, name):
    options = {"gemm": "grouped", "fp8": True, "mode": mode}
    ranks(2, kind)(one_result, case_of(name, 7, 4), options)


@on_ranks(2)
def test_siblings_have_weights_of_either_kind(group):
    """Layers of one workspace may have weights of either kind."""
    case = case_of("softmax", 5, 3)
    x, logits = case.inputs_of(group.rank, group.device)
    with case.open(group, fp8=True) as layer:
        every = case.weights(layer.local_experts, group.device)
        for other in (case.next(mxfp4=False), case):
            with layer.sibling(other.packed(every)) as sibling:
                out, expected = sibling(x, logits), other.expected(layer, x, logits, fp8=True)
                case.check(out, expected, slack=3)
        assert torch.equal(layer(x, logits), out)


@on_ranks(2)
def test_experts_are_relocated(group):
    """Values and scales move with their experts; FP8 weights are not copied into them."""
    case = case_of("gpt-oss", 6, 5)
    first, second = (balance(loads, 2, replicas=2) for loads in (LOADS, OTHER))
    x, logits = case.inputs_of(group.rank, group.device)
    every = case.weights(range(EXPERTS), group.device)
    with case.open(group, fp8=True, replicas=first) as layer:
        assert layer.relocate(second) > 0
        for tensor, whole in zip(layer._weights.tensors, case.packed(every).tensors, strict=True):
            assert torch.equal(tensor, whole[list(second.logical_experts(group.rank))])
        out, expected = layer(x, logits), case.expected(layer, x, logits, fp8=True)
        case.check(out, expected, slack=4)
        own = case.weights(first.logical_experts(group.rank), group.device)
        with pytest.raises(InvalidArgument, match=r"weights are torch.float8_e4m3fn, those of the"):
            layer.relocate(first, weights=own.to_fp8())
        layer.relocate(first, weights=own.to_mxfp4())
        case.check(layer(x, logits), expected, slack=4)
        synchronize(group.device)


def test_weights_are_rounded_to_four_bits_and_checked():
    case, cpu = case_of("softmax", 1), torch.device("cpu")
    config, plain = case.config, case.weights(range(EXPERTS), cpu)
    packed = plain.to_mxfp4()
    packed.check(config, EXPERTS, cpu, fp8=True)
    for name in ("gate_up", "down"):
        exact = getattr(plain, name).float()
        error = (dequantized(packed, name) - exact).square().mean().sqrt()
        assert 0.05 < error / exact.square().mean().sqrt() < 0.15
    wrong: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"gate_up_scale": None}, {}, "gate_up_scale"),
        ({"down_scale": torch.ones(EXPERTS, 2, 1)}, {}, "down_scale has shape"),
        ({"down": plain.to_fp8().down}, {}, "down has"),
        ({"gate_up": packed.gate_up[:, :2].contiguous()}, {}, "gate_up has shape"),
        ({}, {"fp8": False}, "build the layer with fp8=True|has dtype"),
        ({}, {"config": replace(config, dtype=torch.float32)}, "dtype is torch.float32; MXFP4"),
    ]
    for changes, inputs, words in wrong:
        good = {"config": config, "local_experts": EXPERTS, "device": cpu, "fp8": True}
        with pytest.raises(InvalidArgument, match=words):
            replace(packed, **changes).check(**{**good, **inputs})
    with pytest.raises(InvalidArgument, match="torch.uint8 with scales; to_mxfp4 needs"):
        packed.to_mxfp4()


def test_gpus_that_are_not_hopper_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gemm_config, "is_hopper", lambda _: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    words = "MXFP4 weights need compute capability 9.0, but cuda:0 has 10.0: use FP8 weights"
    with pytest.raises(InvalidArgument, match=words):
        weft.gemm.fastest_plan(8, 4, 256, 256, torch.uint8, device=torch.device("cuda", 0))


IN_MEMORY = MoEConfig(256, 128, Routing(EXPERTS, 3), gating=Gating(limit=1.0), biased=True)


def in_memory(far_apart: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return three experts of hidden 160 and intermediate 96 in an engine's format, and values."""
    generator = torch.Generator().manual_seed(1)
    inputs: dict[str, Any] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, rows, columns in (("gate_up", 192, 160), ("down", 160, 96)):
        weights = torch.randn(3, rows, columns, generator=generator)
        if far_apart:
            weights[:, 1::2, :32] *= 2.0**-17
            weights[:, :, 32:64] = 0.0
        inputs[name], inputs[f"{name}_scale"] = quantize_mxfp4(weights)
        inputs[f"{name}_scale"][:, :, 1] = 200 if far_apart else inputs[f"{name}_scale"][:, :, 1]
        inputs[f"{name}_bias"] = torch.randn(3, rows, generator=generator).bfloat16()
        whole[name] = dequantize_mxfp4(inputs[name], inputs[f"{name}_scale"])
        whole[f"{name}_bias"] = inputs[f"{name}_bias"]
    return inputs, whole


def padded_with_zeros(
    whole: dict[str, torch.Tensor], interleaved: bool, projections: int = 2
) -> dict[str, torch.Tensor]:
    """Pad to hidden 256 and intermediate 128, the gate's rows first."""
    result = {}
    for name, tensor in whole.items():
        parts = [tensor]
        if name.startswith("gate_up"):
            parts = list(tensor.chunk(projections, 1))
            if interleaved:
                parts = [tensor[:, ::2], tensor[:, 1::2]]
        rows = 128 if name.startswith("gate_up") else 256
        columns = (256 if name == "gate_up" else 128) if tensor.dim() == 3 else 0
        wide = []
        for part in parts:
            empty = part.new_zeros(len(part), rows, *([columns] if columns else []))
            empty[(slice(None), *(slice(0, size) for size in part.shape[1:]))] = part
            wide.append(empty)
        result[name] = torch.cat(wide, 1)
    return result


@pytest.mark.parametrize("interleaved", [False, True])
def test_weights_in_memory_keep_their_numbers(interleaved):
    kwargs, whole = in_memory(far_apart=False)
    expected = padded_with_zeros(whole, interleaved)
    for packed in (True, False):
        options = {"interleaved": interleaved, "packed": packed}
        result = ExpertWeights.from_mxfp4(IN_MEMORY, **options, **kwargs)
        result.check(IN_MEMORY, 3, torch.device("cpu"), fp8=True)
        for name in ("gate_up", "down"):
            assert torch.equal(dequantized(result, name), expected[name])
            assert torch.equal(getattr(result, f"{name}_bias"), expected[f"{name}_bias"])


def test_powers_that_are_far_apart_are_rounded_in_fp8_alone():
    """The error is at most half of 2^-15 of a block's largest power; zeros have no power."""
    kwargs, whole = in_memory(far_apart=True)
    with pytest.raises(InvalidArgument, match="expert 0, gate_up of rows 0.., row 1 has blocks"):
        ExpertWeights.from_mxfp4(IN_MEMORY, **kwargs)
    result = ExpertWeights.from_mxfp4(IN_MEMORY, packed=False, **kwargs)
    expected = padded_with_zeros(whole, False)["gate_up"]
    assert result.gate_up_scale is not None
    scale = result.gate_up_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    off = (dequantized(result, "gate_up") - expected).abs()
    largest = scale * 2.0**6
    assert 0 < float(off.max()) <= float((largest * 2.0**-16).max())
    assert torch.equal(off > 0, (off > 0) & (expected.abs() < largest * 2.0**-14))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"gate_up_scale": torch.full((3, 192, 5), 255, dtype=torch.uint8)},
            "expert 0, gate_up of rows 0..(, row 0)? has a scale of 255, which is NaN",
        ),
        ({"config": replace(IN_MEMORY, hidden=384)}, "the config 128 and 384; the config's size"),
        ({"gate_up": [[1]]}, "gate_up is a list; it must be a torch.Tensor"),
        (
            {"down": torch.zeros(160, 48, dtype=torch.uint8)},
            r"down has shape \[160, 48\]; it must be \[local_experts, rows, columns\]",
        ),
        ({"down_bias": None}, r"down_bias is None; it must be \[3, 160\]"),
    ],
)
def test_invalid_weights_in_memory_are_refused(more, text):
    kwargs = {"config": IN_MEMORY, **in_memory(far_apart=False)[0], **more}
    for packed in (False, True):
        with pytest.raises(InvalidArgument, match=text):
            ExpertWeights.from_mxfp4(**kwargs, packed=packed)
