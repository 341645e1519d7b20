# SPDX-License-Identifier: Apache-2.0
"""Replayed low-latency rounds: 100,000 of them with other rows and routing each time, every sum
compared on the device; late ranks; profiled kernels beside plain ones. By hand, up to 8 GPUs."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.lowlatency_rounds import Mode, play
from tests.rounds import Round
from weft.bench.harness import CALLS, capture, rounds_of
from weft.lowlatency.operator import LowLatencyAllToAll

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]
HIDDEN, TOP_K, EXPERTS, ROUNDS = 1024, 8, 64, 4


def count() -> int:
    return min(torch.cuda.device_count(), 8)


class Looped:
    """Rounds of one size that draw their own rows and ids, and count wrong results."""

    def __init__(self, a2a: LowLatencyAllToAll, tokens: int) -> None:
        device = a2a.group.device
        self.a2a, self.tokens = a2a, tokens
        self.x = torch.zeros((tokens, HIDDEN), dtype=torch.bfloat16, device=device)
        self.ids = torch.zeros((tokens, TOP_K), dtype=torch.int64, device=device)
        self.weights = torch.zeros((tokens, TOP_K), device=device)
        self.out = torch.zeros_like(self.x)
        shape = a2a._slots[0].x.shape
        self.y = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def rounds(self) -> None:
        for _ in range(ROUNDS):
            self.x.copy_(torch.randn_like(self.x, dtype=torch.float32))
            scores = torch.rand((self.tokens, EXPERTS), device=self.x.device)
            self.ids.copy_(scores.topk(TOP_K, dim=1).indices)
            self.weights.copy_(torch.rand_like(self.weights))
            got = self.a2a.dispatch(self.x, self.ids, self.weights)
            self.y.copy_(got.x)
            self.a2a.combine(self.y, self.ids, self.weights, got.handle, self.out)
            total = torch.zeros_like(self.x, dtype=torch.float32)
            rows = self.x.float()
            for k in range(TOP_K):
                total = total + self.weights[:, k : k + 1] * rows
            self.wrong += (self.out.view(torch.int16) != total.bfloat16().view(torch.int16)).sum()


def replayed(group: weft.Group, replays: int) -> tuple[int, int]:
    a2a = LowLatencyAllToAll(
        group,
        max_tokens=64,
        top_k=TOP_K,
        num_experts=EXPERTS,
        hidden=HIDDEN,
        timeout=20.0,
        quantize=None,
    )
    with a2a:
        torch.manual_seed(group.rank)
        sizes = [Looped(a2a, tokens) for tokens in (64, 1, 7)]
        for looped in sizes:
            looped.rounds()
        torch.cuda.synchronize()
        graphs = [capture(looped.rounds) for looped in sizes]
        group.barrier()
        for n in range(replays):
            graphs[n % len(graphs)].replay()
            if n % 1000 == 0:
                sizes[0].rounds()
        torch.cuda.synchronize()
        a2a.check()
        return sum(int(looped.wrong) for looped in sizes), replays * ROUNDS


def test_a_hundred_thousand_replayed_rounds_are_right(ranks):
    for wrong, rounds in ranks(count(), "cuda")(replayed, 25_000, timeout=550.0):
        assert rounds == 100_000
        assert wrong == 0


def late(group: weft.Group, rounds: int) -> None:
    """Ranks come late on the device, by up to 0.2 ms."""
    case = Round((32,) * group.size, hidden=1024, top_k=8, experts=64)
    generator = torch.Generator().manual_seed(group.rank)
    for mode in (
        Mode(),
        Mode(reduce="sender", combine_dtype="fp8"),
        Mode(more={"split_phase": True}),
    ):
        with mode.make(group, case, 32) as a2a:
            for seed in range(rounds):
                torch.cuda._sleep(int(torch.randint(0, 400_000, (), generator=generator)))
                play(a2a, mode, case.next(seed=seed), poison=seed % 4 == 0)


def test_late_ranks_change_no_byte(ranks):
    ranks(count(), "cuda")(late, 60, timeout=550.0)


def pair_us(group: weft.Group, *, profile: bool) -> float:
    case = Round((128,) * group.size, hidden=7168, top_k=8, experts=256, router="perfect")
    mode = Mode(more={"profile": profile})
    with mode.make(group, case, 128) as a2a:
        x, ids, weights, _ = case.of(group.rank, group.device)
        y = torch.zeros_like(a2a._slots[0].x, dtype=x.dtype)
        out = torch.empty_like(x)

        def pairs() -> None:
            for _ in range(CALLS):
                got = a2a.dispatch(x, ids, weights)
                a2a.combine(y, ids, weights, got.handle, out)

        pairs()
        torch.cuda.synchronize()
        times = sorted(rounds_of(group, capture(pairs).replay, 15))
        return float(max(group.all_gather(times[len(times) // 2])))


def profiled_beside_plain(group: weft.Group) -> tuple[float, float]:
    times = [(pair_us(group, profile=True), pair_us(group, profile=False)) for _ in range(3)]
    return min(profiled for profiled, _ in times), min(plain for _, plain in times)


def test_profiling_costs_less_than_three_percent(ranks):
    """Or less than a microsecond: of few ranks' pairs, that is more."""
    for profiled, plain in ranks(count(), "cuda")(profiled_beside_plain, timeout=300.0):
        assert profiled < max(1.03 * plain, plain + 1.0)
