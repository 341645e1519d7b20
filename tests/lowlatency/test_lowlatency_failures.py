# SPDX-License-Identifier: Apache-2.0
"""A missing word is named in the error."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.faults import (
    BEFORE_FLAG,
    DROP,
    FAULTS,
    plan_fault,
)
from tests.kinds import ANY
from tests.lowlatency_rounds import Mode
from tests.patience import hurry
from tests.rounds import Round, synchronize
from weft.errors import GroupError
from weft.lowlatency.operator import LowLatencyAllToAll

CASE = Round(tokens=(8, 3, 8), hidden=128)


def one_round(a2a: LowLatencyAllToAll) -> None:
    x, ids, weights, _ = CASE.inputs_of(a2a.rank, a2a.group.device)
    got = a2a.dispatch(x, ids, weights)
    a2a.combine(torch.zeros_like(got.x, dtype=x.dtype), ids, weights, got.handle)
    synchronize(a2a.group.device)
    a2a.check()


def omit_dispatch(group: weft.Group) -> str:
    """Rank 2 sends nothing of its dispatch to rank 0, and its part to all others."""
    with Mode(more={"_defines": FAULTS}).make(group, CASE, 8) as a2a:
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
    texts = ranks(3, kind)(omit_dispatch)
    assert "rank 0, dispatch: rank 2 did not publish epoch 2" in texts[0]
    assert "(its flag shows epoch 1)" in texts[0]
