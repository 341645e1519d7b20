# SPDX-License-Identifier: Apache-2.0
"""What every operator does when it recovers: two deaths at once, many rounds, epochs that wrap."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import weft
from tests.baseline import die
from tests.operators import KINDS, Operator
from tests.ranks import on_ranks
from tests.recovery import Survivors, until_broken
from weft.errors import Aborted, BadExpertId

WRAPS = (1 << 40) - 200  # of an epoch, among the rounds after a recovery
CASES = ("pull", "fp8", "receiver", "sender", "oneshot")


def open_kind(group: weft.Group, kind: str) -> Operator:
    more: dict[str, Any] = {"missing": "drop", "backends": None} if kind == "oneshot" else {}
    return KINDS[kind].open(group, _first_epoch=WRAPS, **more)


def kill(survivors: Survivors, op: Operator, *dies: int) -> None:
    """Ranks end before a round in which the others wait for them."""
    survivors.barrier()
    if survivors.group.rank in dies:
        die()
    until_broken(lambda: op.round())
    survivors.lose(*dies, sealed=[op.made])


@pytest.mark.parametrize("rounds", [400, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", CASES)
@on_ranks(4, "cpu", dies=[1, 3])
def test_many_rounds_after_two_deaths(group: weft.Group, kind: str, rounds: int) -> None:
    survivors = Survivors(group)
    with open_kind(group, kind) as op:
        op.rounds(2)
        kill(survivors, op, 1, 3)  # at once
        first = op.enqueue(3.0).clone()
        if kind == "oneshot":
            assert bool((first == 3.0 * len(survivors.ranks)).all())
        else:
            with pytest.raises(BadExpertId, match="which is gone"):
                op.made.check()
        for _ in range(rounds):
            last = op.enqueue(3.0)
        assert torch.equal(first, last)
        op.made.check()
        assert op.made.finished_rounds() == rounds + 1
        survivors.barrier()


@on_ranks(3, "cpu")
def test_a_rank_that_recovers_ends_its_own_calls_and_its_peers(group: weft.Group) -> None:
    with open_kind(group, "pull") as op:
        op.round()
        group.barrier()
        if group.rank == 0:
            errors: list[BaseException] = []

            def wait() -> None:
                try:
                    op.round()
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=wait)
            thread.start()
            time.sleep(0.2)
            op.made.quiesce()
            thread.join(60.0)
            assert isinstance(errors[0], Aborted)
            with pytest.raises(Aborted):
                op.round()
        elif group.rank == 1:
            text = until_broken(lambda: op.round())
            assert "rank 0 left its calls to recover its group before it made its part" in text
        group.barrier()  # rank 2 makes no call
