# SPDX-License-Identifier: Apache-2.0
"""Ranks that are late change no byte, and one that cannot compile stops all."""

from __future__ import annotations

import pytest

import weft
from tests.faults import BEFORE_READ, DISPATCH_ENTER, FAULTS, JITTER, plan_fault
from tests.rounds import Round, play

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASE = Round(tokens=(8, 3, 8))


def disturbed(group: weft.Group, rounds: int, longest_ns: int) -> None:
    with weft.AllToAll(group, **CASE.sizes(8), _defines=FAULTS) as a2a:
        for point in range(DISPATCH_ENTER, BEFORE_READ + 1):
            if group.rank == point % group.size:
                plan_fault(a2a, point, JITTER, argument=longest_ns)
            for seed in range(rounds):
                play(a2a, CASE.next(seed=seed), poison=seed % 8 == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_delays_at_every_point_change_no_byte(ranks, kind):
    ranks(3, kind)(disturbed, 24, 400_000)


def compile_failure(group: weft.Group) -> str:
    defines = ("weft=,",) if group.rank == 1 else ()
    with pytest.raises(weft.errors.CreationFailed) as caught:
        weft.AllToAll(group, max_tokens=8, top_k=2, num_experts=4, hidden=16, _defines=defines)
    return str(caught.value)


def test_one_rank_that_cannot_compile_stops_all(ranks):
    texts = ranks(2, "cpu")(compile_failure)
    assert len(set(texts)) == 1
    assert "rank 1" in texts[0]
    assert "CompileError" in texts[0]
