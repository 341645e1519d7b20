# SPDX-License-Identifier: Apache-2.0
"""Ranks meet, and nothing named is left."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.memory.meetings import all_ranks, answer, connect, gather, said
from weft.errors import InvalidArgument, RendezvousFailed
from weft.memory.meeting import ABI, Meeting, meet


def listens(meeting):
    """Connected sockets show the name as well, but nobody can connect to them."""
    with open("/proc/net/unix", encoding="ascii") as file:
        lines = [line.split() for line in file if line.endswith(f" @{meeting._name[1:]}\n")]
    return any(flags == "00010000" for _, _, _, flags, *_ in lines)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_meet_and_nothing_named_is_left(meeting, size):
    assert listens(meeting)
    ranks = [lambda r=r: gather(meeting, r, size=size) for r in range(size)]
    assert all_ranks(*ranks) == [list(range(size))] * size
    assert not listens(meeting)


def test_any_rank_can_be_the_hub():
    meeting = Meeting.open(2)
    ranks = [lambda r=r: gather(Meeting.at(meeting.address), r, 4) for r in (0, 1, 3)]
    assert all_ranks(*ranks, lambda: gather(meeting, 2, 4)) == [[0, 1, 2, 3]] * 4


def test_names_are_gone_while_the_sockets_live(meeting):
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(meet, meeting, rank=r, size=2, device="cpu", timeout=5.0) for r in (0, 1)
        ]
        controls = [call.result(10) for call in calls]
    assert not listens(meeting)
    assert controls[0].pids == controls[1].pids == [os.getpid()] * 2
    for control in controls:
        control.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"abi": 99}, f"abi {ABI} and 99"),
        ({"size": 4}, "size 3 and 4"),
        ({"device": "cuda"}, "device 'cpu' and 'cuda'"),
        ({"rank": 0}, "came as rank 0, which another process has taken"),
        ({"rank": 3}, "came as rank 3, which is none of 3"),
        ({"rank": "1"}, "came as rank '1', which is none of 3"),
        ({"rank": True}, "came as rank True, which is none of 3"),
        ({"rank": 1.0}, "came as rank 1.0, which is none of 3"),
        ({"rank": "\ud800"}, "came as rank '\\ud800', which is none of 3"),
        ({"abi": None}, f"abi {ABI} and None"),
        ({"size": 3.0}, "size 3 and 3.0"),
        ({"rank": 2}, "came as rank 2, which another process has taken"),
    ],
)
def test_ranks_that_do_not_fit_together_all_learn_why(meeting, changes, text):
    def misfit():
        time.sleep(0.1)  # rank 2 is in by then
        with connect(meeting) as connection:
            connection.send(said(meeting, **changes))
            return answer(connection)["fail"]

    zero, member, told = all_ranks(lambda: gather(meeting, 0), lambda: gather(meeting, 2), misfit)
    for each in (zero, member, told):
        assert text in str(each)
    assert isinstance(zero, RendezvousFailed)
    assert isinstance(member, RendezvousFailed)


def test_missing_ranks_are_named_at_the_deadline(meeting):
    started = time.monotonic()
    for error in all_ranks(
        lambda: gather(meeting, 0, size=4, timeout=0.3),
        lambda: gather(meeting, 2, size=4, timeout=0.3),
    ):
        assert "rank 1, 3 of 4 did not come" in str(error)
    assert time.monotonic() - started < 8.0
    assert not listens(meeting)


def test_a_hub_that_does_not_let_a_rank_in_is_named_at_the_deadline(meeting):
    text = str(gather(meeting, 1, timeout=0.2))
    assert "rank 0, at which all meet, did not bring this rank to the others in 0.2 s" in text


def test_a_meeting_that_is_over_is_said_at_once(meeting):
    meeting.close()
    started = time.monotonic()
    assert "the meeting is over" in str(gather(meeting, 1, timeout=30.0))
    assert time.monotonic() - started < 10.0


def test_a_process_that_has_not_opened_the_meeting_is_not_its_hub(meeting):
    with pytest.raises(InvalidArgument, match="this process has not opened the meeting"):
        meet(Meeting.at(meeting.address), rank=0, size=2, device="cpu", timeout=1.0)


def test_ranks_out_of_range_are_refused(meeting):
    with pytest.raises(InvalidArgument, match="rank is 3 and size is 3"):
        meet(meeting, rank=3, size=3, device="cpu", timeout=1.0)
    with pytest.raises(InvalidArgument, match="the hub of the meeting is 4 and size is 3"):
        meet(Meeting(4, bytes(32)), rank=0, size=3, device="cpu", timeout=1.0)


def test_no_descriptor_is_left_by_success_or_failure():
    def once():
        good, bad = Meeting.open(), Meeting.open()
        all_ranks(*[lambda r=r: gather(good, r) for r in range(3)])
        all_ranks(*[lambda r=r: gather(bad, r, timeout=0.05) for r in (0, 2)])

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        once()
    assert len(os.listdir("/proc/self/fd")) == before
