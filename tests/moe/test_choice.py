# SPDX-License-Identifier: Apache-2.0
"""Modes, overlaps and GEMMs that "auto" chooses, and options that reach the exchange."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, EXPERTS, HIDDEN, WIDER, Case
from tests.ranks import on_ranks
from weft.errors import InvalidArgument
from weft.gemm import config as gemm_config
from weft.moe import MODES, OVERLAPS
from weft.moe.layer.choice import choose_mode, choose_overlap
from weft.moe.layer.config import choose_gemm, supports_flag_in_data

DEEP = replace(CONFIGS["deepseek"], hidden=WIDER, intermediate=128, shared=128)
CASE = Case(DEEP, tokens=(4, 0))
WIDE = replace(DEEP, hidden=256)
GROUPED = {"gemm": "grouped", "timeout": 600.0}
ALL = [(mode, overlap) for mode in MODES for overlap in OVERLAPS]


@pytest.mark.parametrize(
    ("mode", "ranks", "most"),
    [("throughput", 4, 4096), ("low_latency", 4, 512), ("throughput", 1, 256)],
)
def test_rows_are_pushed_up_to_a_size(mode, ranks, most):
    def at(max_tokens: int, supported: list[tuple[str, str]] = ALL) -> str:
        return choose_overlap(supported, mode, max_tokens=max_tokens, num_ranks=ranks)[0]

    assert (at(1), at(most), at(most + 1)) == ("gemm_push", "gemm_push", "shared_expert")
    bare = [(mode, "none"), (mode, "gemm_push")]
    assert (at(most, bare), at(most + 1, bare)) == ("gemm_push", "none")
    assert at(1, ALL[:2] if mode == "throughput" else ALL[3:5]) == "shared_expert"
    assert at(8192, [(mode, "gemm_push")]) == "gemm_push"


@pytest.mark.parametrize(("ranks", "most"), [(1, 64), (2, 128)])
def test_low_latency_is_chosen_up_to_a_size(ranks, most):
    def at(max_tokens: int, *, on_gpu: bool = True) -> str:
        return choose_mode(ALL, max_tokens=max_tokens, num_ranks=ranks, on_gpu=on_gpu)[0]

    assert (at(most), at(most + 1)) == ("low_latency", "throughput")
    assert at(most, on_gpu=False) == "throughput"


def result(layer: weft.MoE, rank: int) -> torch.Tensor:
    x, logits = CASE.inputs_of(rank, layer.exchange.group.device)
    return layer(x, logits).clone()


def chosen(group: weft.Group) -> list[str]:
    with CASE.open(group, **GROUPED) as layer:
        results, got = layer.explain(), result(layer, group.rank)
        layer.check()
        sibling = layer.sibling(
            layer._weights, shared=layer._shared, correction=CASE.correction(group.device)
        )
        assert sibling.explain() == results
        assert (layer.mode, layer.overlap) == (results.mode, results.overlap)
    with CASE.open(group, mode=results.mode, overlap="none", **GROUPED) as plain:
        assert torch.equal(result(plain, group.rank), got)
    return [results.mode, results.overlap, results.auto]


@pytest.mark.parametrize(
    ("kind", "mode"), [("cpu", "throughput"), pytest.param("cuda", None, marks=pytest.mark.gpu)]
)
def test_all_ranks_make_and_explain_the_same_choice(ranks, kind, mode):
    first, second = ranks(2, kind)(chosen)
    assert first == second
    assert first[1:3] == ["gemm_push", "gemm_push"]
    assert mode is None or first[0] == mode


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ({"combine_dtype": "fp8"}, {"combine_dtype": "fp8"}, "shared_expert"),
        ({}, {"gemm": "torch"}, "shared_expert"),  # pushing needs grouped GEMMs on all ranks
        ({"gemm": "torch"}, {}, "shared_expert"),
        ({"overlap": "none"}, {"overlap": "none"}, "gemm_push"),
    ],
)
@on_ranks(2, "threads")
def test_options_of_any_rank_narrow_the_choice(group, one, other, overlap):
    with CASE.open(group, **{**GROUPED, **(other if group.rank else one)}) as layer:
        result = layer.explain()
    assert (result.overlap, result.auto) == (one.get("overlap", overlap), overlap)


@on_ranks(2, "threads")
def test_options_reach_the_exchange(group):
    case = Case(CONFIGS["softmax"], tokens=(4, 4))
    owners = [1, 0, 1, 1, 0, 0, 1, 1]
    fp8 = {"combine_dtype": "fp8", "quantize": "fp8", "profile": True, "expert_map": owners}
    for options, expected in ((fp8, (True, 128)), ({}, (False, 0))):
        with case.open(group, mode="low_latency", **options) as layer:
            exchange = layer.exchange
            assert isinstance(exchange, weft.LowLatencyAllToAll)
            shape = exchange.config.shape
            assert (shape.combine_fp8, shape.group, shape.reduce) == (*expected, "receiver")
            assert (exchange._tracks.numel() > 0) == bool(options)
            if options:
                assert exchange.placement.ranks == tuple(owners)
                own = tuple(e for e in range(EXPERTS) if owners[e] == group.rank)
                assert layer.local_experts == own
                continue
            assert len(exchange.result_buffers) == 1
            sizes: dict[str, Any] = {"max_tokens": 4, "hidden": HIDDEN, "top_k": 3}
            sizes |= {"num_experts": EXPERTS, "quantize": None, "slots": 1, "reduce": "receiver"}
            assert exchange.memory == weft.LowLatencyAllToAll.memory_bytes(ranks=2, **sizes)


FP8 = {"fp8": True, "quantize": "fp8"}


@pytest.mark.parametrize(
    ("device", "dtype", "options", "with_triton", "without"),
    [
        ("cpu", torch.bfloat16, {}, "torch", "torch"),
        ("cpu", torch.bfloat16, FP8, "grouped", "grouped"),
        ("cuda", torch.bfloat16, {}, "grouped", "torch"),
        ("cuda", torch.float16, {}, "grouped", "torch"),
        ("cuda", torch.float32, {}, "torch", "torch"),
        ("cuda", torch.bfloat16, {"quantize": "fp8"}, "torch", "torch"),
        ("cuda", torch.bfloat16, FP8, "grouped", "no Triton here"),
    ],
)
def test_the_gemm_of_a_device(monkeypatch, device, dtype, options, with_triton, without):
    def missing() -> None:
        raise InvalidArgument("no Triton here")

    for import_triton, expected in ((lambda: None, with_triton), (missing, without)):
        monkeypatch.setattr("weft.gemm.triton_launch.import_triton", import_triton)
        monkeypatch.setattr("weft.moe.layer.config.import_triton", import_triton)
        config, inputs = replace(WIDE, dtype=dtype), {"fp8": False, "quantize": None, **options}
        try:
            choice = choose_gemm("auto", torch.device(device, 0), config, **inputs)
        except InvalidArgument as error:
            choice = str(error)
        assert choice == expected


@pytest.mark.parametrize(
    ("hopper", "config", "fp8", "able"),
    [
        (True, WIDE, True, True),
        (True, WIDE, False, True),
        (False, WIDE, True, False),
        (True, replace(WIDE, dtype=torch.float32), True, False),  # it stores two bytes a number
        (True, replace(WIDE, hidden=384), True, False),  # columns of FP8 come in pairs of blocks
        (True, replace(WIDE, biased=True), True, False),
    ],
)
def test_which_gemms_store_rows_with_flag_in_data(monkeypatch, hopper, config, fp8, able):
    monkeypatch.setattr(gemm_config, "is_hopper", lambda _: hopper)
    for experts in (1, 8):
        gpu = torch.device("cuda", 0)
        assert supports_flag_in_data(config, experts, fp8=fp8, device=gpu) == able
        assert supports_flag_in_data(config, experts, fp8=fp8, device=torch.device("cpu"))
