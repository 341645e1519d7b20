# SPDX-License-Identifier: Apache-2.0
"""Control messages of a group: votes, agreements, descriptors; ranks that die, hang or leave."""

import contextlib
import os
import re
import resource
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest

from tests.baseline import NESTED, call_outcome, die, open_files, raises_soon
from tests.ranks import on_ranks
from weft.errors import (
    CreationFailed,
    GeometryMismatch,
    InvalidArgument,
    OutOfOrder,
    RendezvousFailed,
    WeftError,
)
from weft.group.group import Group
from weft.launcher.launch import launch


@on_ranks(3, "threads", "cpu")
def test_all_gather_gives_every_rank_the_same(group):
    values = [None, True, -7, 2.5, "té", [1, (2, 3)]]
    gathered = group.all_gather({"rank": group.rank, "values": values})
    group.barrier()
    values[-1] = [1, [2, 3]]
    assert gathered == [{"rank": rank, "values": values} for rank in range(3)]


@on_ranks(2, "threads")
def test_values_of_up_to_a_mebibyte_of_json_travel(group):
    most = (1 << 20) - 2
    assert [len(each) for each in group.all_gather("x" * most)] == [most] * 2
    with pytest.raises(
        InvalidArgument, match="1048578 bytes of JSON, which exceed the limit of 1048576"
    ):
        group.all_gather("x" * (1 << 20))
    for value in ({1, 2}, float("nan"), object(), b"bytes", NESTED):
        with pytest.raises(InvalidArgument, match="is not JSON"):
            group.all_gather(value)
    group.barrier()


@pytest.mark.parametrize(
    ("failing", "text"),
    [
        ([], ""),
        ([1], "a test failed on rank 1 of 3: ValueError: no 1"),
        ([0, 2], "a test failed on rank 0 of 3 (and on rank 2): ValueError: no 0"),
    ],
)
@on_ranks(3, "threads")
def test_a_vote_fails_everywhere_with_one_text_and_undoes_what_succeeded(group, failing, text):
    undone: list[int] = []
    error = ValueError(f"no {group.rank}") if group.rank in failing else None
    expected: Any = pytest.raises(CreationFailed) if failing else contextlib.nullcontext()
    with expected as caught:
        group.vote(error, action="a test", undo=partial(undone.append, group.rank))
    assert not failing or (str(caught.value), caught.value.__cause__) == (text, error)
    assert undone == ([group.rank] if failing and error is None else [])


@pytest.mark.parametrize(
    ("errors", "kind", "text"),
    [
        ([InvalidArgument("x is 7"), InvalidArgument("x is 8")], InvalidArgument, "x is 7"),
        ([OutOfOrder("now"), OutOfOrder("now")], OutOfOrder, "now"),
        (
            [InvalidArgument("x is 7"), OutOfOrder("now")],
            CreationFailed,
            "it failed on rank 0 of 2 (and on rank 1): InvalidArgument: x is 7",
        ),
        (
            [None, InvalidArgument("x is 8")],
            CreationFailed,
            "it failed on rank 1 of 2: InvalidArgument: x is 8",
        ),
        (
            [ValueError("x"), ValueError("x")],  # not weft's: nothing documents it
            CreationFailed,
            "it failed on rank 0 of 2 (and on rank 1): ValueError: x",
        ),
    ],
)
@on_ranks(2, "threads")
def test_the_same_error_on_every_rank_is_raised_as_it_is(group, errors, kind, text):
    with pytest.raises(WeftError) as caught:
        group.vote(errors[group.rank], action="it")
    group.barrier()
    assert (type(caught.value), str(caught.value)) == (kind, text)
    assert caught.value.__cause__ is errors[group.rank] or errors[group.rank] is None


@on_ranks(3, "threads")
def test_together_returns_or_fails_everywhere(group):
    def step():
        if group.rank == 2:
            raise OSError(12, "no memory")

    assert group.run_collective(lambda: group.rank, action="counting") == group.rank
    text = "stepping failed on rank 2 of 3: OSError: [Errno 12] no memory"
    assert call_outcome(group.run_collective, step, action="stepping")[:2] == [
        "CreationFailed",
        text,
    ]


@on_ranks(3, "threads")
def test_agree_names_two_ranks_and_what_differs(group):
    same = {"hidden": 8, "dtype": "bf16"}
    group.agree(same, label="geometry")
    for values, text in (
        ([same, same, {**same, "hidden": 16}], "rank 0 has hidden=8 and rank 2 has hidden=16"),
        ([4, 5, 4], "rank 0 has 4 and rank 1 has 5"),
        ([{"a": 1}, {"a": 1, "b": None}, {"a": 1}], "rank 0 has no b and rank 1 has b=None"),
    ):
        with pytest.raises(GeometryMismatch, match=f"geometry differs: {text}"):
            group.agree(values[group.rank], label="geometry")


@pytest.mark.parametrize("size", [1, 2, 5])
@on_ranks("size", "threads", "cpu")
def test_descriptors_reach_every_rank_in_order(group, size):
    own = os.memfd_create(f"test-{group.rank}")
    os.write(own, bytes([group.rank]))
    fds = group.exchange_fds(own)
    assert [(os.pread(fd, 1, 0)[0], os.get_inheritable(fd)) for fd in fds] == [
        (rank, False) for rank in range(size)
    ]
    for fd in (own, *fds):
        os.close(fd)


@pytest.mark.parametrize("victim", [0, 2])
@on_ranks(3, "cpu", dies="victim")
def test_a_rank_that_dies_is_named_at_once(group, victim):
    group.barrier()
    if group.rank == victim:
        die()
    vote, gather = partial(group.vote, None, action="on"), partial(group.all_gather, 1)
    for call in (gather, group.barrier, vote, partial(group.exchange_fds, 0)):
        with raises_soon(RendezvousFailed, rf"rank {victim} \(pid .*died"):
            call()


@pytest.mark.parametrize("sleeper", [0, 1])
def test_a_rank_that_does_not_come_is_named_at_the_deadline(ranks, sleeper):
    others_gave_up = threading.Barrier(3)

    def body(group):
        group.barrier()
        group.timeout = 1.0
        if group.rank == sleeper:
            others_gave_up.wait()
        text = rf"rank {sleeper} \(pid {os.getpid()}\) did not enter barrier within 1 s"
        with pytest.raises(RendezvousFailed, match=text):
            group.barrier()
        if group.rank != sleeper:
            group.close()  # so the sleeper comes when they have left
            others_gave_up.wait()

    ranks(3, "threads")(body)


@on_ranks(3, "threads")
def test_ranks_in_different_calls_name_both(group):
    with pytest.raises(RendezvousFailed) as caught:
        group.barrier() if group.rank == 1 else group.all_gather(5)
    assert re.search(r"rank \d( \(pid \d+\))? is in all_gather \(call 0\)", str(caught.value))
    assert re.search(r"rank 1( \(pid \d+\))? is in barrier \(call 0\)", str(caught.value))


def test_two_threads_of_one_rank_are_refused(ranks):
    refused = threading.Event()

    def body(group):
        if group.rank == 0:
            refused.wait()
            group.barrier()
            return
        waiting = threading.Thread(target=group.barrier)
        waiting.start()
        time.sleep(0.5)  # it is in the barrier by then
        with pytest.raises(OutOfOrder, match="two threads of rank 1"):
            group.barrier()
        refused.set()
        waiting.join()

    ranks(2, "threads")(body)


@on_ranks(2, "cpu")
def test_a_forked_child_leaves_the_group_alone(group):
    """A child may not act for its parent, nor end its connections or the meeting by exiting."""
    meeting = group.open_meeting()
    child = os.fork()
    if child == 0:
        calls = (group.barrier, group.enter, partial(group.recover, suspects=[1 - group.rank]))
        code = 0 if {call_outcome(call)[0] for call in calls} == {"OutOfOrder"} else 1
        group.abort("it is no rank")
        group.close()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    group.barrier()
    meeting.connect().close()  # the ranks may still meet there
    group.barrier()


@on_ranks(3, "cpu", dies=[1])
def test_a_death_is_named_while_a_forked_child_lives(group):
    """The child has its parent's sockets, which therefore stay open when rank 1 dies."""
    child = os.fork() if group.rank == 1 else None
    if child == 0:
        time.sleep(60.0)
        os._exit(0)
    child = group.all_gather(child)[1]
    if group.rank == 1:
        die()
    text = r"^rank 1 \(pid \d+\) died while the group was in barrier$"
    with raises_soon(RendezvousFailed, text, 20.0):
        group.barrier(timeout=40.0)
    group.recover(timeout=40.0)
    group.barrier()
    if group.rank == 0:
        os.kill(child, signal.SIGKILL)


@on_ranks(3, "cpu")
def test_a_rank_without_room_for_a_descriptor_is_named_on_all(group):
    group.barrier()
    fds = [os.open(os.devnull, os.O_RDONLY)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if group.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        with contextlib.suppress(OSError):
            while True:
                fds.append(os.dup(fds[0]))
        os.close(fds.pop())  # for the duplicate of its own that it sends
    error = call_outcome(group.exchange_fds, fds[0])
    if error[0] == "nothing":  # it was through before rank 1 failed, which had sent its part
        error = call_outcome(group.barrier)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert re.fullmatch(
        r"rank 1 \(pid \d+\) cannot receive its part of exchange_fds: it is at its limit of 64 "
        "open "
        r"descriptors; raise it with `ulimit -n`",
        error[1],
    ), error


@on_ranks(1, "threads")
def test_generations_wrap_and_are_never_zero(group):
    numbers = [group.next_generation() for _ in range(0x10000)]
    assert numbers[:3] == [1, 2, 3]
    assert numbers[-2:] == [0xFFFF, 1]


@pytest.mark.parametrize("size", [0, 73, 1 << 64, 2.0, True, "2"])
def test_an_invalid_size_is_refused(meeting, size):
    with pytest.raises(InvalidArgument, match="size is"):
        Group.join(meeting, rank=0, size=size, device="cpu", timeout=1.0)


def test_an_unclosed_group_leaves_no_descriptor():
    before = open_files()
    launch(Group.barrier, ranks=2, device="threads")
    assert open_files() == before


@on_ranks(3, "threads")
def test_a_rank_that_closed_its_group_is_named(group):
    if group.rank == 1:
        group.close()
        group.close()
        assert repr(group) == "Group(rank=1, size=3, device=cpu)"
        with pytest.raises(OutOfOrder, match="the group is closed; create a new one"):
            group.barrier()
        return
    with pytest.raises(RendezvousFailed, match=rf"rank 1 \(pid {os.getpid()}\) closed its group"):
        group.barrier()


@pytest.mark.parametrize("culprit", [0, 2])
@on_ranks(3, "threads")
def test_a_rank_that_raises_sends_its_reason(group, culprit):
    group.barrier()  # where all came, even if the culprit has left when the last one looks
    why = (
        rf"^rank {culprit} \(pid {os.getpid()}\) left the group while the others were in barrier: "
        "it raised KeyError: 'no such expert'$"
    )
    if group.rank == culprit:
        with pytest.raises(KeyError), group:
            raise KeyError("no such expert")
        return
    with raises_soon(RendezvousFailed, why, 60.0), group:
        group.barrier(timeout=200.0)


@pytest.mark.parametrize("leaver", [0, 1])
@on_ranks(3, "threads")
def test_the_reason_waits_for_ranks_that_come_later(group, leaver):
    """One rank waits in the barrier when another leaves; the last one comes when sending fails."""
    group.barrier()
    if group.rank == leaver:
        with pytest.raises(ValueError, match="weights"), group:
            raise ValueError("bad \ud800 weights" + "x" * 10**6)
        return
    if group.rank == 1 - leaver:
        time.sleep(0.3)
    texts = set()
    for _ in range(2):
        with pytest.raises(RendezvousFailed, match=rf"rank {leaver} \(pid ") as caught:
            group.barrier()
        texts.add(str(caught.value))
    (text,) = texts
    assert r"it raised ValueError: bad \ud800 weights" in text
    assert len(text) < 5000


@on_ranks(2, "cpu", dies=[1])
def test_a_group_whose_descriptors_were_closed_closes_without_an_error(group, tmp_path):
    """Rank 1 closes all descriptors, as a daemon does, and then its group."""
    group.open_meeting().close()
    group.barrier()
    if group.rank == 1:
        os.closerange(3, 1 << 16)
        group.close()
        (tmp_path / "closed").touch()
        os._exit(0)  # it has nothing left by which it could report
    while not (tmp_path / "closed").exists():
        time.sleep(0.01)
