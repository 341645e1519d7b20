# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of several batch sizes, replayed between eager calls; routing changes each time."""

from __future__ import annotations

import random

import pytest
import torch

import weft
from tests.rounds import combining

pytestmark = pytest.mark.gpu

SIZES = (1, 8, 33, 128)
TOP_K, EXPERTS, HIDDEN = 8, 256, 1024


class Step:
    """One round of a fixed batch size: draws routing and counts wrong words, all on the device."""

    def __init__(self, a2a: weft.AllToAll, tokens: int, wrong: torch.Tensor) -> None:
        d, rank = a2a.group.device, a2a.rank
        generator = torch.Generator(device=d).manual_seed(100 * tokens + rank)
        self.a2a, self.wrong, self.ranks = a2a, wrong, a2a.ep_size
        self.x = torch.randn((tokens, HIDDEN), generator=generator, device=d).bfloat16()
        scores = torch.rand((tokens, EXPERTS), generator=generator, device=d)
        self.base = scores.topk(TOP_K).indices
        self.turn = torch.zeros(1, dtype=torch.int64, device=d)

    def __call__(self) -> None:
        self.turn += 37
        ids = (self.base + self.turn) % EXPERTS
        x = (self.x.view(torch.int16) ^ (self.turn % 128).short()).view(torch.bfloat16)
        received = self.a2a.dispatch(x, ids)
        count = (received.ids >= 0).sum(dim=2, keepdim=True)
        rows = torch.where(count > 0, received.x.float() * count, float("nan"))
        self.a2a.output().copy_(rows)
        out = self.a2a.combine()
        owner = ids // (EXPERTS // self.ranks)
        total = torch.zeros(x.shape, device=x.device)
        for rank in range(self.ranks):
            copies = (owner == rank).sum(dim=1, keepdim=True)
            row = (x.float() * copies).bfloat16()
            if self.a2a.config.shape.combine == "push_fp8":
                row = weft.reference.dequantize(*weft.reference.quantize(row, "fp8"))
            total = total + torch.where(copies > 0, row.float(), 0.0)
        self.wrong += (out != total.bfloat16()).sum()


def replay(group: weft.Group, replays: int, way: str) -> int:
    wrong = torch.zeros((), dtype=torch.int64, device=group.device)
    a2a = weft.AllToAll(
        group,
        max_tokens=128,
        top_k=TOP_K,
        num_experts=EXPERTS,
        hidden=HIDDEN,
        timeout=30.0,
        **combining(way),
    )
    with a2a:
        steps = [Step(a2a, tokens, wrong) for tokens in SIZES]
        for step in steps:
            step()
        torch.cuda.synchronize()
        graphs = []
        for step in steps:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
                if step.x.shape[0] == 8:  # one graph has an even number of rounds
                    step()
            graphs.append(graph)
        order = random.Random(5)
        for done in range(replays):
            which = order.randrange(len(graphs))
            if done % 97 == 0:
                steps[which]()  # an eager call between replays
            graphs[which].replay()
            if done % 2000 == 0:
                torch.cuda.synchronize()
                a2a.check()
        torch.cuda.synchronize()
        a2a.check()
        return int(wrong)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("replays", "way"), [(100_000, "pull"), (40_000, "fp8")])
def test_graphs_and_eager_calls_share_a_workspace(ranks, replays, way):
    count = min(8, torch.cuda.device_count())
    assert ranks(count, "cuda")(replay, replays, way, timeout=580.0) == [0] * count
