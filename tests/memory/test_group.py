# SPDX-License-Identifier: Apache-2.0
"""The control messages of a group: votes, agreements, descriptors, and ranks that die or stall."""

import contextlib
import os
import re
import resource
import signal
import threading
import time

import pytest

from tests.memory.baseline import raised
from weft.errors import (
    CreationFailed,
    GeometryMismatch,
    InvalidArgument,
    OutOfOrder,
    RendezvousFailed,
    WeftError,
)
from weft.memory.group import Group
from weft.memory.launch import launch
from weft.memory.meeting import Meeting


def gather_everything(group):
    values = [None, True, -7, 2.5, "té", [1, (2, 3)], {"a": {"b": [group.rank]}}]
    got = group.all_gather({"rank": group.rank, "values": values})
    group.barrier()
    return got


@pytest.mark.parametrize("device", ["threads", "cpu"])
def test_all_gather_gives_every_rank_the_same(device):
    results = launch(gather_everything, ranks=3, device=device)
    assert results == [results[0]] * 3
    assert [each["rank"] for each in results[0]] == [0, 1, 2]
    assert results[0][1]["values"][5:] == [[1, [2, 3]], {"a": {"b": [1]}}]


def gather_large(group):
    return [len(each) for each in group.all_gather("x" * ((1 << 20) - 2))]


def test_values_up_to_a_mebibyte_pass():
    assert launch(gather_large, ranks=3, device="threads") == [[(1 << 20) - 2] * 3] * 3


def refuse_values(group):
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    refused = [
        raised(group.all_gather, value)[:2]
        for value in ("x" * (1 << 20), {1, 2}, float("nan"), object(), b"bytes", deep)
    ]
    group.barrier()
    return refused


def test_values_that_cannot_travel_are_refused():
    for refused in launch(refuse_values, ranks=2, device="threads"):
        assert [kind for kind, _ in refused] == ["InvalidArgument"] * 6
        assert "1048578 bytes of JSON and carries at most 1048576" in refused[0][1]
        assert "is not JSON" in refused[1][1]


def vote_on(group, failing):
    error = ValueError(f"no {group.rank}") if group.rank in failing else None
    try:
        group.vote(error, doing="a test")
    except CreationFailed as failed:
        return str(failed), failed.__cause__ is error
    return None


def test_a_vote_fails_everywhere_with_one_text():
    assert launch(vote_on, [], ranks=3, device="threads") == [None] * 3
    text = "a test failed on rank 1 of 3: ValueError: no 1"
    assert launch(vote_on, [1], ranks=3, device="threads") == [(text, True)] * 3
    text = "a test failed on rank 0 of 3 (and on rank 2): ValueError: no 0"
    assert launch(vote_on, [0, 2], ranks=3, device="threads") == [(text, True)] * 3


def vote_with_undo(group, failing):
    undone = []
    error = ValueError("no") if group.rank in failing else None
    with contextlib.suppress(CreationFailed):
        group.vote(error, doing="a test", undo=lambda: undone.append(group.rank))
    return undone


def test_whoever_could_gives_back_what_it_made_when_another_could_not():
    assert launch(vote_with_undo, [], ranks=3, device="threads") == [[], [], []]
    assert launch(vote_with_undo, [1], ranks=3, device="threads") == [[0], [], [2]]


def run_together(group):
    def step():
        if group.rank == 2:
            raise OSError(12, "no memory")
        return group.rank

    own = group.together(lambda: group.rank, doing="counting")
    return own, raised(group.together, step, doing="stepping")[:2]


def test_together_returns_or_fails_everywhere():
    results = launch(run_together, ranks=3, device="threads")
    assert [own for own, _ in results] == [0, 1, 2]
    text = "stepping failed on rank 2 of 3: OSError: [Errno 12] no memory"
    assert [error for _, error in results] == [["CreationFailed", text]] * 3


def disagree(group, values):
    return raised(group.agree, values[group.rank], what="geometry")[:2]


def test_agree_names_two_ranks_and_what_differs():
    same = [{"hidden": 8, "dtype": "bf16"}] * 3
    assert launch(disagree, same, ranks=3, device="threads") == [["nothing", ""]] * 3
    one = [*same[:2], {"hidden": 16, "dtype": "bf16"}]
    for kind, text in launch(disagree, one, ranks=3, device="threads"):
        assert kind == GeometryMismatch.__name__
        assert "geometry differs: rank 0 has hidden=8 and rank 2 has hidden=16" in text
    plain = launch(disagree, [4, 5], ranks=2, device="threads")
    assert "rank 0 has 4 and rank 1 has 5" in plain[0][1]
    absent = launch(disagree, [{"a": 1}, {"a": 1, "b": None}], ranks=2, device="threads")
    assert "rank 0 has no b and rank 1 has b=None" in absent[0][1]


def exchange(group):
    own = os.memfd_create(f"test-{group.rank}")
    os.write(own, bytes([65 + group.rank]))
    try:
        fds = group.exchange_fds(own)
    finally:
        os.close(own)
    try:
        return bytes(os.pread(fd, 1, 0)[0] for fd in fds), [os.get_inheritable(f) for f in fds]
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("device", ["threads", "cpu"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_descriptors_reach_every_rank_in_order(device, ranks):
    letters = bytes(range(65, 65 + ranks))
    assert launch(exchange, ranks=ranks, device=device) == [(letters, [False] * ranks)] * ranks


def die(group, victim):
    group.barrier()
    if group.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return [
        raised(group.all_gather, 1),
        raised(group.barrier),
        raised(group.vote, None, doing="on"),
        raised(group.exchange_fds, 0),
    ]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_is_named_at_once(victim):
    told = launch(die, victim, ranks=3, tolerate_deaths=True)
    for rank in {0, 1, 2} - {victim}:
        for kind, text, took in told[rank]:
            assert kind == RendezvousFailed.__name__
            assert took < 100.0
            assert f"rank {victim} (pid " in text
            assert "died" in text


def stall(group, sleeper, others_gave_up):
    group.timeout = 2.0
    if group.rank == sleeper:
        others_gave_up.wait()
    result = raised(group.barrier)
    if group.rank != sleeper:
        group.close()  # so the sleeper comes when they have left
        others_gave_up.wait()
    return result


@pytest.mark.parametrize("sleeper", [0, 1])
def test_a_rank_that_does_not_come_is_named_at_the_deadline(sleeper):
    results = launch(stall, sleeper, threading.Barrier(3), ranks=3, device="threads")
    for kind, text, _ in results:
        assert kind == RendezvousFailed.__name__
        assert f"rank {sleeper} (pid {os.getpid()}) did not enter barrier within 2 s" in text


def different_calls(group):
    if group.rank == 1:
        return raised(group.barrier)[:2]
    return raised(group.all_gather, 5)[:2]


def test_ranks_in_different_calls_are_told_both():
    for kind, text in launch(different_calls, ranks=3, device="threads"):
        assert kind == RendezvousFailed.__name__
        assert re.search(r"rank \d( \(pid \d+\))? is in all_gather \(call 0\)", text)
        assert re.search(r"rank 1( \(pid \d+\))? is in barrier \(call 0\)", text)


def two_threads(group, refused):
    """One thread of rank 1 waits in a barrier; another one tries to."""
    if group.rank == 0:
        refused.wait()
        group.barrier()
        return None
    waiting = threading.Thread(target=group.barrier)
    waiting.start()
    time.sleep(0.5)  # it is in the barrier by then
    error = raised(group.barrier)[:2]
    refused.set()
    waiting.join()
    return error


def test_two_threads_of_one_rank_are_refused():
    kind, text = launch(two_threads, threading.Event(), ranks=2, device="threads")[1]
    assert kind == OutOfOrder.__name__
    assert "two threads of rank 1" in text


def fork(group):
    """A forked child may not speak for its parent, nor end its connection by leaving."""
    meeting = group.open_meeting()
    suspects = [1 - group.rank]
    child = os.fork()
    if child == 0:
        calls = (group.barrier, group.enter, lambda: group.recover(suspects=suspects))
        code = 0 if {raised(call)[0] for call in calls} == {"OutOfOrder"} else 1
        group.abort("it is no rank")
        group.close()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    group.barrier()
    meeting.connect().close()  # the ranks may still meet there
    group.barrier()
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_leaves_the_group_alone():
    assert launch(fork, ranks=2) == [0, 0]


def dies_with_a_child(group):
    """A forked child has its parent's sockets, which so do not end with rank 1."""
    child = os.fork() if group.rank == 1 else None
    if child == 0:
        time.sleep(60.0)
        os._exit(0)
    child = group.all_gather(child)[1]
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised(group.barrier, timeout=40.0)
    group.recover(timeout=40.0)
    group.barrier()
    if group.rank == 0:
        os.kill(child, signal.SIGKILL)
    return error


def test_a_death_is_named_while_a_forked_child_lives_on():
    survivors = launch(dies_with_a_child, ranks=3, tolerate_deaths=True)[::2]
    for kind, text, took in survivors:
        assert kind == RendezvousFailed.__name__
        assert re.fullmatch(r"rank 1 \(pid \d+\) died while the group was in barrier", text), text
        assert took < 20.0


def at_its_limit(group):
    """Rank 1 may not open one more descriptor when those of others come."""
    group.barrier()
    taken = [os.open(os.devnull, os.O_RDONLY)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if group.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        os.close(taken.pop())  # for the duplicate of its own that it sends
    error = raised(group.exchange_fds, taken[0])
    if error[0] == "nothing":  # it was through before rank 1 failed, which had sent its part
        error = raised(group.barrier)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for fd in taken:
        os.close(fd)
    return error[:2]


def test_a_rank_without_room_for_a_descriptor_is_named_on_all():
    said = launch(at_its_limit, ranks=3)
    assert said[0] == said[1] == said[2]
    assert re.fullmatch(
        r"rank 1 \(pid \d+\) cannot take its part of exchange_fds: it is at its limit of 64 open "
        r"descriptors; raise it with `ulimit -n`",
        said[0][1],
    ), said


def generations(group):
    first = [group.next_generation() for _ in range(3)]
    for _ in range(0xFFFF - 4):
        group.next_generation()
    return first, [group.next_generation() for _ in range(2)]


def test_generations_wrap_and_are_never_zero():
    assert launch(generations, ranks=1, device="threads") == [([1, 2, 3], [0xFFFF, 1])]


def close_twice(group):
    group.close()
    group.close()
    return raised(group.barrier)[0], repr(group)


def test_close_is_idempotent():
    assert launch(close_twice, ranks=1, device="threads") == [
        ("OutOfOrder", "Group(rank=0, size=1, device=cpu)")
    ]


def test_a_dropped_group_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    launch(drop, ranks=2, device="threads")
    assert len(os.listdir("/proc/self/fd")) == before


def drop(group):
    group.barrier()


def wrong_everywhere(group, errors):
    mine = errors[group.rank]
    try:
        group.vote(mine, doing="it")
    except WeftError as failed:
        group.barrier()
        return type(failed).__name__, str(failed), failed.__cause__ is mine
    return None


@pytest.mark.parametrize(
    ("errors", "kind", "text"),
    [
        ([InvalidArgument("x is 7"), InvalidArgument("x is 8")], "InvalidArgument", "x is 7"),
        ([OutOfOrder("now"), OutOfOrder("now")], "OutOfOrder", "now"),
        (
            [InvalidArgument("x is 7"), OutOfOrder("now")],
            "CreationFailed",
            "it failed on rank 0 of 2 (and on rank 1): InvalidArgument: x is 7",
        ),
        (
            [None, InvalidArgument("x is 8")],
            "CreationFailed",
            "it failed on rank 1 of 2: InvalidArgument: x is 8",
        ),
        (
            [ValueError("x"), ValueError("x")],  # not weft's: nobody promised it
            "CreationFailed",
            "it failed on rank 0 of 2 (and on rank 1): ValueError: x",
        ),
    ],
)
def test_what_is_wrong_on_every_rank_is_raised_as_what_it_is(ranks, errors, kind, text):
    told = ranks(2, "threads")(wrong_everywhere, errors)
    assert [(k, t) for k, t, _ in told] == [(kind, text)] * 2
    assert all(cause for (_, _, cause), error in zip(told, errors, strict=True) if error)


@pytest.mark.parametrize("size", [0, -1, 73, 1 << 31, 1 << 64, 2.0, True, "2"])
def test_a_size_that_no_group_has_is_refused(size):
    with (
        contextlib.closing(Meeting.open()) as opened,
        pytest.raises(InvalidArgument, match="size is"),
    ):
        Group.join(opened, rank=0, size=size, device="cpu", timeout=1.0)
