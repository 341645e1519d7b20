# SPDX-License-Identifier: Apache-2.0
"""Routers against plain loops: any rule and logits, and the rules of models by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.moe.oracle import choose, weigh
from tests.moe.test_route_kernel import NUMBERS
from weft.errors import InvalidArgument
from weft.moe import MODELS, Routing, compute_topk_weights, route, router_logits
from weft.moe.routing.router import Score

SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "softmax-chosen": lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


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


ODD = [*NUMBERS, math.nan, -math.inf, 100.0, -200.0]


@st.composite
def cases(draw: st.DrawFn, numbers: list[float]) -> tuple[Routing, torch.Tensor, torch.Tensor]:
    routing = draw(routings())
    row = st.lists(
        st.sampled_from(numbers), min_size=routing.num_experts, max_size=routing.num_experts
    )
    logits = draw(st.lists(row, min_size=1, max_size=4))
    return routing, torch.tensor(logits), torch.tensor(draw(row)).nan_to_num(0.5, 8.0, -8.0)


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
@given(cases(NUMBERS))
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


def random_logits(experts: int, tokens: int = 33) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts)) * 2


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "gpt-oss-120b", "qwen3-30b-a3b"])
def test_weigh_equals_route(name):
    routing = MODELS[name].routing
    logits = random_logits(routing.num_experts)
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


def test_rules_at_their_limits():
    logits = torch.tensor([[90.0, 100.0, 95.0, -1.0]])
    routing = Routing(num_experts=4, top_k=2, score="sigmoid")
    assert route(routing, logits).ids.tolist() == [[1, 2]], "saturated sigmoids do not tie"
    assert route(routing, torch.full((1, 4), -200.0)).weights.tolist() == [[0.0, 0.0]]
    deepseek, bias = MODELS["deepseek-v3"].routing, torch.zeros(256)
    assert route(deepseek, torch.zeros(0, 256), correction=bias).ids.shape == (0, 8)
    assert route(deepseek, torch.zeros(2, 256), correction=bias).ids.tolist() == [[*range(8)]] * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": 3}, "groups is 3 for 8 experts"),
        ({"groups": 2, "top_groups": 3}, r"top_groups is 3; it must be an integer in 1\.\.2"),
        ({"groups": 4, "top_k": 3}, r"top_k is 3; it must be in 1\.\.2, the experts of 1 of 4"),
        ({"groups": 8, "top_groups": 8}, r"a group has 1 expert"),
        ({"score": "softmax-chosen", "correction": True}, "without correction and groups"),
        ({"score": "softmax-chosen", "groups": 2, "top_groups": 2}, "groups 2"),
        ({"weigh": "input"}, "weigh 'input' with top_k 2"),
    ],
)
def test_invalid_rules_are_refused(changes, words):
    with pytest.raises(InvalidArgument, match=words):
        Routing(**{"num_experts": 8, "top_k": 2, **changes})


def test_invalid_arguments_of_route_and_weigh_are_refused():
    plain, biased = Routing(8, 2), Routing(8, 2, score="sigmoid", correction=True)
    good, bias = torch.zeros(3, 8), torch.zeros(8)
    refused: list[tuple[Routing, dict[str, Any], str]] = [
        (biased, {}, "correction is None, but this routing has correction=True"),
        (plain, {"correction": bias}, "correction=False: leave it out"),
        (biased, {"correction": bias[1:]}, "correction has shape"),
    ]
    for routing, options, words in refused:
        with pytest.raises(InvalidArgument, match=words):
            route(routing, good, **options)
    with pytest.raises(InvalidArgument, match=r"topk_ids has shape \[3, 1\]"):
        compute_topk_weights(plain, good, torch.zeros(3, 1).int())


def test_router_logits_are_in_float32():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 16, generator=generator).bfloat16()
    gate = torch.randn(4, 16, generator=generator).bfloat16()
    bias = torch.randn(4, generator=generator).bfloat16()
    got = router_logits(x, gate, bias)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x.float() @ gate.float().T + bias.float())
