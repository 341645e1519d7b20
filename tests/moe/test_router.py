# SPDX-License-Identifier: Apache-2.0
"""Routers against plain loops over Python numbers: any rule and logits."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.moe.test_route_kernel import NUMBERS
from weft.moe import MODELS, Routing, compute_topk_weights, route, router_logits
from weft.moe.routing.router import Score

SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "softmax-chosen": lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


def sort_best_first(values: list[float]) -> list[int]:
    """Return indices by value, NaN before all numbers, equal values in their order."""
    return sorted(
        range(len(values)),
        key=lambda i: (0, 0.0, i) if math.isnan(values[i]) else (1, -values[i], i),
    )


def in_float32(a: float, b: float) -> float:
    return float(torch.tensor(a) + torch.tensor(b))


def choose(routing: Routing, choice: list[float]) -> list[int]:
    """Return one token's experts, best first."""
    size = routing.num_experts // routing.groups
    goodness = []
    for group in range(routing.groups):
        members = choice[group * size : (group + 1) * size]
        first, *rest = (members[i] for i in sort_best_first(members)[: routing.group_best])
        goodness.append(in_float32(first, rest[0]) if rest else first)
    allowed = set(sort_best_first(goodness)[: routing.top_groups])
    limited = [v if e // size in allowed else -math.inf for e, v in enumerate(choice)]
    return sort_best_first(limited)[: routing.top_k]


def weigh(routing: Routing, logits: list[float], chosen: list[int]) -> list[float]:
    """Return one token's weights in double precision; logits are finite."""
    if routing.score == "sigmoid":
        raw = [1 / (1 + math.exp(-logits[e])) for e in chosen]
    elif routing.score == "sqrtsoftplus":
        raw = [math.sqrt(math.log1p(math.exp(logits[e]))) for e in chosen]
    else:
        among = chosen if routing.score == "softmax-chosen" else range(len(logits))
        top = max(logits[e] for e in among)
        whole = sum(math.exp(logits[e] - top) for e in among)
        raw = [math.exp(logits[e] - top) / whole for e in chosen]
    if routing.renormalise and routing.score != "softmax-chosen":
        total = sum(raw) + 1e-20
        raw = [r / total for r in raw]
    return [r * routing.scale for r in raw]


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    groups, size = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    top_groups = draw(st.integers(1, groups))
    score = draw(st.sampled_from(get_args(Score)))
    if score == "softmax-chosen":
        size, groups, top_groups = size * groups, 1, 1
    return Routing(
        num_experts=groups * size,
        top_k=draw(st.integers(1, top_groups * size)),
        score=score,
        renormalise=draw(st.booleans()),
        correction=score != "softmax-chosen" and draw(st.booleans()),
        groups=groups,
        top_groups=top_groups,
        group_best=draw(st.sampled_from([1, 2])),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )


ODD = [*NUMBERS, math.nan, -math.inf, 90.0, 100.0, -200.0]  # two saturate sigmoids


@st.composite
def cases(draw: st.DrawFn, numbers: list[float]) -> tuple[Routing, torch.Tensor, torch.Tensor]:
    routing = draw(routings())
    row = st.lists(
        st.sampled_from(numbers), min_size=routing.num_experts, max_size=routing.num_experts
    )
    logits = torch.tensor(draw(st.lists(row, max_size=4))).view(-1, routing.num_experts)
    return routing, logits, torch.tensor(draw(row)).nan_to_num(0.5, 8.0, -8.0)


def run(routing: Routing, logits: torch.Tensor, bias: torch.Tensor):
    return route(routing, logits, correction=bias if routing.correction else None)


@settings(max_examples=150, deadline=None)
@given(cases(ODD))
def test_any_rule_chooses_as_plain_loops_do(case):
    routing, logits, bias = case
    ids, weights = run(routing, logits, bias)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    scores = SCORES[routing.score](logits)
    choice = scores if routing.correction or routing.groups > 1 else logits
    choice = choice + bias if routing.correction else choice
    for row in range(len(logits)):
        assert ids[row].tolist() == choose(routing, choice[row].tolist())
        if bool(logits[row].isnan().any()):
            assert bool(weights[row].isnan().any())


@settings(max_examples=100, deadline=None)
@given(cases([*NUMBERS, -200.0]))
def test_any_rule_weighs_as_plain_loops_do(case):
    routing, logits, bias = case
    ids, weights = run(routing, logits, bias)
    for row in range(len(logits)):
        expected = weigh(routing, logits[row].tolist(), ids[row].tolist())
        assert weights[row].tolist() == pytest.approx(expected, rel=1e-5)
        assert len(set(ids[row].tolist())) == routing.top_k


@settings(max_examples=60, deadline=None)
@given(cases(ODD), st.integers(-1, 6), st.sampled_from([torch.bfloat16, torch.float16]))
def test_padding_and_narrow_logits_change_nothing_else(case, count, dtype):
    routing, logits, bias = case
    narrow = logits.to(dtype)
    correction = bias if routing.correction else None
    whole = run(routing, narrow.float(), bias)
    padded = route(
        routing, narrow, correction=correction, num_tokens=torch.tensor([count], dtype=torch.int32)
    )
    cut = min(max(count, 0), len(logits))
    assert torch.equal(padded.ids[:cut], whole.ids[:cut])
    assert torch.equal(padded.weights[:cut].isnan(), whole.weights[:cut].isnan())
    assert torch.equal(padded.weights[:cut].nan_to_num(), whole.weights[:cut].nan_to_num())
    assert bool((padded.ids[cut:] == -1).all())
    assert bool((padded.weights[cut:] == 0).all())


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "gpt-oss-120b", "qwen3-30b-a3b"])
def test_weigh_equals_route(name):
    routing = MODELS[name].routing
    seed = torch.Generator().manual_seed(3)
    logits = torch.randn(33, routing.num_experts, generator=seed) * 2
    bias = torch.zeros(routing.num_experts) if routing.correction else None
    ids, weights = route(routing, logits, correction=bias)
    for chosen in (ids, ids.long()):
        result = compute_topk_weights(routing, logits, chosen)
        assert torch.equal(result.ids, ids)
        assert result.ids.dtype == torch.int32
        assert torch.equal(result.weights, weights)
    some = ids.long()
    some[0], some[1, 0], some[2, 0], some[3, 0] = -1, routing.num_experts, 1 << 32, -7
    result = compute_topk_weights(routing, logits, some)
    assert result.ids[0].tolist() == [-1] * routing.top_k
    assert result.ids[1:4, 0].tolist() == [2**31 - 1] * 3
    assert bool((result.weights[0] == 0).all())
    assert bool((result.weights[1:4, 0] == 0).all())
    if routing.renormalise:  # the others share what it would have weighed
        torch.testing.assert_close(result.weights[1:4].sum(1), torch.full((3,), routing.scale))
    assert torch.equal(result.weights[4:], weights[4:])


def test_router_logits_are_in_float32():
    generator = torch.Generator().manual_seed(3)
    x, gate, bias = (torch.randn(n, generator=generator).bfloat16() for n in ((5, 16), (4, 16), 4))
    got = router_logits(x, gate, bias)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x.float() @ gate.float().T + bias.float())
