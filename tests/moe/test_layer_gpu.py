"""The layer on GPUs: what the CPU tests run, in few launches, and captured graphs besides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, Case, bound
from tests.moe.test_layer import (
    WIDTHS,
    WIRES,
    both_overlaps,
    nan_logits,
    padded_tokens,
    poison,
    rounds,
    settle,
    siblings,
)
from tests.moe.test_layer_failures import (
    aborted,
    absent,
    called_wrongly,
    failing_shared,
    few_rows,
    wrong_parts,
)

pytestmark = pytest.mark.gpu


def all_rules_and_ways(group: weft.Group) -> None:
    for config in CONFIGS.values():
        for dtype in WIDTHS:
            rounds(group, Case(replace(config, dtype=dtype), tokens=(9, 4)), {})
    for name in ("softmax", "gpt-oss"):
        for gemm in ("grouped", "torch", "torch"):
            rounds(group, Case(CONFIGS[name], tokens=(5, 0)), {"gemm": gemm})
    half = replace(CONFIGS["gpt-oss"], dtype=torch.float16)
    rounds(group, Case(half, tokens=(5, 7)), {"gemm": "torch"})


def test_rules_and_ways(ranks):
    ranks(2, "cuda")(all_rules_and_ways)


def all_wires(group: weft.Group) -> None:
    for options, slack in WIRES.values():
        for overlap in ("none", "shared_expert"):
            case = Case(CONFIGS["deepseek"], tokens=(6, 3))
            rounds(group, case, {**options, "overlap": overlap}, slack)
    for name in ("deepseek", "llama"):
        for gemm in ("grouped", "torch"):
            both_overlaps(group, Case(CONFIGS[name], tokens=(9, 4)), {"gemm": gemm})


def test_wires_and_overlap(ranks):
    ranks(2, "cuda")(all_wires)


def all_exceptions(group: weft.Group) -> None:
    for name in ("softmax", "llama"):
        padded_tokens(group, name, {})
        called_wrongly(group, name, {})
    for name in CONFIGS:
        nan_logits(group, name, {})
    siblings(group, {})
    wrong_parts(group, {})
    few_rows(group)


def test_padding_nan_siblings_and_refusals(ranks):
    ranks(2, "cuda")(all_exceptions)


def all_failures(group: weft.Group) -> None:
    for overlap in ("none", "shared_expert"):
        absent(group, {"overlap": overlap})
        failing_shared(group, {"overlap": overlap})
    aborted(group, {})


def test_failures(ranks):
    ranks(2, "cuda")(all_failures)


def replayed(
    group: weft.Group, name: str, gemm: str, overlap: str, mode: str = "throughput"
) -> None:
    """One graph, replayed with new tokens, routing and counts."""
    case = Case(CONFIGS[name], tokens=(16, 16))
    with case.open(group, gemm=gemm, overlap=overlap, mode=mode) as layer:
        x, logits = case.of(group.rank, group.device)
        count = torch.tensor([16], dtype=torch.int32, device=group.device)
        out = torch.empty_like(x)
        for _ in range(2):
            layer(x, logits, num_tokens=count, out=out)
        settle(group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(x, logits, num_tokens=count, out=out)
        for seed in range(1, 6):
            fresh = case.next(seed=seed).of(group.rank, group.device)
            x.copy_(fresh[0])
            logits.copy_(fresh[1])
            real = (16, 1, 0, 7, 13)[seed - 1]
            count.fill_(real)
            poison(layer)
            graph.replay()
            settle(group)
            wanted = case.wanted(layer, x[:real], logits[:real])
            torch.testing.assert_close(
                out[:real].float(), wanted, rtol=0, atol=bound(case.config, wanted)
            )
            layer.check()
        eager = layer(x, logits, num_tokens=count)
        settle(group)
        assert torch.equal(eager[:real], out[:real]), "a replay has the bits of a call"


def all_graphs(group: weft.Group) -> None:
    for overlap in ("none", "shared_expert"):
        for gemm in ("grouped", "torch"):
            replayed(group, "deepseek", gemm, overlap)
    replayed(group, "gpt-oss", "grouped", "none")
    replayed(group, "llama", "grouped", "shared_expert")


def test_a_captured_layer_replays_with_any_routing(ranks):
    ranks(2, "cuda")(all_graphs)
