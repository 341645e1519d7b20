# SPDX-License-Identifier: Apache-2.0
"""launch: a failure ends all ranks soon, and the error names the rank that caused it."""

import multiprocessing
import os
import re
import signal

import pytest

from weft.errors import GeometryMismatch, PeerTimeout, RankFailed, RendezvousFailed
from weft.memory.group import Group
from weft.memory.launch import launch
from weft.memory.reports import Report, failure

DEVICES = ("threads", "cpu")


def wait_for_one_that_raises(group):
    group.barrier()
    if group.rank == 1:
        raise ValueError("boom")
    group.barrier()


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_that_wait_for_one_that_raised_are_told_at_once(device, monkeypatch):
    """Far within the time that ranks have to end, which is made longer than the test's limit."""
    monkeypatch.setattr("weft.memory.processes.GRACE", 1000.0)
    monkeypatch.setitem(launch.__globals__, "GRACE", 1000.0)
    with pytest.raises(RankFailed, match="rank 1 of 3 raised ValueError: boom") as failed:
        launch(wait_for_one_that_raises, ranks=3, device=device)
    assert "still running" not in str(failed.value)


class DiesWhenUnpacked:
    """Ends the process that receives it, before it meets the others."""

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        return _die_as, (self.rank,)


def _die_as(rank):
    if multiprocessing.current_process().name == f"weft-rank-{rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def nothing(group, given):
    return given


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_before_it_meets_ends_the_launch(victim, monkeypatch):
    monkeypatch.setattr("weft.memory.processes.GRACE_MEETING", 1000.0)
    with pytest.raises(RankFailed, match=rf"rank {victim} of 3 died: .*SIGKILL") as failed:
        launch(nothing, DiesWhenUnpacked(victim), ranks=3)
    assert "still running" not in str(failed.value)  # they were told, and ended by themselves


def raise_before_the_meeting(monkeypatch):
    real = Group.from_meeting

    def from_meeting(meeting, *, rank, **options):
        if rank == 1:
            raise MemoryError("no room")
        return real(meeting, rank=rank, **options)

    monkeypatch.setattr(Group, "from_meeting", from_meeting)


def test_a_thread_that_raises_before_it_meets_ends_the_launch(monkeypatch):
    raise_before_the_meeting(monkeypatch)
    monkeypatch.setitem(launch.__globals__, "GRACE_MEETING", 1000.0)
    with pytest.raises(RankFailed, match="rank 1 of 3 raised MemoryError: no room") as failed:
        launch(nothing, 1, ranks=3, device="threads")
    assert "still running" not in str(failed.value)


def skip_a_call(group):
    if group.rank != 1:
        group.barrier()


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_that_returned_without_a_call_is_named(device):
    with pytest.raises(RankFailed) as failed:
        launch(skip_a_call, ranks=3, device=device)
    said = str(failed.value)
    assert re.search(r"rank [02] of 3 raised RendezvousFailed: rank 1 \(pid \d+\) closed", said)
    assert re.search(r"\nRank 1 had returned from its function \d+\.\d\d s before: ", said)


def test_an_echo_that_names_a_returned_rank_comes_before_other_echoes():
    reports = [
        Report.raised(0, PeerTimeout("rank 0, dispatch: rank 2 did not publish epoch 1")),
        Report(1, "returned"),
        Report.raised(2, PeerTimeout("rank 2, dispatch: rank 1 did not publish epoch 1")),
    ]
    for rank, when in enumerate((20.0, 10.0, 30.0)):
        reports[rank].when = when
    said = str(failure(reports, 3, 1.0))
    assert said.startswith("rank 2 of 3 raised PeerTimeout")
    assert "Rank 1 had returned from its function 20.00 s before: every rank must" in said
    reports[1].when = 40.0  # it returned after: that is no reason
    assert "had returned" not in str(failure(reports, 3, 1.0))


def test_ranks_that_differ_were_not_waited_for():
    error = GeometryMismatch("hidden differs: rank 0 has 8 and rank 1 has 16")
    assert Report.raised(0, error).blamed == ()
    assert Report.raised(0, PeerTimeout("rank 0: rank 3 and rank 1 (rank 3)")).blamed == (3, 1)
    assert Report.raised(0, ValueError("rank 1")).blamed == ()


def test_what_is_raised_because_of_an_echo_is_one():
    def wrapped(explicit):
        try:
            try:
                raise PeerTimeout("rank 1 is late")
            except PeerTimeout as error:
                if explicit:
                    raise ValueError("no result") from error
                raise ValueError("no result")  # noqa: B904
        except ValueError as error:
            return Report.raised(0, error)

    for explicit in (True, False):
        report, cause = wrapped(explicit), Report.raised(1, KeyError("mine"))
        assert cause.when >= report.when
        assert "rank 1 of 2 raised KeyError" in str(failure([report, cause], 2, 1.0))


def test_an_error_that_is_its_own_cause_is_reported():
    first, second = KeyError("mine"), ValueError("mine")
    first.__cause__ = first
    assert Report.raised(0, first).echo == 0
    first.__cause__, second.__cause__ = second, first
    assert Report.raised(0, first).echo == 0


def test_a_failure_prefers_causes_over_echoes_and_early_over_late():
    echo = Report.raised(0, RendezvousFailed("rank 1 died"))
    late, early = Report.raised(1, ValueError("late")), Report.raised(2, ValueError("early"))
    early.when -= 10.0
    assert "rank 2 of 4 raised ValueError: early" in str(
        failure([echo, late, early, Report(3, "returned")], 4, 1.0)
    )
    assert "rank 0 of 2 raised RendezvousFailed" in str(
        failure([echo, Report(1, "returned")], 2, 1.0)
    )
    assert failure([Report(0, "returned")], 1, 1.0) is None
