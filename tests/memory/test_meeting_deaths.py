"""A rank that dies ends the meeting for all, and nothing named is left."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.memory.meetings import LONG, SOON, all_ranks, answer, connect, gather, said
from weft.errors import RendezvousFailed
from weft.memory import peers
from weft.memory.rendezvous import meet

RANK = """
import sys, time
from weft.memory.rendezvous import Meeting, meet
control = meet(Meeting.at(sys.argv[1]), rank=int(sys.argv[2]), size=int(sys.argv[3]), device="cpu",
               timeout=300.0)
time.sleep(300)
"""


@contextlib.contextmanager
def process_of(meeting, rank, size):
    """A rank in a process of its own."""
    arguments = [meeting.address, str(rank), str(size)]
    process = subprocess.Popen([sys.executable, "-c", RANK, *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_while_it_waits_ends_the_meeting(meeting, victim):
    """For a rank that is there, for one that comes later, and for the directory."""
    with process_of(meeting, victim, 4) as process, ThreadPoolExecutor(1) as pool:
        connect(meeting, victim).close()
        inside = pool.submit(gather, meeting, 1, 4, LONG)
        time.sleep(0.2)
        process.kill()
        process.wait()
        started = time.monotonic()
        assert re.search(
            rf"rank {victim} \(pid {process.pid}\) (left before all|died while)"
            rf"|rank {victim} no longer listens",
            str(inside.result()),
        )
        assert not os.path.exists(meeting.directory)
        assert "cannot be opened" in str(gather(meeting, 3, 4, LONG))
        assert time.monotonic() - started < SOON


def test_a_name_where_nobody_listens_says_that_its_rank_is_gone(meeting):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:  # of a killed process
        left.bind(f"{meeting.directory}/0.bound")
        left.listen()
        os.link(f"{meeting.directory}/0.bound", f"{meeting.directory}/0")
    started = time.monotonic()
    assert "rank 0 no longer listens" in str(gather(meeting, 1, timeout=LONG))
    assert time.monotonic() - started < SOON
    assert not os.path.exists(meeting.directory)


def test_a_rank_that_does_not_listen_yet_is_waited_for(meeting, monkeypatch):
    """The socket has a name then, but not the one that others look for."""
    listens = threading.Event()
    real = socket.socket.listen

    def slowly(self, backlog):
        time.sleep(0.5)
        listens.set()
        real(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", slowly)
    ranks = [lambda r=r: gather(meeting, r, size=2) for r in range(2)]
    assert all_ranks(*ranks) == [[0, 1]] * 2
    assert listens.is_set()


@contextlib.contextmanager
def known_process():
    """A process that lives, and what a rank in it would send of itself."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process, {**peers.identity(), "pid": process.pid}
    finally:
        process.kill()
        process.wait()


def with_peers(meeting, rank, told, **options):
    """One rank that knows the processes of the others."""
    with peers.Peers() as known:
        for other, said in told.items():
            known.watch(other, said)
        try:
            meet(meeting, rank=rank, device="cpu", peers=known, **options)
        except RendezvousFailed as error:
            return str(error)
        return "met"


def test_a_rank_that_dies_before_it_comes_ends_the_meeting(meeting):
    with known_process() as (process, told), ThreadPoolExecutor(2) as pool:
        options = {"size": 3, "timeout": LONG}
        zero = pool.submit(with_peers, meeting, 0, {2: told}, **options)
        member = pool.submit(with_peers, meeting, 1, {}, **options)
        connect(meeting).close()
        time.sleep(0.1)
        assert not zero.done()
        started = time.monotonic()
        process.kill()
        text = f"rank 2 (pid {process.pid}) died before all ranks had met"
        assert text in zero.result()
        assert text in member.result()
        assert time.monotonic() - started < SOON
    assert not os.path.exists(meeting.directory)


def test_a_rank_that_dies_after_half_a_hello_ends_the_meeting(meeting):
    """Its connection says nothing: anybody's could end like that."""
    with known_process() as (process, told), ThreadPoolExecutor(1) as pool:
        zero = pool.submit(with_peers, meeting, 0, {1: told}, size=2, timeout=LONG)
        half = connect(meeting)
        half.send(said(meeting)[:40])
        half.close()
        time.sleep(0.1)
        assert not zero.done()
        process.kill()
        assert "rank 1 (pid " in zero.result()


@pytest.mark.parametrize("bound", [False, True])
def test_a_rank_that_dies_before_it_listens_ends_the_meeting(meeting, bound):
    if bound:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
            left.bind(f"{meeting.directory}/0.bound")
    with known_process() as (process, told), ThreadPoolExecutor(1) as pool:
        member = pool.submit(with_peers, meeting, 1, {0: told}, size=2, timeout=LONG)
        time.sleep(0.1)
        assert not member.done()
        process.kill()
        assert "rank 0 (pid " in member.result()
    assert not os.path.exists(meeting.directory)


def test_ranks_of_another_namespace_have_the_deadline(meeting):
    with known_process() as (process, told):
        told["namespace"] = "pid:[1]"
        process.kill()
        process.wait()
        found = with_peers(meeting, 0, {1: told}, size=2, timeout=0.2)
    assert "rank 1 of 2 did not come" in found
    assert "rank 1: it runs in another pid namespace" in found


@pytest.mark.parametrize(
    "told", [None, [], {}, {"pid": 0}, {"pid": "7"}, {"pid": True}, {"pid": 1 << 40}]
)
def test_what_tells_of_no_process_is_not_watched(told):
    with peers.Peers() as known:
        known.watch(1, told)
        known.check()
        assert known.pidfds() == []


def test_peers_leave_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with known_process() as (_, told), peers.Peers() as known:
        known.watch(1, told)
        known.watch(1, told)
        known.watch(2, peers.identity())
        assert len(os.listdir("/proc/self/fd")) == before + 2
        known.check()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("why", [None, "rank 3 had no memory"])
def test_whoever_started_the_ranks_can_end_the_meeting(meeting, why):
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(gather, meeting, r, 4, LONG) for r in (0, 1)]
        for rank in (0, 1):
            connect(meeting, rank).close()
        started = time.monotonic()
        if why is None:
            meeting.remove()
        else:
            meeting.end(why)
        told = why or "is over: another rank gave up, or the "
        said = [str(each.result()) for each in ranks]
        assert any(told in text for text in said)
        # One may see the other leave before it is told itself.
        assert all(told in text or "left before all ranks had met" in text for text in said)
        assert time.monotonic() - started < SOON
    meeting.end("it is over already")
    assert not os.path.exists(meeting.directory)


def test_nobody_returns_before_all_have_met(meeting):
    """Rank 1 has met all, and leaves as soon as it may; the stranger to it is slow."""
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(gather, meeting, r, 3, LONG) for r in (0, 1)]
        slow = [connect(meeting, rank) for rank in (0, 1)]
        for each in slow:
            each.send(said(meeting, rank=2))
            assert answer(each)["nonce"] == meeting.nonce.hex()
        time.sleep(0.2)
        assert not any(rank.done() for rank in ranks)
        for each in slow:  # it dies, and both are told
            each.close()
        for rank in ranks:
            assert "rank 2 (pid " in str(rank.result())
    assert not os.path.exists(meeting.directory)


def test_a_killed_rank_is_named(meeting):
    """After the meeting."""
    with process_of(meeting, 0, 2) as process:
        control = meet(meeting, rank=1, size=2, device="cpu", timeout=LONG)
        assert control.pids == [process.pid, os.getpid()]
        process.kill()
        for _ in range(2):
            with pytest.raises(RendezvousFailed, match=rf"rank 0 \(pid {process.pid}\) died"):
                control.gather("test", 1, LONG)
        control.close()
