# SPDX-License-Identifier: Apache-2.0
"""Graphs of several sizes, replayed in any order between eager calls; CPU ranks rehearse them."""

import random
import time
from typing import Any

import pytest
import torch

import weft
from tests.operators import STEPPED, Step, capture_body
from tests.ranks import ANY

SIZES: dict[str, tuple[int, ...]] = {
    "alltoall": (1, 8, 33, 128),
    "lowlatency": (1, 7, 64),
    "allreduce": (1, 3, 8, 17, 32, 64, 129),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "alltoall": {"hidden": 1024, "top_k": 8, "num_experts": 256},
    "lowlatency": {"hidden": 1024, "top_k": 8, "num_experts": 64},
    "allreduce": {"hidden": 7168, "backends": None},
}
# Rounds on GPUs, and what differs from the kinds themselves.
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "pull": ("pull", 100_000, {}),
    "push": ("push", 20_000, {}),
    "fp8": ("fp8", 40_000, {}),
    "send": ("send", 20_000, {}),
    "low latency": ("receiver", 100_000, {}),
    "low latency, sender": ("sender", 20_000, {}),
    "all-reduce": ("twoshot", 100_000, {}),
    "all-reduce at the receiver": ("twoshot", 20_000, {"epilogue_at": "receiver"}),
    "all-reduce without programmatic launch": ("twoshot", 20_000, {"programmatic_launch": False}),
}


def count(kind: str) -> int:
    return max(2, min(8, torch.cuda.device_count())) if kind == "cuda" else 2


def steps_of(
    group: weft.Group, name: str, sizes: tuple[int, ...], more: dict[str, Any]
) -> list[Step]:
    kind = STEPPED[name]
    op = kind.open(group, max_tokens=max(sizes) + 31, timeout=30.0, **OPTIONS[kind.name] | more)
    backends = op.operator.backends if kind.name == "allreduce" else ("auto",)
    return [
        Step(op, tokens, calls=5 if tokens < 20 else 2, backend=backend)
        for tokens in sizes
        for backend in backends
        if backend != "oneshot" or tokens <= op.operator.config.direct
    ]


def replay(group: weft.Group, run: str) -> None:
    name, rounds, more = RUNS[run]
    rounds = rounds if group.device.type == "cuda" else 30
    steps = steps_of(group, name, SIZES[STEPPED[name].name], more)
    op, order, done, turn = steps[0].op, random.Random(5), 0, 0
    with op:
        # The first call of an all-reduce's size may be a captured one.
        warm_up = op.kind.name != "allreduce"
        plays = [capture_body(group, step, warm_up=warm_up) for step in steps]
        while done < rounds:
            which, turn = order.randrange(len(steps)), turn + 1
            if turn % 41 == 0:
                steps[which]()  # an eager call between replays
            plays[which]()
            done += steps[which].calls
            if turn % 500 == 0:
                steps[which].check()
        for step in steps:
            step.check()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("run", RUNS)
def test_graphs_and_eager_calls_share_memory(ranks, kind, run):
    ranks(count(kind), kind)(replay, run, timeout=580.0)


def straggle(group: weft.Group, name: str) -> None:
    steps = steps_of(group, name, (1, 8, 32), {})
    cuda = group.device.type == "cuda"
    with steps[0].op:
        for call in range(300 if cuda else 20):
            if call % group.size == group.rank:
                late = 1 + call % 5
                torch.cuda._sleep(200_000 * late) if cuda else time.sleep(1e-4 * late)
            steps[call % len(steps)]()
        for step in steps:
            step.check()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("threads", "pull"),
        *(
            pytest.param("cuda", name, marks=pytest.mark.gpu)
            for name in ("pull", "receiver", "sender", "twoshot")
        ),
    ],
)
def test_late_ranks_change_no_bit(ranks, kind, name):
    ranks(count(kind), kind)(straggle, name)
