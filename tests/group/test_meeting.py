# SPDX-License-Identifier: Apache-2.0
"""Ranks meet and leave no name in the system; a failure of one rank fails all."""

import contextlib
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.baseline import open_files
from tests.group.meetings import LONG, SOON, all_ranks, answer, connect, gather, make_hello
from weft import logs
from weft.errors import InvalidArgument, RendezvousFailed
from weft.group import liveness
from weft.group import meeting as module
from weft.group.meeting import ABI, Meeting, meet
from weft.launcher.processes import start_fork_server


def has_listener(meeting):
    """Whether a process listens for the meeting; connected sockets show the name as well."""
    with open("/proc/net/unix", encoding="ascii") as file:
        lines = [line.split() for line in file if line.endswith(f" @{meeting._socket_name[1:]}\n")]
    return any(flags == "00010000" for _, _, _, flags, *_ in lines)


@pytest.mark.parametrize(("size", "hub"), [(1, 0), (2, 1), (4, 2)])
def test_all_ranks_meet_at_any_hub_and_no_name_is_left_while_their_sockets_live(size, hub):
    meeting = Meeting.open(hub)
    assert has_listener(meeting)
    places = [meeting if r == hub else Meeting.from_address(meeting.address) for r in range(size)]
    options = {"size": size, "device": "cpu", "timeout": LONG}
    controls = all_ranks(*(lambda r=r: meet(places[r], rank=r, **options) for r in range(size)))
    assert not has_listener(meeting)
    assert [control.pids for control in controls] == [[os.getpid()] * size] * size
    gathered = all_ranks(*(lambda c=c: c.gather("test", c.rank, LONG) for c in controls))
    assert gathered == [list(range(size))] * size
    for control in controls:
        control.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"abi": 99}, f"abi {ABI} and 99"),
        ({"size": 3.0}, "size 3 and 3.0"),
        ({"device": "cuda"}, "device 'cpu' and 'cuda'"),
        ({"rank": 2}, "has rank 2, which another process has"),
        ({"rank": 3}, "has rank 3, which is not in 0..2"),
    ],
)
def test_mismatched_ranks_all_get_the_reason(meeting, changes, text):
    def misfit():
        time.sleep(0.1)  # rank 2 is in by then
        with connect(meeting) as connection:
            connection.send(make_hello(meeting, **changes))
            return answer(connection)["fail"]

    zero, member, reply = all_ranks(lambda: gather(meeting, 0), lambda: gather(meeting, 2), misfit)
    for each in (zero, member, reply):
        assert text in str(each)
    assert isinstance(zero, RendezvousFailed)
    assert isinstance(member, RendezvousFailed)


def test_missing_ranks_are_named_at_the_deadline_and_a_late_one_is_told_at_once(
    meeting, caplog, monkeypatch
):
    monkeypatch.setattr(logs, "FIRST_LOG_SECONDS", 0.1)
    started = time.monotonic()
    for error in all_ranks(*(lambda r=r: gather(meeting, r, 4, 0.3) for r in (0, 2))):
        assert "rank 1, 3 of 4 did not connect" in str(error)
    assert "in the meeting for rank 1, 3 of 4 to join" in caplog.text
    assert not has_listener(meeting)
    assert "the meeting is over" in str(gather(meeting, 1, timeout=30.0))
    assert time.monotonic() - started < 18.0


def test_a_hub_that_admits_no_rank_is_named_at_the_deadline(meeting):
    text = str(gather(meeting, 1, timeout=0.2))
    assert "rank 0, the hub, did not connect this rank to the others within 0.2 s" in text


@pytest.mark.parametrize(
    ("hub", "rank", "text"),
    [
        (0, 3, "rank is 3 and size is 3"),
        (4, 0, "the hub of the meeting is 4 and size is 3"),
        (0, 0, "this process has not opened the meeting"),
    ],
)
def test_ranks_out_of_range_and_a_hub_without_its_meeting_are_refused(hub, rank, text):
    with pytest.raises(InvalidArgument, match=text):
        meet(Meeting(hub, bytes(32)), rank=rank, size=3, device="cpu", timeout=1.0)


def test_no_descriptor_is_left_by_success_or_failure():
    def once():
        good, bad = Meeting.open(), Meeting.open()
        all_ranks(*(lambda r=r: gather(good, r) for r in range(3)))
        all_ranks(*(lambda r=r: gather(bad, r, timeout=0.05) for r in (0, 2)))
        return open_files()

    assert len({once() for _ in range(3)}) == 1


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_while_it_waits_ends_the_meeting(meeting, victim):
    """The meeting ends for the present ranks, and for one that comes later."""
    place = Meeting.from_address(meeting.address)
    args = (meeting if victim == 0 else place, victim, 4, LONG)
    process = start_fork_server().Process(target=gather, args=args)
    process.start()
    if victim == 0:
        meeting.listener.close()  # the process has it
    with ThreadPoolExecutor(2) as pool:
        places = {1: place} if victim == 0 else {0: meeting, 1: place}
        ranks = [pool.submit(gather, at, r, 4, LONG) for r, at in places.items()]
        time.sleep(0.3)
        process.kill()
        for rank in ranks:
            assert f"rank {victim} (pid {process.pid}) died" in str(rank.result(SOON))
        process.join()
    assert "the meeting is over" in str(gather(place, 3, 4, SOON))


@contextlib.contextmanager
def known_process():
    """Start a process and return what a rank in it would send about itself."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process, {**liveness.process_identity(), "pid": process.pid}
    finally:
        process.kill()
        process.wait()


def with_peers(meeting, rank, reply, **options):
    """Return one rank that knows the processes of the others."""
    with liveness.Peers() as known:
        for other, identity in reply.items():
            known.watch(other, identity)
        try:
            meet(meeting, rank=rank, device="cpu", peers=known, **options)
        except RendezvousFailed as error:
            return str(error)
        return "met"


@pytest.mark.parametrize("half", [False, True], ids=["nothing said", "half a hello"])
def test_a_rank_that_dies_before_it_has_come_ends_the_meeting(meeting, half):
    """A closed connection alone does not, because strangers close theirs, too."""
    with known_process() as (process, reply), ThreadPoolExecutor(2) as pool:
        known: list[Any] = [{2: reply}, {}]
        options = {"size": 3, "timeout": LONG}
        ranks = [pool.submit(with_peers, meeting, r, known[r], **options) for r in range(2)]
        with connect(meeting) as connection:
            if half:
                connection.send(make_hello(meeting)[:40])
        time.sleep(0.1)
        assert not ranks[0].done()
        process.kill()
        text = f"rank 2 (pid {process.pid}) died before all ranks had connected"
        for rank in ranks:
            assert text in rank.result(SOON)


def test_ranks_of_another_namespace_have_the_deadline(meeting):
    with known_process() as (process, reply):
        reply["namespace"] = "pid:[1]"
        process.kill()
        process.wait()
        text = with_peers(meeting, 0, {1: reply}, size=2, timeout=0.2)
    assert "rank 1 of 2 did not connect" in text
    assert "rank 1: it runs in another pid namespace" in text


def test_an_invalid_identity_is_not_watched_and_peers_leave_no_descriptor():
    before = open_files()
    with known_process() as (_, reply), liveness.Peers() as known:
        invalid: list[Any] = [None, [], {}, *({"pid": pid} for pid in (0, "7", True, 1 << 40))]
        for each in invalid:
            known.watch(1, each)
        assert known.pidfds() == []
        known.watch(1, reply)
        known.watch(1, reply)
        known.watch(2, liveness.process_identity())
        assert open_files() == before + 2
        known.check()
    assert open_files() == before


@pytest.mark.parametrize("ends", ["abort", "close"])
def test_the_process_that_started_the_ranks_can_end_the_meeting(meeting, ends):
    """`close` is for a launcher that saw rank 0 end before it admitted any rank."""
    why = "rank 3 had no memory"
    with ThreadPoolExecutor(2) as pool:
        waiting = [1] if ends == "close" else [0, 1]
        ranks = [pool.submit(gather, meeting, r, 4, LONG) for r in waiting]
        with connect(meeting) as half:
            time.sleep(0.2)
            getattr(meeting, ends)(why)
            assert [str(each.result(SOON)) for each in ranks] == [why] * len(ranks)
            assert answer(half)["fail"] == why
        assert "the meeting is over" in str(gather(meeting, 2, 4, SOON))
    meeting.abort("it is over already")


@pytest.mark.parametrize("leaver", [0, 1])
def test_the_reason_of_a_rank_that_raises_reaches_all_before_its_socket_ends(
    meeting, leaver, monkeypatch
):
    connect, others = Meeting.connect, threading.Semaphore(0)
    read = module._handle_hub_message

    def connected(meeting):
        connection = connect(meeting)
        others.release()
        return connection

    def fail_as_hub(*_):
        for _rank in range(2):  # once the others are there to be told
            assert others.acquire(timeout=LONG)
        raise ValueError("no memory for it")

    def fail_as_rank_1(*args):
        if args[1].rank != 1 or "peer" not in args[2].body:
            return read(*args)
        args[2].close_fd()  # all have come: one that comes later only hears that it is over
        raise ValueError("no memory for it")

    if leaver == 0:
        monkeypatch.setattr(Meeting, "connect", connected)
        monkeypatch.setattr(module._Hub, "_handle_event", fail_as_hub)
    else:
        monkeypatch.setattr(module, "_handle_hub_message", fail_as_rank_1)
    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(gather, meeting, r, 3, LONG) for r in range(3)]
        with pytest.raises(ValueError, match="no memory"):
            ranks.pop(leaver).result()
        for each in ranks:
            assert isinstance(each.result(), RendezvousFailed)
            assert "no memory for it" in str(each.result())


def test_no_rank_returns_before_all_have_met(meeting):
    """Rank 1 has all its sockets; rank 2 is slow, and dies."""
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(gather, meeting, r, 3, LONG) for r in (0, 1)]
        with connect(meeting) as slow:
            slow.send(make_hello(meeting, rank=2))
            assert answer(slow)["nonce"] == meeting.nonce.hex()
            time.sleep(0.2)
            assert not any(rank.done() for rank in ranks)
        for rank in ranks:
            assert "rank 2 (pid " in str(rank.result())
