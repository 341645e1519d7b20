# SPDX-License-Identifier: Apache-2.0
"""Ranks die one after the other, in every phase; the living go on with the same object."""

from __future__ import annotations

import pytest

import weft
from tests.alltoall.test_recovery import CASE, DEATHS, ORDER, RANKS
from tests.lowlatency_rounds import Mode, play
from tests.recovery import plan_death, run_survivors, surviving, until_broken
from weft.errors import BadExpertId

MODES = {
    "fp8": Mode(),
    "sums at the sender": Mode(reduce="sender", combine_dtype="fp8", scale="ue8m0"),
    "as they are, placed": Mode(
        quantize=None, more={"expert_map": [3, 1, 0, 2, 1, 1, 2, 0, 3, 1, 2, 0, 1]}
    ),
    "gemm_push": Mode(combine="gemm_push"),
}


def die_in_turn(group: weft.Group, folder: str, name: str, points: tuple[int, ...]) -> None:
    mode = MODES[name]
    halves = mode.combine == "push"
    mode.more.update(split_phase=halves, _defines=("WEFT_FAULTS=1",))
    with surviving(group, folder) as survivors, mode.make(group, CASE, 8) as a2a:

        def go_on(rounds: int, *, checks: bool = True) -> None:
            for seed in range(rounds):
                split = halves and seed % 2 == 1
                case, living = CASE.next(seed=seed), survivors.ranks
                play(a2a, mode, case, split_phase=split, living=living, checks=checks)

        go_on(3)
        survivors.barrier()
        for dies, point in zip(ORDER, points, strict=True):
            if group.rank == dies:
                plan_death(a2a, point)
            text = until_broken(lambda: go_on(1))
            assert f"rank {dies}" in text or "left its calls to recover" in text, text
            survivors.lose(dies, sealed=[a2a])
            assert a2a.finished_rounds() == 0
            assert not a2a._mid_round
            go_on(8, checks=False)
            with pytest.raises(BadExpertId, match=f"expert of rank {dies}, which is gone: [^(]*$"):
                a2a.check()  # names it once, and no other
            go_on(8)
            assert a2a.finished_rounds() == 16
            survivors.barrier()


# One phase for each mode; all others run with the slow tests.
FIRST = {
    *(("fp8", "in dispatch"), ("sums at the sender", "in waits")),
    *(("as they are, placed", "in combine"), ("gemm_push", "in waits")),
}


@pytest.mark.parametrize(
    ("name", "points"),
    [
        pytest.param(name, points, marks=() if (name, points) in FIRST else pytest.mark.slow)
        for name in MODES
        for points in DEATHS
    ],
)
def test_the_living_go_on(ranks, tmp_path, name, points):
    body = (die_in_turn, str(tmp_path), name, DEATHS[points])
    run_survivors(lambda: ranks(RANKS, "cpu")(*body), tmp_path, [1])
