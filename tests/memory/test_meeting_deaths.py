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

from tests.memory.meetings import LONG, SOON, all_ranks, connect, gather
from weft.errors import RendezvousFailed
from weft.memory import peers
from weft.memory.rendezvous import meet
from weft.memory.rendezvous_server import RendezvousServer

HUB = """
import sys, time
from weft.memory.rendezvous import Meeting, meet
control = meet(Meeting(sys.argv[1], bytes.fromhex(sys.argv[2])), rank=0, size=int(sys.argv[3]),
            device="cpu", timeout=300.0)
time.sleep(300)
"""


@contextlib.contextmanager
def hub_process(meeting, size):
    """Rank 0 in a process of its own."""
    arguments = [meeting.directory, meeting.nonce.hex(), str(size)]
    process = subprocess.Popen([sys.executable, "-c", HUB, *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_hub_that_is_killed_while_it_hosts_ends_the_meeting(meeting):
    """For a rank that is in, for one that comes later, and for the directory."""
    with hub_process(meeting, 3) as hub, ThreadPoolExecutor(1) as pool:
        connect(meeting).close()
        inside = pool.submit(gather, meeting, 1, 3, LONG)
        time.sleep(0.2)
        hub.kill()
        hub.wait()
        started = time.monotonic()
        assert re.search(
            rf"rank 0 \(pid {hub.pid}\) left before all|rank 0 no longer listens",
            str(inside.result()),
        )
        assert not os.path.exists(meeting.directory)
        assert "cannot be opened" in str(gather(meeting, 2, timeout=LONG))
        assert time.monotonic() - started < SOON


def test_a_name_where_nobody_listens_says_that_rank_0_is_gone(meeting):
    with socket.socket(socket.AF_UNIX) as left:  # as a killed process leaves it
        left.bind(f"{meeting.directory}/hub.bound")
        left.listen()
        os.link(f"{meeting.directory}/hub.bound", f"{meeting.directory}/hub")
    started = time.monotonic()
    assert "rank 0 no longer listens" in str(gather(meeting, 1, timeout=LONG))
    assert time.monotonic() - started < SOON
    assert not os.path.exists(meeting.directory)


def test_a_hub_that_was_killed_before_it_listened_is_waited_for(meeting, monkeypatch):
    """The socket has a name then, but not the one that others look for."""
    listens = threading.Event()
    real = socket.socket.listen

    def slowly(self, backlog):
        time.sleep(0.5)
        listens.set()
        real(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", slowly)
    hub, member = all_ranks(lambda: gather(meeting, 0, size=2), lambda: gather(meeting, 1, size=2))
    assert listens.is_set()
    assert hub == member == [0, 1]


@contextlib.contextmanager
def known_process():
    """A process that lives, and what a rank in it would send of itself."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        started = peers._started(process.pid)
        namespace = peers._namespace()
        yield process, {"pid": process.pid, "started": started, "namespace": namespace}
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


def test_a_member_that_dies_before_it_comes_ends_the_meeting(meeting):
    with known_process() as (process, told), ThreadPoolExecutor(2) as pool:
        options = {"size": 3, "timeout": LONG}
        hub = pool.submit(with_peers, meeting, 0, {2: told}, **options)
        member = pool.submit(with_peers, meeting, 1, {}, **options)
        connect(meeting).close()
        time.sleep(0.1)
        assert not hub.done()
        started = time.monotonic()
        process.kill()
        text = f"rank 2 (pid {process.pid}) died before all ranks had met"
        assert text in hub.result()
        assert text in member.result()
        assert time.monotonic() - started < SOON
    assert not os.path.exists(meeting.directory)


def test_a_member_that_dies_after_half_a_hello_ends_the_meeting(meeting):
    """Its connection says nothing: anybody's could end like that."""
    with known_process() as (process, told), ThreadPoolExecutor(1) as pool:
        hub = pool.submit(with_peers, meeting, 0, {1: told}, size=2, timeout=LONG)
        half = connect(meeting)
        half.sendall(b"weft" + b"\1\0\0\0")
        half.close()
        time.sleep(0.1)
        assert not hub.done()
        process.kill()
        assert "rank 1 (pid " in hub.result()


@pytest.mark.parametrize("bound", [False, True])
def test_a_hub_that_dies_before_it_listens_ends_the_meeting(meeting, bound):
    if bound:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(f"{meeting.directory}/hub.bound")
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


def test_a_process_id_that_went_to_another_process_is_no_rank(meeting):
    with known_process() as (_, told):
        told["started"] += 1
        found = with_peers(meeting, 0, {1: told}, size=2, timeout=LONG)
    assert "died before all ranks had met" in found


@pytest.mark.parametrize(
    "said",
    [None, [], {}, {"pid": 0}, {"pid": "7", "started": 1}, {"pid": 1 << 40, "started": 1}],
)
def test_what_tells_of_no_process_is_not_watched(said):
    with peers.Peers() as known:
        known.watch(1, said)
        assert not known.knows(1)
        assert known.dead() == []


def test_peers_leave_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with known_process() as (_, told), peers.Peers() as known:
        known.watch(1, told)
        known.watch(1, told)
        known.watch(2, peers.identity())
        assert len(os.listdir("/proc/self/fd")) == before + 2
        assert known.dead() == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_whoever_started_the_ranks_can_end_the_meeting(meeting, monkeypatch):
    admitted, admit = threading.Event(), RendezvousServer._admit

    def admits(self, *hello):
        admit(self, *hello)
        admitted.set()

    monkeypatch.setattr(RendezvousServer, "_admit", admits)
    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(gather, meeting, r, 4, LONG) for r in (0, 1)]
        connect(meeting).close()
        assert admitted.wait(LONG)  # who comes later finds no meeting, and cannot know why
        started = time.monotonic()
        meeting.end("rank 3 had no memory \ud800")
        for rank in ranks:
            assert "rank 3 had no memory" in str(rank.result())
        assert time.monotonic() - started < SOON
    assert not os.path.exists(meeting.directory)
    meeting.end("it is over already")
    assert not os.path.exists(meeting.directory)


def test_the_end_reaches_members_without_a_hub(meeting):
    meeting.end("rank 0 had no memory")
    assert str(gather(meeting, 1, timeout=LONG)) == "rank 0 had no memory"


def test_a_killed_hub_is_named(meeting):
    """The hub is another process; it dies after the meeting."""
    with hub_process(meeting, 2) as hub:
        control = meet(meeting, rank=1, size=2, device="cpu", timeout=LONG)
        assert control.pids == [hub.pid, os.getpid()]
        hub.kill()
        with pytest.raises(RendezvousFailed, match=rf"rank 0 \(pid {hub.pid}\) died"):
            control.gather("test", 1, LONG)
        with pytest.raises(RendezvousFailed, match=r"rank 0 .* died"):
            control.gather("test", 1, LONG)
        control.close()
