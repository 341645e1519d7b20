# SPDX-License-Identifier: Apache-2.0
"""What every operator does when it recovers: two deaths at once, many rounds, epochs that wrap."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import weft
from tests.operators import KINDS, Operator
from tests.recovery import Survivors, run_survivors, surviving, until_broken
from weft.errors import Aborted, BadExpertId

ROUNDS = 10_000
WRAPS = (1 << 40) - ROUNDS // 2  # of an epoch, in the middle of the rounds after a recovery
CASES = ("pull", "fp8", "receiver", "sender", "oneshot")


def open_kind(group: weft.Group, kind: str) -> Operator:
    more: dict[str, Any] = {"missing": "drop", "backends": None} if kind == "oneshot" else {}
    return KINDS[kind].open(group, _first_epoch=WRAPS, **more)


def kill(survivors: Survivors, op: Operator, *dies: int) -> None:
    """Ranks end before a round in which the others wait for them."""
    survivors.barrier()
    if survivors.group.rank in dies:
        os.kill(os.getpid(), signal.SIGKILL)
    until_broken(lambda: op.round())
    survivors.lose(*dies, sealed=[op.made])


def many_rounds(group: weft.Group, folder: str, kind: str) -> None:
    with surviving(group, folder) as survivors, open_kind(group, kind) as op:
        op.rounds(2)
        kill(survivors, op, 1, 3)  # at once
        first = op.enqueue(3.0).clone()
        if kind == "oneshot":
            assert bool((first == 3.0 * len(survivors.ranks)).all())
        else:
            with pytest.raises(BadExpertId, match="which is gone"):
                op.made.check()
        for _ in range(ROUNDS):
            last = op.enqueue(3.0)
        assert torch.equal(first, last)
        op.made.check()
        assert op.made._finished() == ROUNDS + 1
        survivors.barrier()


@pytest.mark.parametrize("kind", CASES)
def test_ten_thousand_rounds_after_two_deaths(ranks, tmp_path, kind):
    run_survivors(lambda: ranks(4, "cpu")(many_rounds, str(tmp_path), kind), tmp_path, [0, 2])


def quiesced(group: weft.Group) -> str:
    """A rank that recovers ends the calls of its peers, and its own in another thread."""
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
            op.made._quiesce()
            thread.join(60.0)
            assert isinstance(errors[0], Aborted)
            with pytest.raises(Aborted):
                op.round()
            group.barrier()
            return ""
        if group.rank == 1:
            text = until_broken(lambda: op.round())
            group.barrier()
            return text
        group.barrier()  # rank 2 makes no call
        return ""


def test_a_rank_that_recovers_ends_calls_here_and_there(ranks):
    _, theirs, _ = ranks(3, "cpu")(quiesced)
    assert "rank 0 left its calls to recover its group before it made its part" in theirs, theirs
