# SPDX-License-Identifier: Apache-2.0
"""Late ranks in every mode: 0 to 200 us before dispatch, before combine, and between.

A row that a fast peer overwrote, or that a slow one had not yet written, is counted. On GPUs the
rounds are CUDA graphs and the delays are kernels in them.
"""

import functools
import random
import time
from typing import Any

import pytest
import torch

import weft
from tests.operators import capture_body
from tests.rounds import Round, bits, expert_answers, synchronize

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


class Step:
    """One round with its inputs, delays and expected result; counts wrong bytes."""

    def __init__(self, a2a: weft.AllToAll, case: Round, options: dict[str, Any]) -> None:
        self.a2a, self.options, self.device = a2a, options, a2a.group.device
        self.x, self.ids, self.weights, _ = case.inputs_of(a2a.rank, self.device)
        numbers = torch.arange(a2a.ep_size)[:, None] + torch.arange(4)
        self.numbers = numbers.int().to(self.device)
        self.stats = self.numbers[a2a.rank] if "stats" in options else None
        x, kind = self.x.cpu(), options.get("quantize")
        if kind:
            x = weft.reference.dequantize(*weft.reference.quantize(x, kind)).to(x)
        inputs, wire = (self.ids.cpu(), self.weights.cpu()), options.get("combine_dtype")
        wanted = weft.reference.identity_round_trip(
            x, *inputs, a2a.placement, ranks=a2a.ep_size, combine_dtype=wire
        )
        self.wanted = bits(wanted).to(self.device)
        # One rank is late, and another one later in the round.
        late = random.Random(case.seed)
        self.pauses = [(late.randrange(a2a.ep_size), late.randrange(MOST_US)) for _ in range(3)]

    def pause(self, point: int) -> None:
        rank, microseconds = self.pauses[point]
        if rank == self.a2a.rank and self.device.type == "cpu":
            time.sleep(microseconds * 1e-6)
        elif rank == self.a2a.rank and microseconds:
            torch.cuda._sleep(2000 * microseconds)  # cycles, at about 2 GHz

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
        a2a.output().copy_(expert_answers(received, self.options.get("quantize"), self.x.dtype))
        if split_phase:
            a2a.combine_send()
            self.pause(2)
            out = a2a.combine_recv()
        else:
            self.pause(2)
            out = a2a.combine()
        wrong += (bits(out) != self.wanted).sum()
        if received.stats is not None:
            wrong += (received.stats != self.numbers).sum()


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
    with weft.AllToAll(group, **base.sizes(64), timeout=600.0, **options) as a2a:
        steps = [functools.partial(Step(a2a, case, options), wrong) for case in cases]
        plays = [capture_body(group, step) for step in steps]
        plays += steps if cuda else ()  # eager rounds between replays
        order = random.Random(11)
        for done in range(rounds):
            plays[order.randrange(len(plays))]()
            if done % 500 == 0:
                a2a.check()
        synchronize(group.device)
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
