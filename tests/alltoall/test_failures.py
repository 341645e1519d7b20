# SPDX-License-Identifier: Apache-2.0
"""Ranks that are late change no byte, and one that cannot compile stops all."""

from __future__ import annotations

import pytest

import weft
from tests.faults import BEFORE_READ, DISPATCH_ENTER, FAULTS, JITTER, plan_fault
from tests.kinds import CPU, CUDA, on_ranks
from tests.rounds import Round, play
from weft.errors import CreationFailed

CASE = Round(tokens=(8, 3, 8))


@on_ranks(3, [CPU, CUDA])
def test_delays_at_every_point_change_no_byte(group):
    with CASE.open(group, 8, _defines=FAULTS) as a2a:
        for point in range(DISPATCH_ENTER, BEFORE_READ + 1):
            if group.rank == point % group.size:
                plan_fault(a2a, point, JITTER, argument=400_000)
            for seed in range(24):
                play(a2a, CASE.next(seed=seed), poison=seed % 8 == 0)


@on_ranks(2, [CPU])
def test_one_rank_that_cannot_compile_stops_all(group):
    defines = ("weft=,",) if group.rank == 1 else ()
    with pytest.raises(CreationFailed, match="rank 1(.|\n)*CompileError") as caught:
        weft.AllToAll(group, **CASE.sizes(8), _defines=defines)
    assert len(set(group.all_gather(str(caught.value)))) == 1
