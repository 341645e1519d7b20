# SPDX-License-Identifier: Apache-2.0
"""Any routing whatever: what arrives, and what returns, is what the reference says."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import weft
from tests.rounds import bits
from weft import reference
from weft.errors import BadExpertId, TokenOverflow

HIDDEN = 8
Ids = list[list[int]]  # of one rank: [tokens][top_k]


@dataclass(frozen=True)
class Exchange:
    """Sizes, and for each round the ids of every rank; `counts` limits them on the device."""

    ranks: int
    top_k: int
    experts: int
    max_tokens: int
    dtype: torch.dtype
    owners: list[int] | None
    rounds: list[list[Ids]]
    counts: list[list[int | None]]
    weighted: bool
    seed: int


# (ranks, experts, top_k, max_tokens, dtype, owners): every value beside every other at least once.
# Each is compiled once, and then every example is a matter of milliseconds.
SIZES: list[tuple[int, int, int, int, torch.dtype, list[int] | None]] = [
    (1, 1, 1, 1, torch.bfloat16, None),
    (1, 7, 6, 3, torch.float32, [0] * 7),
    (2, 2, 1, 5, torch.float16, [1, 1]),
    (2, 5, 3, 2, torch.bfloat16, None),
    (2, 9, 6, 4, torch.float32, [1, 0, 0, 1, 1, 0, 1, 1, 1]),
    (3, 4, 2, 3, torch.float16, [2, 2, 0, 2]),
    (3, 8, 4, 5, torch.bfloat16, None),
    (4, 3, 3, 1, torch.float32, [3, 0, 0]),
    (4, 9, 2, 5, torch.bfloat16, [0, 3, 3, 3, 1, 3, 0, 2, 3]),
    (5, 9, 5, 4, torch.float16, None),
    (5, 6, 6, 2, torch.bfloat16, [4, 4, 1, 1, 0, 4]),
]


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    ranks, experts, top_k, max_tokens, dtype, owners = draw(st.sampled_from(SIZES))
    # Mostly sound ids; -1 is no expert, the others name none and are dropped.
    any_id = st.sampled_from([*range(experts), *range(experts), -1, -2, experts, 2**31 - 1])
    row = st.lists(any_id, min_size=top_k, max_size=top_k)
    ids = st.lists(row, max_size=max_tokens)
    count = st.none() | st.integers(-1, max_tokens + 1)
    rounds = draw(st.integers(1, 3))

    def of_all_ranks(of_one: st.SearchStrategy) -> st.SearchStrategy:
        each = st.lists(of_one, min_size=ranks, max_size=ranks)
        return st.lists(each, min_size=rounds, max_size=rounds)

    return Exchange(
        ranks,
        top_k,
        experts,
        max_tokens,
        dtype,
        owners,
        draw(of_all_ranks(ids)),
        draw(of_all_ranks(count)),
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


def tensors(case: Exchange, turn: int, rank: int) -> tuple[torch.Tensor, ...]:
    """(x, ids, weights, add) of one rank in one round."""
    generator = torch.Generator().manual_seed(case.seed + 100 * turn + 1000 * rank)
    ids = torch.tensor(case.rounds[turn][rank], dtype=torch.int32).view(-1, case.top_k)
    x, add = torch.randn((2, len(ids), HIDDEN), generator=generator).to(case.dtype)
    return x, ids, torch.rand(ids.shape, generator=generator), add


def used(case: Exchange, turn: int, rank: int) -> int:
    """Tokens that count: the device's number, clamped to the rows there are."""
    rows, count = len(case.rounds[turn][rank]), case.counts[turn][rank]
    return rows if count is None else min(max(count, 0), rows)


def refusals(case: Exchange, turn: int, rank: int) -> set[type[Exception]]:
    """What `check` may raise after a round; nothing means that it must not raise."""
    wrong: set[type[Exception]] = set()
    rows = case.rounds[turn][rank]
    count = case.counts[turn][rank]
    if count is not None and not 0 <= count <= len(rows):
        wrong.add(TokenOverflow)
    for row in rows[: used(case, turn, rank)]:
        known = [i for i in row if 0 <= i < case.experts]
        if len(known) != len(set(known)) or any(i < -1 or i >= case.experts for i in row):
            wrong.add(BadExpertId)
    return wrong


def follow(group: weft.Group, case: Exchange) -> None:
    a2a = weft.AllToAll(
        group,
        max_tokens=case.max_tokens,
        top_k=case.top_k,
        num_experts=case.experts,
        hidden=HIDDEN,
        dtype=case.dtype,
        expert_map=case.owners,
        timeout=600.0,
    )
    with a2a:
        try:
            for turn in range(len(case.rounds)):
                follow_round(a2a, case, turn)
        except BaseException:
            a2a.abort()  # the others need not wait for their deadline
            raise


def follow_round(a2a: weft.AllToAll, case: Exchange, turn: int) -> None:
    rank, ranks = a2a.rank, range(a2a.ep_size)
    counted = []  # every rank's (x, ids, weights), only the rows that count
    for r in ranks:
        n = used(case, turn, r)
        counted.append([t[:n] for t in tensors(case, turn, r)])
    x, ids, weights, add = tensors(case, turn, rank)
    count = case.counts[turn][rank]
    received = a2a.dispatch(
        x,
        ids,
        weights if case.weighted else None,
        num_tokens=None if count is None else torch.tensor([count], dtype=torch.int32),
    )
    expected = reference.dispatch(
        [[c[0]] for c in counted],
        [c[1] for c in counted],
        [c[2] if case.weighted else None for c in counted],
        a2a.placement,
        rank=rank,
        max_tokens=case.max_tokens,
    )
    here = expected.ids >= 0
    assert torch.equal(received.counts, expected.counts)
    assert torch.equal(received.ids, expected.ids)
    assert torch.equal(received.weights[here], expected.weights[here])
    assert torch.equal(bits(received.x[here.any(2)]), bits(expected.x[here.any(2)]))
    a2a.output().copy_(reference.identity_experts(received, case.dtype))
    out = a2a.combine(add=add)
    kept = torch.where(torch.arange(len(ids))[:, None] < used(case, turn, rank), ids, -1)
    wanted = reference.identity_round_trip(
        x, kept, weights if case.weighted else None, a2a.placement, ranks=len(ranks), add=add
    )
    assert torch.equal(bits(out), bits(wanted))
    if wrong := refusals(case, turn, rank):
        with pytest.raises(tuple(wrong)):
            a2a.check()
    a2a.check()


# Each example starts its ranks anew: examples are small and stay as found.
@settings(
    max_examples=80,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(case=exchanges())
def test_any_routing_meets_the_reference(ranks, case):
    ranks(case.ranks, "threads")(follow, case)
