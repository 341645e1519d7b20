# SPDX-License-Identifier: Apache-2.0
"""The layer on GPUs: what the CPU tests run, in few launches, and captured graphs besides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, Case, bound
from tests.moe.test_layer import (
    BOTH,
    CARRIED,
    WIDTHS,
    WIRES,
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
from tests.moe.test_low_latency import DEEP, by_hand, pushed_by_hand
from tests.moe.test_overlap import CASES, one_result
from tests.rounds import bits
from weft.moe import OVERLAPS

pytestmark = pytest.mark.gpu


def all_rules(group: weft.Group, mode: str) -> None:
    for config in CONFIGS.values():
        for dtype in WIDTHS:
            rounds(group, Case(replace(config, dtype=dtype), tokens=(9, 4)), {"mode": mode})
    half = Case(replace(CONFIGS["gpt-oss"], dtype=torch.float16), tokens=(5, 7))
    rounds(group, half, {"mode": mode, "gemm": "torch"})


def all_wires(group: weft.Group, mode: str) -> None:
    for wire in (wire for each, wire in CARRIED if each == mode):
        options, slack = WIRES[wire]
        for overlap in ("none", "shared_expert"):
            case = Case(CONFIGS["deepseek"], tokens=(6, 3))
            rounds(group, case, {"mode": mode, **options, "overlap": overlap}, slack)


def all_overlaps(group: weft.Group, mode: str) -> None:
    half = replace(DEEP, dtype=torch.float16)
    for config, options in (*CASES, (half, {"gemm": "grouped"})):
        if mode == "low_latency":  # pushed FP8 columns come in pairs of blocks
            config = replace(config, hidden=256)
        one_result(group, Case(config, tokens=(9, 4)), {**options, "mode": mode})


def all_exceptions(group: weft.Group, mode: str) -> None:
    options = {"mode": mode}
    for name in ("softmax", "llama"):
        padded_tokens(group, name, options)
        called_wrongly(group, name, options)
    for name in CONFIGS:
        nan_logits(group, name, options)
    siblings(group, options)
    wrong_parts(group, options)
    if mode == "throughput":
        few_rows(group)
    else:
        by_hand(group)
        pushed_by_hand(group)


def all_failures(group: weft.Group, mode: str) -> None:
    for overlap in OVERLAPS:
        options = {"mode": mode, "overlap": overlap, "gemm": "grouped"}
        absent(group, options)
        failing_shared(group, options)
    aborted(group, {"mode": mode})


def replayed(group: weft.Group, name: str, gemm: str, overlap: str, mode: str) -> None:
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


def fp8_replays(group: weft.Group, overlap: str) -> None:
    """One graph of FP8 experts, replayed with new tokens and routing, has the bits of calls."""
    case = Case(DEEP, tokens=(16, 16))
    with case.open(group, mode="low_latency", fp8=True, overlap=overlap) as layer:
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


def all_graphs(group: weft.Group, mode: str) -> None:
    for overlap in ("none", "shared_expert"):
        for gemm in ("grouped", "torch"):
            replayed(group, "deepseek", gemm, overlap, mode)
    replayed(group, "gpt-oss", "grouped", "none", mode)
    replayed(group, "llama", "grouped", "shared_expert", mode)
    replayed(group, "deepseek", "grouped", "gemm_push", mode)
    if mode == "low_latency":
        replayed(group, "gpt-oss", "grouped", "gemm_push", mode)
        for overlap in ("shared_expert", "gemm_push"):
            fp8_replays(group, overlap)


@BOTH
@pytest.mark.parametrize(
    "body", [all_rules, all_wires, all_overlaps, all_exceptions, all_failures, all_graphs]
)
def test_on_gpus(ranks, body, mode):
    ranks(2, "cuda")(body, mode, timeout=300.0)
