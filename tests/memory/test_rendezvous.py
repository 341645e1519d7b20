"""Ranks meet, and nothing named is left."""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.memory.meetings import LONG, all_ranks, answer, connect, gather, said
from weft.errors import InvalidArgument, RendezvousFailed
from weft.memory.meeting import Meeting
from weft.memory.rendezvous import ABI, meet


def test_all_ranks_meet_and_nothing_named_is_left(meeting):
    ranks = [lambda r=r: gather(meeting, r) for r in range(3)]
    assert all_ranks(*ranks) == [[0, 1, 2]] * 3
    assert not os.path.exists(meeting.directory)


def test_one_rank_meets_itself(meeting):
    assert gather(meeting, 0, size=1) == [0]
    assert not os.path.exists(meeting.directory)


def test_names_are_gone_while_the_sockets_live(meeting):
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(meet, meeting, rank=r, size=2, device="cpu", timeout=5.0) for r in (0, 1)
        ]
        controls = [call.result(10) for call in calls]
    assert not os.path.exists(meeting.directory)
    with open("/proc/net/unix", encoding="ascii") as file:
        assert meeting.directory not in file.read()
    assert controls[0].pids == controls[1].pids == [os.getpid()] * 2
    for control in controls:
        control.close()


def test_the_directory_may_have_a_long_name(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    meeting = Meeting.open()
    assert meeting.directory.startswith(str(deep))
    assert all_ranks(*[lambda r=r: gather(meeting, r) for r in range(3)]) == [[0, 1, 2]] * 3
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"abi": 99}, f"abi {ABI} and 99"),
        ({"size": 4}, "size 3 and 4"),
        ({"device": "cuda"}, "device 'cpu' and 'cuda'"),
        ({"rank": 0}, "came as rank 0, which does not connect to rank 0 of 3"),
        ({"rank": 3}, "came as rank 3, which does not connect to rank 0 of 3"),
        ({"rank": "1"}, "came as rank '1', which does not"),
        ({"rank": True}, "came as rank True, which does not"),
        ({"rank": 1.0}, "came as rank 1.0, which does not"),
        ({"rank": "\ud800"}, "came as rank '\\ud800', which does not"),
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
        assert "rank 1, 3 of 4 did not come" in str(error)  # or the other gave up first
    assert time.monotonic() - started < 8.0
    assert not os.path.exists(meeting.directory)


def test_a_meeting_that_is_over_is_said_at_once(meeting):
    meeting.remove()
    started = time.monotonic()
    assert "cannot be opened" in str(gather(meeting, 1, timeout=30.0))
    assert time.monotonic() - started < 10.0


def test_a_rank_that_leaves_before_all_have_met(meeting):
    def leaver():
        with connect(meeting) as connection:
            connection.send(said(meeting))
            time.sleep(0.1)

    started = time.monotonic()
    zero, _ = all_ranks(lambda: gather(meeting, 0, timeout=30.0), leaver)
    assert f"rank 1 (pid {os.getpid()}) died while the group was in the meeting" in str(zero)
    assert time.monotonic() - started < 5.0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_directory_open_to_others_is_refused(meeting, rank):
    os.chmod(meeting.directory, 0o755)
    error = gather(meeting, rank, timeout=1.0)
    assert "mode 0755" in str(error)
    assert "mode 0700" in str(error)


def test_a_link_in_place_of_the_directory_is_refused(meeting, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(meeting.directory)
    assert "cannot be opened" in str(gather(Meeting(str(link), meeting.nonce), 1, timeout=1.0))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_second_process_of_a_rank_is_refused_and_harms_no_meeting(meeting, rank):
    def second():
        connect(meeting, rank).close()
        error = gather(meeting, rank, timeout=LONG)
        return error, gather(meeting, 1)

    ranks = [lambda r=r: gather(meeting, r, timeout=LONG) for r in (0, 2)]
    *met, (error, one) = all_ranks(*ranks, second)
    assert f"rank {rank} is taken: another process has come to" in str(error)
    assert [*met, one] == [[0, 1, 2]] * 3
    assert not os.path.exists(meeting.directory)


def test_ranks_out_of_range_are_refused(meeting):
    with pytest.raises(InvalidArgument, match="rank is 3 and size is 3"):
        meet(meeting, rank=3, size=3, device="cpu", timeout=1.0)


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


def test_a_temporary_directory_that_is_not_there_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(RendezvousFailed, match="cannot make the directory .*; set TMPDIR"):
        Meeting.open()


def test_a_proc_of_another_namespace_is_said(meeting, monkeypatch):
    real = os.path.exists
    monkeypatch.setattr(
        os.path, "exists", lambda path: not str(path).startswith("/proc/self/fd/") and real(path)
    )
    with pytest.raises(RendezvousFailed, match=r"/proc does not show .*--mount-proc.*--pid=host"):
        meeting.enter()
