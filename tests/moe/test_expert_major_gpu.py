"""The layer whose rows come by expert on GPUs: what the CPU tests run, and captured graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, Case
from tests.moe.test_expert_major import BY_EXPERT, DEEP, WIRES, by_hand, fp8_rounds
from tests.moe.test_expert_pushes import pushed_by_hand
from tests.moe.test_layer import (
    WIDTHS,
    both_overlaps,
    nan_logits,
    padded_tokens,
    rounds,
    settle,
    siblings,
)
from tests.moe.test_layer_failures import (
    aborted,
    absent,
    called_wrongly,
    failing_shared,
    wrong_parts,
)
from tests.moe.test_layer_gpu import replayed
from tests.rounds import bits

pytestmark = pytest.mark.gpu


def all_rules_and_ways(group: weft.Group) -> None:
    for config in CONFIGS.values():
        for dtype in WIDTHS:
            rounds(group, Case(replace(config, dtype=dtype), tokens=(9, 4)), BY_EXPERT)
    for name in ("softmax", "gpt-oss"):
        for gemm in ("grouped", "torch", "torch"):
            rounds(group, Case(CONFIGS[name], tokens=(5, 0)), {**BY_EXPERT, "gemm": gemm})
    half = replace(CONFIGS["gpt-oss"], dtype=torch.float16)
    rounds(group, Case(half, tokens=(5, 7)), BY_EXPERT)


def test_rules_and_ways(ranks):
    ranks(2, "cuda")(all_rules_and_ways, timeout=300.0)


def all_wires(group: weft.Group) -> None:
    for options, slack in WIRES.values():
        for overlap in ("none", "shared_expert"):
            case = Case(CONFIGS["deepseek"], tokens=(6, 3))
            rounds(group, case, {**BY_EXPERT, **options, "overlap": overlap}, slack)
    more: list[dict[str, Any]] = [{}, {"combine_dtype": "fp8"}]
    for each in more:
        case = Case(DEEP, tokens=(9, 4))
        fp8_rounds(group, case, {**BY_EXPERT, "overlap": "shared_expert", **each})
        both_overlaps(group, case, {**BY_EXPERT, "fp8": True, **each})
    for pushed in ({"fp8": True}, {"gemm": "grouped"}, {"gemm": "grouped", "expert_map": [1] * 8}):
        both_overlaps(group, case, {**BY_EXPERT, **pushed}, ("none", "shared_expert", "gemm_push"))
    half = replace(case, config=replace(DEEP, dtype=torch.float16))
    both_overlaps(group, half, {**BY_EXPERT, "gemm": "grouped"}, ("none", "gemm_push"))


def test_wires_and_overlap(ranks):
    ranks(2, "cuda")(all_wires, timeout=300.0)


def all_exceptions(group: weft.Group) -> None:
    for name in ("softmax", "llama"):
        padded_tokens(group, name, BY_EXPERT)
        called_wrongly(group, name, BY_EXPERT)
    for name in CONFIGS:
        nan_logits(group, name, BY_EXPERT)
    siblings(group, BY_EXPERT)
    wrong_parts(group, BY_EXPERT)
    by_hand(group)
    pushed_by_hand(group)


def test_padding_nan_siblings_and_refusals(ranks):
    ranks(2, "cuda")(all_exceptions, timeout=300.0)


def all_failures(group: weft.Group) -> None:
    for overlap in ("none", "shared_expert", "gemm_push"):
        options = {**BY_EXPERT, "overlap": overlap, "gemm": "grouped"}
        absent(group, options)
        failing_shared(group, options)
    aborted(group, BY_EXPERT)


def test_failures(ranks):
    ranks(2, "cuda")(all_failures)


def fp8_replays(group: weft.Group, overlap: str) -> None:
    """One graph of FP8 experts, replayed with new tokens and routing, has the bits of calls."""
    case = Case(DEEP, tokens=(16, 16))
    with case.open(group, **BY_EXPERT, fp8=True, overlap=overlap) as layer:
        x, logits = case.of(group.rank, group.device)
        out = torch.empty_like(x)
        layer(x, logits, out=out)
        settle(group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(x, logits, out=out)
        for seed in range(1, 40):
            fresh = case.next(seed=seed).of(group.rank, group.device)
            x.copy_(fresh[0])
            logits.copy_(fresh[1])
            out.fill_(float("nan"))
            graph.replay()
            settle(group)
            layer.check()
            assert torch.equal(bits(layer(x, logits)), bits(out))
            settle(group)


def all_graphs(group: weft.Group) -> None:
    for overlap in ("none", "shared_expert"):
        for gemm in ("grouped", "torch"):
            replayed(group, "deepseek", gemm, overlap, "low_latency")
    replayed(group, "gpt-oss", "grouped", "none", "low_latency")
    replayed(group, "llama", "grouped", "shared_expert", "low_latency")
    replayed(group, "deepseek", "grouped", "gemm_push", "low_latency")
    replayed(group, "gpt-oss", "grouped", "gemm_push", "low_latency")
    for overlap in ("shared_expert", "gemm_push"):
        fp8_replays(group, overlap)


def test_a_captured_layer_replays_with_any_routing(ranks):
    ranks(2, "cuda")(all_graphs, timeout=300.0)
