# SPDX-License-Identifier: Apache-2.0
"""Ranks die one after the other; the living sum on with the same object, or are refused."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.kinds import THREADS, on_ranks
from tests.recovery import plan_death, run_survivors, surviving, until_broken
from tests.sums import Sum, play, quants
from weft.errors import InvalidArgument, PeerDied

RANKS, TOKENS, ORDER = 4, 70, (2, 0, 3)  # the ranks die in this order; rank 1 is left alone
ENTER, AFTER_ROWS, BEFORE_ROWS = 8, 9, 10
CASE = Sum(tokens=5)


def sums(ar: weft.AllReduce, living: list[int], calls: int) -> None:
    """Calls of all sizes and outputs; more tokens than one shot of another all-reduce serves."""
    for seed in range(calls):
        for quant in quants(ar.group.device, CASE.hidden):
            tokens, special = (5, 1, TOKENS, 0, 3)[seed % 5], seed % 2 == 1
            case = CASE.next(seed=seed, tokens=tokens, special=special)
            play(ar, case, "auto", quant, living)


def die_in_turn(group: weft.Group, folder: str, points: tuple[int, ...]) -> None:
    with (
        surviving(group, folder) as survivors,
        weft.AllReduce(
            group, max_tokens=TOKENS, hidden=256, missing="drop", _defines=("WEFT_FAULTS=1",)
        ) as ar,
    ):
        assert ar.backends == ("oneshot",)
        sums(ar, survivors.ranks, 5)
        survivors.barrier()
        for dies, point in zip(ORDER, points, strict=True):
            if group.rank == dies:
                plan_death(ar, point)
            text = until_broken(lambda: sums(ar, survivors.ranks, 1))
            assert f"rank {dies}" in text or "left its calls to recover" in text, text
            survivors.lose(dies, sealed=[ar])
            assert ar.finished_rounds() == 0
            sums(ar, survivors.ranks, 5)
            survivors.barrier()


@pytest.mark.parametrize(
    "points",
    [
        (ENTER, AFTER_ROWS, BEFORE_ROWS),
        pytest.param((BEFORE_ROWS,) * 3, marks=pytest.mark.slow),
    ],
)
def test_the_living_sum_on(ranks, tmp_path, points):
    run_survivors(lambda: ranks(RANKS, "cpu")(die_in_turn, str(tmp_path), points), tmp_path, [1])


def refused(group: weft.Group, folder: str) -> None:
    with (
        surviving(group, folder) as survivors,
        weft.AllReduce(group, max_tokens=8, hidden=256, _defines=("WEFT_FAULTS=1",)) as ar,
    ):
        play(ar, CASE, "twoshot")
        survivors.barrier()
        if group.rank == 2:
            plan_death(ar, AFTER_ROWS)
        until_broken(lambda: play(ar, CASE, "twoshot"))
        survivors.lose(2)
        x = torch.ones((3, 256), dtype=torch.bfloat16)
        assert ar.broken
        for _ in range(2):  # a replayed graph returns at once, too: its kernels see `failed`
            with pytest.raises(PeerDied, match="rank 2 is gone, and this all-reduce sums over all"):
                ar.fused(x)
        survivors.barrier()


def test_without_the_option_calls_are_refused(ranks, tmp_path):
    run_survivors(lambda: ranks(3, "cpu")(refused, str(tmp_path)), tmp_path, [0, 1])


@on_ranks(2, [THREADS])
def test_two_shots_do_not_go_on(group):
    with pytest.raises(InvalidArgument, match="'twoshot'.* with missing='drop'.*leave backends"):
        weft.AllReduce(group, max_tokens=8, hidden=256, missing="drop", backends=("twoshot",))
    with pytest.raises(InvalidArgument, match="missing is 'skip'"):
        weft.AllReduce(group, max_tokens=8, hidden=256, missing="skip")
