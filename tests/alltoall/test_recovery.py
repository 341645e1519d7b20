# SPDX-License-Identifier: Apache-2.0
"""Ranks die one after the other, in every phase; the living go on with the same object, bit by bit.

Four ranks become three, two and one. What is right is `weft.reference` for tokens and experts of
the living alone.
"""

from __future__ import annotations

import pytest
import torch

import weft
from tests.recovery import (
    dropped,
    of_living,
    plan_death,
    run_survivors,
    surviving,
    until_broken,
)
from tests.rounds import Round, bits, combining
from weft import reference
from weft.errors import BadExpertId

RANKS, TOKENS, FEWER = 4, 8, 5
CASE = Round(tokens=(8, 3, 5, 4), hidden=256, experts=13, add=True)
DEATHS = {  # the fault point of each death; the ranks die in this order
    "in dispatch": (1, 2, 3),
    "in waits": (4, 7, 4),
    "in combine": (5, 6, 7),
}
ORDER = (2, 0, 3)  # rank 1 is left alone


def one_round(
    a2a: weft.AllToAll, case: Round, living: list[int], way: str, *, rows: int | None, halves: bool
) -> None:
    """A round of the living, and what each of them must see of it."""
    group = a2a.group
    inputs = [of_living(case, living).of(r, group.device) for r in range(group.size)]
    x, ids, weights, add = inputs[group.rank]
    if halves:
        a2a.dispatch_send(x, ids, weights, rows=rows)
        got = a2a.dispatch_recv()
    else:
        got = a2a.dispatch(x, ids, weights, rows=rows)
    sent = [dropped(i[1], a2a.placement.ranks, living) for i in inputs]
    wanted = reference.dispatch(
        [[i[0]] for i in inputs],
        sent,
        [i[2] for i in inputs],
        a2a.placement,
        rank=group.rank,
        max_tokens=rows or TOKENS,
    )
    assert torch.equal(got.counts, wanted.counts)
    assert torch.equal(got.ids, wanted.ids)
    carries = (wanted.ids >= 0).any(dim=2)
    assert torch.equal(got.weights[carries], wanted.weights[carries])
    assert torch.equal(bits(got.x[carries]), bits(wanted.x[carries]))
    a2a.output(rows).copy_(reference.identity_experts(got, case.dtype))
    out = torch.full_like(x, float("nan"))
    if halves:
        a2a.combine_send()
        a2a.combine_recv(out=out, add=add)
    else:
        a2a.combine(out=out, add=add)
    fp8 = {"fp8": "fp8"}.get(way)
    expected = reference.identity_round_trip(
        x, sent[group.rank], weights, a2a.placement, ranks=group.size, add=add, combine_dtype=fp8
    )
    assert torch.equal(bits(out), bits(expected))


def go_on(a2a: weft.AllToAll, living: list[int], way: str, rounds: int) -> None:
    """Rounds whole and in halves, with slots at other places from round to round."""
    for seed in range(rounds):
        rows = (None, None, TOKENS, 6, 6, TOKENS, 7)[seed % 7]
        case = CASE.next(seed=seed, tokens=tuple(min(n, rows or TOKENS) for n in CASE.tokens))
        one_round(a2a, case, living, way, rows=rows, halves=seed % 3 == 1)


def die_in_turn(group: weft.Group, folder: str, way: str, points: tuple[int, ...]) -> None:
    options = combining(way) | {"split_phase": True, "_defines": ("WEFT_FAULTS=1",)}
    with (
        surviving(group, folder) as survivors,
        weft.AllToAll(group, **CASE.sizes(TOKENS), **options) as a2a,
    ):
        go_on(a2a, survivors.ranks, way, 4)
        survivors.barrier()
        for dies, point in zip(ORDER, points, strict=True):
            if group.rank == dies:
                plan_death(a2a, point)
            text = until_broken(lambda: go_on(a2a, survivors.ranks, way, 1))
            assert a2a.broken
            assert f"rank {dies}" in text or "left its calls to recover" in text, text
            survivors.lose(dies, sealed=[a2a])
            assert not a2a.broken
            assert a2a._finished() == 0
            go_on(a2a, survivors.ranks, way, 8)
            with pytest.raises(BadExpertId, match=f"expert of rank {dies}, which is gone: [^(]*$"):
                a2a.check()  # names it once, and no other
            go_on(a2a, survivors.ranks, way, 8)
            a2a.check()
            assert a2a._finished() == 16
            survivors.barrier()


@pytest.mark.parametrize("way", ["pull", "push", "fp8"])
@pytest.mark.parametrize("points", DEATHS.values(), ids=DEATHS.keys())
def test_the_living_go_on(ranks, tmp_path, way, points):
    run_survivors(
        lambda: ranks(RANKS, "cpu")(die_in_turn, str(tmp_path), way, points), tmp_path, [1]
    )
