# SPDX-License-Identifier: Apache-2.0
"""The layer on GPUs: the CPU tests in few launches, and captured graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, Case
from tests.moe.test_layer import (
    BOTH,
    CARRIED,
    DEEP,
    GROUPED,
    OVERLAPPED,
    PAIRS,
    WIRES,
    by_hand,
    few_rows,
    one_result,
    padded_tokens,
    poison,
    rounds,
    settle,
    siblings,
)
from tests.moe.test_layer_failures import (
    aborted,
    absent,
    fail_in_shared_expert,
    make_invalid_calls,
    pass_invalid_parts,
)
from tests.rounds import bits
from weft.moe import OVERLAPS

pytestmark = pytest.mark.gpu


def all_rules(group: weft.Group, mode: str) -> None:
    for config in CONFIGS.values():
        for dtype in (torch.float32, torch.bfloat16):
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
    for config, options, _ in (*OVERLAPPED, (half, GROUPED, ())):
        if mode == "low_latency":  # pushed FP8 columns come in pairs of blocks
            config = replace(config, hidden=256)
        one_result(group, Case(config, tokens=(9, 4)), {**options, "mode": mode})


def all_exceptions(group: weft.Group, mode: str) -> None:
    options = {"mode": mode}
    for name in CONFIGS:
        padded_tokens(group, name, options)
    for name in ("softmax", "llama"):
        make_invalid_calls(group, name, options)
    siblings(group, options)
    pass_invalid_parts(group, options)
    if mode == "throughput":
        few_rows(group, 8, {**options, "gemm": "torch"})  # of each expert
    else:
        for overlap in ("none", "gemm_push"):
            by_hand(group, overlap)


def all_failures(group: weft.Group, mode: str) -> None:
    for overlap in OVERLAPS:
        options = {"mode": mode, "overlap": overlap, "gemm": "grouped"}
        absent(group, options)
        fail_in_shared_expert(group, options)
    aborted(group, {"mode": mode})


def replayed(group: weft.Group, case: Case, replays: int, **options: Any) -> None:
    """Replay one graph with new tokens, routing and counts."""
    fp8 = bool(options.get("fp8"))
    with case.open(group, **options) as layer:
        x, logits = case.inputs_of(group.rank, group.device)
        count = torch.tensor([16], dtype=torch.int32, device=group.device)
        out = torch.empty_like(x)
        for _ in range(2):
            layer(x, logits, num_tokens=count, out=out)
        settle(group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(x, logits, num_tokens=count, out=out)
        for seed in range(1, replays + 1):
            fresh = case.next(seed=seed).inputs_of(group.rank, group.device)
            x.copy_(fresh[0])
            logits.copy_(fresh[1])
            real = (16, 1, 0, 7, 13)[(seed - 1) % 5]
            count.fill_(real)
            out.fill_(float("nan"))
            poison(layer)
            graph.replay()
            settle(group)
            layer.check()
            if not fp8:
                case.check(out[:real], case.expected(layer, x[:real], logits[:real]))
            eager = layer(x, logits, num_tokens=count)
            settle(group)
            assert torch.equal(bits(eager[:real]), bits(out[:real]))


def all_graphs(group: weft.Group, mode: str) -> None:
    graphs = [
        *(("deepseek", gemm, each) for gemm in ("grouped", "torch") for each in OVERLAPS[:2]),
        ("gpt-oss", "grouped", "none"),
        ("llama", "grouped", "shared_expert"),
        ("deepseek", "grouped", "gemm_push"),
    ]
    if mode == "low_latency":
        graphs.append(("gpt-oss", "grouped", "gemm_push"))
    for name, gemm, overlap in graphs:
        case = Case(CONFIGS[name], tokens=(16, 16))
        replayed(group, case, 5, gemm=gemm, overlap=overlap, mode=mode)
    if mode == "low_latency":
        for overlap in ("shared_expert", "gemm_push"):
            replayed(group, Case(PAIRS, tokens=(16, 16)), 39, fp8=True, overlap=overlap, mode=mode)


@BOTH
@pytest.mark.parametrize(
    "body", [all_rules, all_wires, all_overlaps, all_exceptions, all_failures, all_graphs]
)
def test_on_gpus(ranks, body, mode):
    ranks(2, "cuda")(body, mode, timeout=300.0)
