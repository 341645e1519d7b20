# SPDX-License-Identifier: Apache-2.0
"""Late ranks in every mode: 0 to 200 us before dispatch, before combine, and between.

A row that a fast peer overwrote, or that a slow one had not yet written, is counted. On GPUs the
rounds are CUDA graphs and the delays are kernels in them.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from tests.rounds import Round, bits

MODES: dict[str, dict[str, Any]] = {
    "pull": {},
    "push": {"combine": "push"},
    "fp8": {"combine_dtype": "fp8", "quantize": "fp8"},
    "mxfp8": {"quantize": "mxfp8"},
    "split_phase": {"split_phase": True},
    "halves-fp8": {"split_phase": True, "combine_dtype": "fp8", "quantize": "fp8"},
    "few-sms": {"num_sms": 16},
    "mapped": {"expert_map": [7 * e % 64 // 8 for e in range(64)]},
    "stats": {"stats": 4},
    "serialised": {"programmatic_launch": False},
}
MOST_US = 200


def delay(device: torch.device, microseconds: int) -> None:
    if device.type == "cpu":
        time.sleep(microseconds * 1e-6)
    elif microseconds:
        torch.cuda._sleep(2000 * microseconds)  # cycles, at about 2 GHz


class Step:
    """One round with its inputs, delays and expected result; counts wrong bytes."""

    def __init__(self, a2a: weft.AllToAll, case: Round, options: dict[str, Any]) -> None:
        self.a2a, self.options, self.device = a2a, options, a2a.group.device
        self.x, self.ids, self.weights, _ = case.inputs_of(a2a.rank, self.device)
        self.case, self.stats = case, None
        if "stats" in options:
            self.stats = torch.arange(4, dtype=torch.int32, device=self.device) + a2a.rank
        kind = options.get("quantize")
        x = self.x
        if kind:
            x = weft.reference.dequantize(*weft.reference.quantize(x.cpu(), kind)).to(x)
        inputs = x.cpu(), self.ids.cpu(), self.weights.cpu(), a2a.placement
        wire = options.get("combine_dtype")
        wanted = weft.reference.identity_round_trip(*inputs, ranks=a2a.ep_size, combine_dtype=wire)
        self.wanted = bits(wanted).to(self.device)
        # One rank is late, and another one later in the round.
        late = random.Random(case.seed)
        self.pauses = [late.randrange(MOST_US) for _ in range(3)]
        self.late = [late.randrange(a2a.ep_size) for _ in self.pauses]

    def pause(self, point: int) -> None:
        if self.late[point] == self.a2a.rank:
            delay(self.device, self.pauses[point])

    def __call__(self, wrong: torch.Tensor) -> None:
        a2a, split_phase = self.a2a, self.options.get("split_phase", False)
        self.pause(0)
        if split_phase:
            a2a.dispatch_send(self.x, self.ids, self.weights)
            self.pause(1)
            received = a2a.dispatch_recv()
        else:
            received = a2a.dispatch(self.x, self.ids, self.weights, stats=self.stats)
            self.pause(1)
        a2a.output().copy_(self.experts(received))
        if split_phase:
            a2a.combine_send()
            self.pause(2)
            out = a2a.combine_recv()
        else:
            self.pause(2)
            out = a2a.combine()
        wrong += (bits(out) != self.wanted).sum()
        if received.stats is not None:
            ranks = torch.arange(a2a.ep_size, dtype=torch.int32, device=self.device)[:, None]
            numbers = torch.arange(4, dtype=torch.int32, device=self.device)
            wrong += (received.stats != ranks + numbers).sum()

    def experts(self, received: weft.Received) -> torch.Tensor:
        """Return the sum of the weights times the received row, or NaN in unused slots."""
        planes = received.payloads
        x = planes[0]
        if self.options.get("quantize"):
            x = weft.reference.dequantize(planes[0], planes[1]).to(self.case.dtype)
        seen = weft.Received((x,), received.ids, received.weights, received.counts, received.stats)
        return weft.reference.identity_experts(seen, self.case.dtype)


def replayed(step: Step, wrong: torch.Tensor) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(wrong)
    return graph.replay


def soak(group: weft.Group, options: dict[str, Any], rounds: int) -> int:
    """Play `rounds` rounds in an order that all ranks know; return the wrong bytes."""
    cuda = group.device.type == "cuda"
    wrong = torch.zeros((), dtype=torch.int64, device=group.device)
    base = Round((), hidden=1024 if cuda else 128, experts=64, top_k=6)
    cases = [
        base.next(
            tokens=tuple((size + r) % (size + 1) if seed else size for r in range(group.size)),
            seed=10 * size + seed,
            router="random" if seed % 2 else "holes",
        )
        for size in (1, 9, 64)
        for seed in range(3)
    ]
    a2a = weft.AllToAll(group, **cases[0].sizes(64), timeout=600.0, **options)
    with a2a:
        steps = [Step(a2a, case, options) for case in cases]
        plays: list[Callable[[], None]] = [functools.partial(step, wrong) for step in steps]
        for play in plays:
            play()
        if cuda:
            torch.cuda.synchronize()
            graphs = [replayed(step, wrong) for step in steps]
            plays = [*graphs, *plays]  # eager rounds between replays
        order = random.Random(11)
        for done in range(rounds):
            plays[order.randrange(len(plays))]()
            if done % 500 == 0:
                a2a.check()
        if cuda:
            torch.cuda.synchronize()
        a2a.check()
        return int(wrong)


def soak_in_turn(group: weft.Group, modes: list[str], rounds: int) -> dict[str, int]:
    wrong = {}
    for mode in modes:
        options = dict(MODES[mode])
        if "expert_map" in options:
            options["expert_map"] = [rank % group.size for rank in options["expert_map"]]
        wrong[mode] = soak(group, options, rounds)
    return wrong


def test_late_ranks_change_nothing(ranks):
    modes = [mode for mode, options in MODES.items() if "num_sms" not in options]
    assert ranks(2, "cpu")(soak_in_turn, modes, 15) == [dict.fromkeys(modes, 0)] * 2


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_late_gpus_change_nothing(ranks):
    gpus = torch.cuda.device_count()
    count, rounds = min(8, max(2, gpus)), 5000 if gpus > 1 else 100
    reported = ranks(count, "cuda")(soak_in_turn, list(MODES), rounds, timeout=280.0)
    assert reported == [dict.fromkeys(MODES, 0)] * count
