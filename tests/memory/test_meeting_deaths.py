# SPDX-License-Identifier: Apache-2.0
"""Whatever ends the meeting for one rank ends it for all, with one reason."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.memory.meetings import LONG, SOON, answer, connect, gather, said
from weft.errors import RendezvousFailed
from weft.memory import liveness
from weft.memory.meeting import Meeting, meet

RANK = """
import sys, time
from weft.memory.meeting import Meeting, meet
rank = int(sys.argv[1])
meeting = Meeting.open() if rank == 0 else Meeting.at(sys.argv[3])
print(meeting.address, flush=True)
control = meet(meeting, rank=rank, size=int(sys.argv[2]), device="cpu", timeout=300.0)
time.sleep(300)
"""


@contextlib.contextmanager
def process_of(rank, size, meeting=None):
    """A rank in a process of its own, and the meeting, which rank 0 opens."""
    arguments = [str(rank), str(size), *([meeting.address] if meeting else [])]
    command = [sys.executable, "-c", RANK, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, Meeting.at(process.stdout.readline().strip())
        finally:
            process.kill()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_while_it_waits_ends_the_meeting(meeting, victim):
    """For the ranks that are there, and for one that comes later."""
    with process_of(victim, 4, meeting if victim else None) as (process, found):
        pool = ThreadPoolExecutor(2)
        places = {1: found} if victim == 0 else {0: meeting, 1: meeting}
        ranks = [pool.submit(gather, at, r, 4, LONG) for r, at in places.items()]
        time.sleep(0.5)
        process.kill()
        process.wait()
        started = time.monotonic()
        for rank in ranks:
            text = str(rank.result())
            assert f"rank {victim} (pid {process.pid}) died" in text
        pool.shutdown()
        assert "the meeting is over" in str(gather(found, 3, 4, LONG))
        assert time.monotonic() - started < SOON


@contextlib.contextmanager
def known_process():
    """A process that lives, and what a rank in it would send of itself."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process, {**liveness.identity(), "pid": process.pid}
    finally:
        process.kill()
        process.wait()


def with_peers(meeting, rank, told, **options):
    """One rank that knows the processes of the others."""
    with liveness.Peers() as known:
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
    with liveness.Peers() as known:
        known.watch(1, told)
        known.check()
        assert known.pidfds() == []


def test_peers_leave_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with known_process() as (_, told), liveness.Peers() as known:
        known.watch(1, told)
        known.watch(1, told)
        known.watch(2, liveness.identity())
        assert len(os.listdir("/proc/self/fd")) == before + 2
        known.check()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("ends", ["end", "close"])
def test_whoever_started_the_ranks_can_end_the_meeting(meeting, ends):
    """All get the reason: rank 0, a rank that it has let in, one that it has not, and a late one.

    `close` is for a launcher that saw rank 0 end before it let anybody in.
    """
    why = "rank 3 had no memory"
    with ThreadPoolExecutor(2) as pool:
        waiting = [1] if ends == "close" else [0, 1]
        ranks = [pool.submit(gather, meeting, r, 4, LONG) for r in waiting]
        with connect(meeting) as half:
            time.sleep(0.2)
            started = time.monotonic()
            getattr(meeting, ends)(why)
            assert [str(each.result()) for each in ranks] == [why] * len(ranks)
            assert answer(half)["fail"] == why
        assert "the meeting is over" in str(gather(meeting, 2, 4, LONG))
        assert time.monotonic() - started < SOON
    meeting.end("it is over already")


@pytest.mark.parametrize("leaver", [0, 1])
def test_the_reason_of_a_rank_that_raises_reaches_all(meeting, leaver, monkeypatch):
    """Not only that it left: it is sent before the socket closes."""
    real = meet.__globals__["_Hub" if leaver == 0 else "_take"]
    connect, others = Meeting.connect, threading.Semaphore(0)

    def connected(meeting):
        found = connect(meeting)
        others.release()
        return found

    def fails(*given):
        if leaver == 0:  # once the others are there to be told
            assert others.acquire(timeout=LONG)
            assert others.acquire(timeout=LONG)
        elif given[1].rank != leaver or "peer" not in given[2].body:
            return real(*given)
        else:  # all have come: one that comes later only hears that the meeting is over
            given[2].drop()
        raise ValueError("no memory for it")

    if leaver == 0:
        monkeypatch.setattr(Meeting, "connect", connected)
        monkeypatch.setattr(real, "_turn", fails)
    else:
        monkeypatch.setitem(meet.__globals__, "_take", fails)

    def rank(r):
        try:
            return gather(meeting, r, 3, LONG)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(rank, range(3)))
    assert isinstance(told.pop(leaver), ValueError)
    for each in told:
        assert isinstance(each, RendezvousFailed)
        assert "no memory for it" in str(each)


def test_nobody_returns_before_all_have_met(meeting):
    """Rank 1 has all its sockets; rank 2 is slow, and dies."""
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(gather, meeting, r, 3, LONG) for r in (0, 1)]
        with connect(meeting) as slow:
            slow.send(said(meeting, rank=2))
            assert answer(slow)["nonce"] == meeting.nonce.hex()
            time.sleep(0.2)
            assert not any(rank.done() for rank in ranks)
        for rank in ranks:
            assert "rank 2 (pid " in str(rank.result())
