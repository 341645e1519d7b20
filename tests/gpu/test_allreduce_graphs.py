# SPDX-License-Identifier: Apache-2.0
"""Fused all-reduces in CUDA graphs of several sizes and backends, replayed between eager calls."""

from __future__ import annotations

import random

import pytest
import torch

import weft

pytestmark = pytest.mark.gpu

SIZES = (1, 3, 8, 17, 32, 64, 129)
HIDDEN = 7168


class Step:
    """One call of a fixed size: makes rows and counts wrong words, all on the device."""

    def __init__(self, ar: weft.AllReduce, tokens: int, backend: str, wrong: torch.Tensor) -> None:
        d, ranks = ar.group.device, ar.group.size
        generator = torch.Generator(device=d).manual_seed(tokens)
        self.ar, self.backend, self.wrong, self.tokens = ar, backend, wrong, tokens
        base = torch.randn((ranks, tokens, HIDDEN), generator=generator, device=d)
        self.base = base.bfloat16().view(torch.int16)
        self.residual = torch.randn((tokens, HIDDEN), generator=generator, device=d).bfloat16()
        self.weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=d)
        self.turn = torch.zeros(1, dtype=torch.int64, device=d)

    def __call__(self) -> None:
        self.turn += 37
        xs = (self.base ^ (self.turn % 128).short()).view(torch.bfloat16)
        got = self.ar.fused(
            xs[self.ar.group.rank].contiguous(),
            residual=self.residual,
            weight=self.weight,
            out=True,
            backend=self.backend,
        )
        assert got.out is not None
        assert got.residual is not None
        assert got.norm is not None
        total = xs[0].float()
        for x in xs[1:]:
            total = total + x.float()
        out = total.bfloat16()
        rows = (out.float() + self.residual.float()).bfloat16()
        rms = rows.float().square().mean(dim=1, keepdim=True).sqrt()
        off = (got.norm.float() - rows.float() / rms).abs() > 0.02 * (1 + got.norm.float().abs())
        self.wrong += (got.out != out).sum() + (got.residual != rows).sum() + off.sum()


def replay(group: weft.Group, calls: int, programmatic: bool) -> int:
    wrong = torch.zeros((), dtype=torch.int64, device=group.device)
    with weft.AllReduce(
        group, max_tokens=160, hidden=HIDDEN, timeout=30.0, programmatic_launch=programmatic
    ) as ar:
        steps = [
            Step(ar, tokens, backend, wrong)
            for tokens in SIZES
            for backend in ar.backends
            if backend != "oneshot" or tokens <= ar.config.direct
        ]
        graphs = []
        for step in steps:  # the first call of a size may be a captured one
            graph, each = torch.cuda.CUDAGraph(), 5 if step.tokens < 20 else 2
            with torch.cuda.graph(graph):
                for _ in range(each):
                    step()
            graphs.append((graph, each))
        order, done, turn = random.Random(5), 0, 0
        while done < calls:
            which, turn = order.randrange(len(steps)), turn + 1
            if turn % 41 == 0:
                steps[which]()  # an eager call between replays
            graphs[which][0].replay()
            done += graphs[which][1]
            if turn % 500 == 0:
                torch.cuda.synchronize()
                ar.check()
        torch.cuda.synchronize()
        ar.check()
        return int(wrong)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("calls", "programmatic"), [(100_000, True), (20_000, False)])
def test_graphs_and_eager_calls_share_the_slots(ranks, calls, programmatic):
    count = max(2, min(8, torch.cuda.device_count()))
    found = ranks(count, "cuda")(replay, calls, programmatic, timeout=580.0)
    assert found == [0] * count


def straggled(group: weft.Group) -> int:
    wrong = torch.zeros((), dtype=torch.int64, device=group.device)
    with weft.AllReduce(group, max_tokens=64, hidden=HIDDEN, timeout=30.0) as ar:
        steps = [Step(ar, tokens, name, wrong) for tokens in (1, 8, 32) for name in ar.backends]
        for call in range(300):
            if call % group.size == group.rank:
                torch.cuda._sleep(200_000 * (1 + call % 5))  # cycles: 0.1 to 0.5 ms
            steps[call % len(steps)]()
        torch.cuda.synchronize()
        ar.check()
    return int(wrong)


def test_ranks_that_come_late_change_nothing(ranks):
    count = max(2, min(8, torch.cuda.device_count()))
    assert ranks(count, "cuda")(straggled) == [0] * count
