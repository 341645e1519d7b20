# SPDX-License-Identifier: Apache-2.0
"""The routing kernel on GPUs against torch's operations there: ids bit for bit."""

from __future__ import annotations

import random
from typing import get_args

import pytest
import torch

from tests.moe.routed import RULES, compare, hold_to_torch
from weft.errors import OutOfOrder
from weft.moe import Routed, Routing, route
from weft.moe.router import Score, route_in_torch

pytestmark = pytest.mark.gpu


def run(
    routing: Routing,
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
) -> Routed:
    return route(routing, logits, correction=correction, num_tokens=num_tokens)


@pytest.mark.parametrize("name", RULES)
def test_it_chooses_and_weighs_as_torch(name):
    hold_to_torch(run, RULES[name], 1003, "cuda")


def any_rule(choice: random.Random) -> Routing:
    score: Score = choice.choice(get_args(Score))
    whole = score == "softmax-chosen"
    groups = 1 if whole else choice.choice([1, 1, 2, 3, 4, 8, 16, 33])
    size = choice.randint(2, 1024 // groups)
    top_groups = choice.randint(1, groups)
    return Routing(
        num_experts=groups * size,
        top_k=choice.randint(1, min(32, top_groups * size)),
        score=score,
        renormalise=choice.random() < 0.5,
        correction=not whole and choice.random() < 0.5,
        groups=groups,
        top_groups=top_groups,
        group_best=choice.choice([1, 2]),
        scale=choice.choice([1.0, 2.5]),
    )


@pytest.mark.parametrize("seed", range(24))
def test_any_rule(seed):
    choice = random.Random(seed)
    hold_to_torch(run, any_rule(choice), choice.choice([1, 5, 130]), "cuda", seed)


def test_no_tokens():
    ids, weights = route(Routing(8, 2), torch.zeros(0, 8, device="cuda"))
    assert ids.shape == weights.shape == (0, 2)


def test_more_experts_than_a_warp_holds():
    logits = torch.randn(40, 1100, generator=torch.Generator().manual_seed(1)).cuda()
    routing = Routing(1100, 3)
    wanted = route_in_torch(routing, logits)
    compare(route(routing, logits), wanted, exact=True, what="1100 experts")


def test_a_replay_routes_new_logits():
    routing = RULES["deepseek-v3"]
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randn(7, 64, 256, generator=generator).cuda()
    correction = (torch.randn(256, generator=generator) * 0.1).cuda()
    logits = torch.zeros(64, 256, device="cuda")
    route(routing, logits, correction=correction)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The kernel may start before these have ended, and must wait for them.
        doubled = logits * 2.0
        for _ in range(8):
            doubled = doubled * 1.0
        got = route(routing, doubled, correction=correction)
        copies = got.ids.clone(), got.weights.clone()
    for fresh in drawn:
        logits.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        wanted = route_in_torch(routing, fresh * 2.0, correction)
        compare(Routed(*copies), wanted, exact=True, what="replay")


def test_a_first_call_is_not_captured():
    routing, logits = Routing(77, 3, scale=1.25), torch.zeros(4, 77, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits.mul_(1.0)  # an empty graph is a warning
        with pytest.raises(OutOfOrder, match="call it once before capturing"):
            route(routing, logits)
    route(routing, logits[:0])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        route(routing, logits)


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_logits_of_another_device():
    routing = RULES["qwen3-30b-a3b"]
    logits = torch.randn(9, 128, generator=torch.Generator().manual_seed(3)).to("cuda:1")
    assert torch.cuda.current_device() == 0
    wanted = route_in_torch(routing, logits)
    compare(route(routing, logits), wanted, exact=True, what="cuda:1")
    assert torch.cuda.current_device() == 0
