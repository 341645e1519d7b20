"""Ranks meet, strangers do not disturb them, and nothing named is left."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from weft.errors import InvalidArgument, RendezvousFailed
from weft.memory import rendezvous
from weft.memory.rendezvous import ABI, Meeting, meet
from weft.memory.wire import HELLO_LIMIT, Channel, Kind, encode


@pytest.fixture
def meeting():
    meeting = Meeting.open()
    yield meeting
    meeting.remove()


def gather(meeting, rank, size=3, timeout=600.0, device="cpu"):
    """One rank: meet, exchange, leave. Returns what it got, or the error."""
    try:
        star = meet(meeting, rank=rank, size=size, device=device, timeout=timeout)
    except RendezvousFailed as error:
        return error
    try:
        return star.gather("test", rank, timeout)
    finally:
        star.close()


def all_ranks(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def connect(meeting, limit=HELLO_LIMIT):
    """A connection to the hub, which may not listen yet."""
    until = time.monotonic() + 600
    while True:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stranger.connect(os.path.join(meeting.directory, "hub"))
            return stranger
        except OSError:
            stranger.close()
            assert time.monotonic() < until
            time.sleep(0.002)


def said(meeting, **changes):
    hello = {
        "abi": ABI, "rank": 1, "size": 3, "device": "cpu", "nonce": meeting.nonce.hex()
    }  # fmt: skip
    return encode({**hello, **changes})


def test_all_ranks_meet_and_nothing_named_is_left(meeting):
    ranks = [lambda r=r: gather(meeting, r) for r in range(3)]
    assert all_ranks(*ranks) == [[0, 1, 2]] * 3
    assert not os.path.exists(meeting.directory)


def test_one_rank_alone_needs_no_socket(meeting):
    assert gather(meeting, 0, size=1) == [0]
    assert not os.path.exists(meeting.directory)


def test_names_are_gone_while_the_star_lives(meeting):
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(meet, meeting, rank=r, size=2, device="cpu", timeout=600.0) for r in (0, 1)
        ]
        stars = [call.result(10) for call in calls]
    assert not os.path.exists(meeting.directory)
    with open("/proc/net/unix", encoding="ascii") as file:
        assert meeting.directory not in file.read()
    assert stars[0].pids == stars[1].pids == [os.getpid()] * 2
    for star in stars:
        star.close()


def test_the_directory_may_have_a_long_name(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    meeting = Meeting.open()
    assert meeting.directory.startswith(str(deep))
    assert all_ranks(*[lambda r=r: gather(meeting, r) for r in range(3)]) == [[0, 1, 2]] * 3
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_strangers_are_refused_and_the_ranks_still_meet(meeting):
    """A wrong nonce, garbage, silence and a flood of connections at once."""
    answers = []
    have_come = threading.Event()

    def strangers():
        silent = [connect(meeting) for _ in range(3)]
        loud = connect(meeting)
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        liar = Channel(connect(meeting), limit=HELLO_LIMIT)
        liar.send(Kind.HELLO, said(meeting, nonce="0" * 64), time.monotonic() + 600)
        answers.append(liar.receive(time.monotonic() + 600))
        long = connect(meeting)
        long.sendall(b"weft" + b"\1\0\0\0" + (1 << 31).to_bytes(4, "big"))
        have_come.set()
        for each in (*silent, loud, liar, long):
            each.close()

    def late(rank):
        have_come.wait()
        return gather(meeting, rank)

    got = all_ranks(lambda: gather(meeting, 0), strangers, lambda: late(1), lambda: late(2))
    assert [got[0], got[2], got[3]] == [[0, 1, 2]] * 3
    assert answers[0].kind is Kind.FAIL
    assert "nonce is not this job's" in answers[0].body


def test_a_rank_with_a_wrong_nonce_learns_why(meeting):
    other = Meeting(meeting.directory, bytes(32))
    hub, liar = all_ranks(
        lambda: gather(meeting, 0, size=2, timeout=2.0),
        lambda: gather(other, 1, size=2, timeout=2.0),
    )
    assert "nonce is not this job's" in str(liar)
    assert "rank 1 of 2 did not come" in str(hub)


@pytest.mark.parametrize("nonce", [None, 7, [], "é" * 64, ""])
def test_a_nonce_of_any_shape_is_compared(meeting, nonce):
    assert not rendezvous._trusted(meeting.nonce, {"nonce": nonce})
    assert not rendezvous._trusted(meeting.nonce, nonce)
    assert rendezvous._trusted(meeting.nonce, {"nonce": meeting.nonce.hex()})


def test_another_user_is_refused(meeting, monkeypatch):
    real = rendezvous._peer

    def of_another_user(connection):
        """As the hub sees it: only the listening end of a connection has a name."""
        pid, uid = real(connection)
        return pid, 12345 if connection.getsockname() else uid

    monkeypatch.setattr(rendezvous, "_peer", of_another_user)
    hub, member = all_ranks(
        lambda: gather(meeting, 0, size=2, timeout=2.0),
        lambda: gather(meeting, 1, size=2, timeout=2.0),
    )
    assert "rank 1 of 2 did not come" in str(hub)
    assert isinstance(member, RendezvousFailed)


def test_a_hub_of_another_user_is_refused(meeting, monkeypatch):
    real = rendezvous._peer

    def of_another_user(connection):
        pid, uid = real(connection)
        return pid, uid if connection.getsockname() else 12345

    monkeypatch.setattr(rendezvous, "_peer", of_another_user)
    hub, member = all_ranks(
        lambda: gather(meeting, 0, size=2, timeout=2.0),
        lambda: gather(meeting, 1, size=2, timeout=2.0),
    )
    assert "rank 1 of 2 did not come" in str(hub)
    assert f"runs as user 12345 and rank 1 as user {os.geteuid()}" in str(member)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"abi": 99}, f"abi {ABI} and 99"),
        ({"size": 4}, "size 3 and 4"),
        ({"device": "cuda"}, "device 'cpu' and 'cuda'"),
        ({"rank": 0}, "came as rank 0, which is not one of 1..2"),
        ({"rank": 3}, "came as rank 3, which is not one of 1..2"),
        ({"rank": "1"}, "came as rank 1, which is not one of"),
        ({"rank": 2}, "came as rank 2, which another process has taken"),
    ],
)
def test_ranks_that_do_not_fit_together_all_learn_why(meeting, changes, text):
    def misfit():
        time.sleep(0.5)  # rank 2 is in by then
        channel = Channel(connect(meeting), limit=HELLO_LIMIT)
        channel.send(Kind.HELLO, said(meeting, **changes), time.monotonic() + 600)
        frame = channel.receive(time.monotonic() + 600)
        channel.close()
        return frame.body

    hub, member, told = all_ranks(lambda: gather(meeting, 0), lambda: gather(meeting, 2), misfit)
    for each in (hub, member, told):
        assert text in str(each)
    assert isinstance(hub, RendezvousFailed)
    assert isinstance(member, RendezvousFailed)


def test_missing_ranks_are_named_at_the_deadline(meeting):
    started = time.monotonic()
    hub, member = all_ranks(
        lambda: gather(meeting, 0, size=4, timeout=2.0),
        lambda: gather(meeting, 2, size=4, timeout=2.0),
    )
    assert "rank 1, 3 of 4 did not come" in str(hub)
    assert "rank 1, 3 of 4 did not come" in str(member)
    assert time.monotonic() - started < 100.0
    assert not os.path.exists(meeting.directory)


def test_without_a_hub_the_members_give_up(meeting):
    assert "rank 0 did not listen" in str(gather(meeting, 1, timeout=0.1))


def test_a_meeting_that_is_over_is_said_at_once(meeting):
    meeting.remove()
    started = time.monotonic()
    assert "cannot be opened" in str(gather(meeting, 1, timeout=600.0))
    assert time.monotonic() - started < 100.0


def test_a_rank_that_leaves_before_all_have_met(meeting):
    def leaver():
        channel = Channel(connect(meeting), limit=HELLO_LIMIT)
        channel.send(Kind.HELLO, said(meeting), time.monotonic() + 600)
        time.sleep(0.1)
        channel.close()

    started = time.monotonic()
    hub, _ = all_ranks(lambda: gather(meeting, 0, timeout=600.0), leaver)
    assert f"rank 1 (pid {os.getpid()}) left before all ranks had met" in str(hub)
    assert time.monotonic() - started < 100.0


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


def test_a_second_hub_is_refused(meeting):
    first = threading.Thread(target=gather, args=(meeting, 0, 3, 3.0))
    first.start()
    connect(meeting).close()
    assert "cannot host the meeting" in str(gather(meeting, 0, timeout=0.5))
    first.join()


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


def test_a_killed_hub_is_named(meeting):
    """The hub is another process; it dies after the meeting."""
    code = (
        "import sys, time\n"
        "from weft.memory.rendezvous import Meeting, meet\n"
        "star = meet(Meeting(sys.argv[1], bytes.fromhex(sys.argv[2])), rank=0, size=2,"
        " device='cpu', timeout=600.0)\n"
        "time.sleep(600)\n"
    )
    hub = subprocess.Popen([sys.executable, "-c", code, meeting.directory, meeting.nonce.hex()])
    try:
        star = meet(meeting, rank=1, size=2, device="cpu", timeout=600.0)
        assert star.pids == [hub.pid, os.getpid()]
        hub.kill()
        with pytest.raises(RendezvousFailed, match=rf"rank 0 \(pid {hub.pid}\) died"):
            star.gather("test", 1, 600.0)
        with pytest.raises(RendezvousFailed, match=r"rank 0 .* died"):
            star.gather("test", 1, 600.0)
        star.close()
    finally:
        hub.kill()
        hub.wait()
