# SPDX-License-Identifier: Apache-2.0
"""What the other ranks raise of one that leaves its group."""

import contextlib
import os
import time

import pytest

from tests.memory.baseline import raised
from weft.errors import RendezvousFailed
from weft.memory.launch import launch


def leave(group):
    if group.rank == 1:
        group.close()
        return raised(group.barrier)[:2]
    return raised(group.barrier)[:2]


def test_a_rank_that_closed_its_group_is_named():
    zero, one, two = launch(leave, ranks=3, device="threads")
    assert one == ["OutOfOrder", "the group is closed; make a new one"]
    for kind, text in (zero, two):
        assert kind == RendezvousFailed.__name__
        assert f"rank 1 (pid {os.getpid()}) closed its group" in text


def raise_in_the_group(group, culprit):
    """The culprit's function raises; on each other rank, what it was told."""
    group.barrier()  # where all came, even if the culprit has left when the last one looks
    try:
        with group:
            if group.rank == culprit:
                raise KeyError("no such expert")
            group.barrier(timeout=200.0)
    except (KeyError, RendezvousFailed) as error:
        return str(error)
    return None


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_raises_tells_the_others_why(culprit):
    started = time.monotonic()
    told = launch(raise_in_the_group, culprit, ranks=3, device="threads")
    assert time.monotonic() - started < 60.0
    for rank in {0, 1, 2} - {culprit}:
        assert told[rank] == (
            f"rank {culprit} (pid {os.getpid()}) left the group while the others were in barrier: "
            "it raised KeyError: 'no such expert'"
        )


def come_later(group):
    """The hub comes to a barrier that one rank has left for good and another waits in."""
    group.barrier()
    if group.rank == 1:
        with contextlib.suppress(ValueError), group:
            raise ValueError("bad \ud800 weights" + "x" * 10**6)
    if group.rank == 0:
        time.sleep(0.3)
    return raised(group.barrier)[:2]


def test_the_reason_waits_for_whoever_comes_later():
    zero, one, two = launch(come_later, ranks=3, device="threads")
    assert one[0] == "OutOfOrder"
    for kind, text in (zero, two):
        assert kind == RendezvousFailed.__name__
        assert "rank 1 (pid " in text
        assert r"it raised ValueError: bad \ud800 weights" in text
        assert len(text) < 5000


def send_to_one_that_left(group):
    """The reason is read although sending has failed before."""
    group.barrier()
    if group.rank == 0:
        with contextlib.suppress(ValueError), group:
            raise ValueError("gone")
        return None
    time.sleep(0.3)
    return [raised(group.barrier)[1] for _ in range(2)]


def test_a_hub_that_left_has_said_why():
    told = launch(send_to_one_that_left, ranks=2, device="threads")[1]
    assert told[0] == told[1]
    assert "it raised ValueError: gone" in told[0]


def close_what_was_closed(group, done):
    """Rank 1 closes all descriptors, as a daemon does, and then its group."""
    group.open_meeting().close()
    group.barrier()
    if group.rank == 1:
        os.closerange(3, 1 << 16)
        group.close()
        done.touch()
        os._exit(0)  # it has nothing left by which it could report


def test_a_group_whose_descriptors_were_closed_closes_without_an_error(tmp_path):
    launch(close_what_was_closed, tmp_path / "done", ranks=2, tolerate_deaths=True)
    assert (tmp_path / "done").exists()
