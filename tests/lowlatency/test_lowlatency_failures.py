# SPDX-License-Identifier: Apache-2.0
"""Ranks that are late change no byte, and a word that does not come is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from tests.faults import (
    BEFORE_FLAG,
    BEFORE_READ,
    DISPATCH_ENTER,
    DROP,
    FAULTS,
    JITTER,
    plan_fault,
)
from tests.kinds import ANY, CPU
from tests.lowlatency_rounds import Mode, play
from tests.patience import hurry
from tests.rounds import Round, settle
from weft.errors import GroupError
from weft.lowlatency.operator import LowLatencyAllToAll

CASE = Round(tokens=(8, 3, 8), hidden=128)


def make(group: weft.Group, mode: Mode = Mode(), **more: object) -> LowLatencyAllToAll:  # noqa: B008
    options = {"_defines": FAULTS, **mode.more, **more}
    return replace(mode, more=options).make(group, CASE, 8)


def one_round(a2a: LowLatencyAllToAll) -> None:
    x, ids, weights, _ = CASE.of(a2a.rank, a2a.group.device)
    got = a2a.dispatch(x, ids, weights)
    a2a.combine(torch.zeros_like(got.x, dtype=x.dtype), ids, weights, got.handle)
    settle(a2a.group.device)
    a2a.check()


def disturbed(group: weft.Group, rounds: int, longest_ns: int, more: dict[str, object]) -> None:
    mode = Mode(more=more)
    with make(group, mode) as a2a:
        for point in range(DISPATCH_ENTER, BEFORE_READ + 1):
            if group.rank == point % group.size:
                plan_fault(a2a, point, JITTER, argument=longest_ns)
            for seed in range(rounds):
                split_phase = "split_phase" in more and seed % 2 == 0
                play(a2a, mode, CASE.next(seed=seed), poison=seed % 8 == 0, split_phase=split_phase)


@pytest.mark.parametrize("kind", [CPU, *ANY])
@pytest.mark.parametrize("more", [{}, {"split_phase": True}], ids=["whole", "split_phase"])
def test_delays_at_every_point_change_no_byte(ranks, kind, more):
    ranks(3, kind)(disturbed, 12, 400_000, more)


def silent(group: weft.Group) -> str:
    """Rank 2 sends rank 0 nothing of its dispatch, and everybody else its part."""
    with make(group) as a2a:
        one_round(a2a)
        if group.rank == 0:
            hurry(a2a, 2.0)
        if group.rank == 2:
            plan_fault(a2a, BEFORE_FLAG, DROP, peer=0)
        group.barrier()
        try:
            one_round(a2a)
        except GroupError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("kind", ANY)
def test_a_missing_word_is_named(ranks, kind):
    texts = ranks(3, kind)(silent)
    assert "rank 0, dispatch: rank 2 did not publish epoch 2" in texts[0]
    assert "(its flag shows epoch 1)" in texts[0]
