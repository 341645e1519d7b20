# SPDX-License-Identifier: Apache-2.0
"""Ranks die one after the other, in every phase; the living go on with the same object, bit by bit.

Four ranks become three, two and one. What is right is `weft.reference` for tokens and experts of
the living alone.
"""

from __future__ import annotations

import pytest

import weft
from tests.faults import FAULTS
from tests.recovery import plan_death, run_survivors, surviving, until_broken
from tests.rounds import Round, combining, play
from weft.errors import BadExpertId

RANKS, TOKENS = 4, 8
CASE = Round(tokens=(8, 3, 5, 4), hidden=256, experts=13, add=True)
# The fault point of each death; the ranks die in this order, and rank 1 is left alone.
DEATHS = {"in dispatch": (1, 2, 3), "in waits": (4, 7, 4), "in combine": (5, 6, 7)}
ORDER = (2, 0, 3)


def play_living(a2a: weft.AllToAll, living: list[int], rounds: int) -> None:
    """Play rounds whole and in halves, with slots at other places from round to round."""
    for seed in range(rounds):
        rows = (None, None, TOKENS, 6, 6, TOKENS, 7)[seed % 7]
        case = CASE.next(seed=seed, tokens=tuple(min(n, rows or TOKENS) for n in CASE.tokens))
        play(a2a, case, poison=False, rows=rows, halves=seed % 3 == 1, living=living)


def die_in_turn(group: weft.Group, folder: str, way: str, points: tuple[int, ...]) -> None:
    options = combining(way) | {"split_phase": True, "_defines": FAULTS}
    with surviving(group, folder) as survivors, CASE.open(group, TOKENS, **options) as a2a:
        play_living(a2a, survivors.ranks, 4)
        survivors.barrier()
        for dies, point in zip(ORDER, points, strict=True):
            if group.rank == dies:
                plan_death(a2a, point)
            text = until_broken(lambda: play_living(a2a, survivors.ranks, 1))
            assert a2a.broken
            assert f"rank {dies}" in text or "left its calls to recover" in text, text
            survivors.lose(dies, sealed=[a2a])
            assert not a2a.broken
            assert a2a.finished_rounds() == 0
            play_living(a2a, survivors.ranks, 8)
            with pytest.raises(BadExpertId, match=f"expert of rank {dies}, which is gone: [^(]*$"):
                a2a.check()  # names it once, and no other
            play_living(a2a, survivors.ranks, 8)
            a2a.check()
            assert a2a.finished_rounds() == 16
            survivors.barrier()


# One phase for each way; all others run with the slow tests.
FIRST = {("pull", "in dispatch"), ("push", "in combine"), ("fp8", "in waits")}


@pytest.mark.parametrize(
    ("way", "points"),
    [
        pytest.param(way, points, marks=() if (way, points) in FIRST else pytest.mark.slow)
        for way in ("pull", "push", "fp8")
        for points in DEATHS
    ],
)
def test_the_living_go_on(ranks, tmp_path, way, points):
    body = (die_in_turn, str(tmp_path), way, DEATHS[points])
    run_survivors(lambda: ranks(RANKS, "cpu")(*body), tmp_path, [1])
