# SPDX-License-Identifier: Apache-2.0
"""Survivors agree on who is gone, and go on without them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Collection
from typing import Any

import pytest
import torch

import weft
from tests.memory.baseline import raised
from weft.errors import (
    BadExpertId,
    InvalidArgument,
    OutOfOrder,
    RankFailed,
    RecoveryFailed,
    RendezvousFailed,
)
from weft.memory import Heap, agreement
from weft.memory.agreement import Agreement
from weft.memory.launch import launch
from weft.memory.meeting import Meeting

LONG = 600.0  # a deadline that no test waits for


class Operator:
    """A share of memory, and what its group asked of it."""

    def __init__(self, group: weft.Group, *, rounds: int = 0) -> None:
        self.heap = Heap.create(group, 4096)
        self.asked: list[Any] = []
        self.rounds = rounds
        group.attach(self)

    def _peer_ended(self, rank: int) -> None:
        self.asked.append(("ended", rank))

    def _tell_left(self, why: str, *, settled: bool = False) -> None:
        pass

    def _suspects(self) -> set[int]:
        return set()

    def _waiting_ns(self, ranks: Collection[int]) -> dict[int, int]:
        return {}

    def _quiesce(self) -> None:
        self.asked.append("quiesce")

    def _finished(self) -> int:
        return self.rounds

    def _recover(self, living: int) -> None:
        self.asked.append(("recover", living))


def run(body, *args, ranks=4):
    """What each rank returned; None for those that died."""
    return launch(body, *args, ranks=ranks, tolerate_deaths=True, timeout=LONG)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def together(group):
    """Control messages and shared memory work among the living."""
    assert group.all_gather(group.rank) == [r if r in group.living else None for r in range(4)]
    group.agree({"a": 1}, what="a")
    with Heap.create(group, 64) as heap:
        heap.tensor((4,), torch.int32)[group.rank] = 1
        for peer in group.living:
            heap.tensor((4,), torch.int32, rank=peer)[group.rank] = 1
        group.barrier()
        here = heap.tensor((4,), torch.int32).tolist()
        group.barrier()
    assert here == [int(rank in group.living) for rank in range(4)]
    return heap.generation


def idle(group, victims):
    made = Operator(group, rounds=10 + group.rank)
    group.barrier()
    if group.rank in victims:
        die()
    assert group.living == (0, 1, 2, 3)
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    logged: list[logging.LogRecord] = []
    handler: Any = logging.Handler()
    handler.emit = logged.append
    logging.getLogger("weft.memory.recovery").addHandler(handler)
    found = group.recover(timeout=LONG)
    assert [each.msg for each in logged if "torchrun: its agent ends all ranks" in each.msg]
    assert group.living == found.living
    assert made.asked[-2:] == ["quiesce", ("recover", sum(1 << r for r in found.living))]
    together(group)
    return found.dead, found.living, dict(found.finished), found.seconds


@pytest.mark.parametrize("victims", [[0], [2], [0, 3], [1, 2, 3]])
def test_survivors_of_ranks_that_were_killed_agree(victims):
    results = run(idle, victims)
    living = tuple(r for r in range(4) if r not in victims)
    for rank in living:
        dead, left, finished, seconds = results[rank]
        assert (dead, left) == (tuple(victims), living)
        assert finished == {"Operator 1": 10 + living[0]}
        assert seconds < 100.0
    assert all(results[rank] is None for rank in victims)


def one_after_the_other(group):
    found = []
    for victim in (0, 3, 1):
        if group.rank == victim:
            die()
        found.append(group.recover(timeout=LONG).dead)
        group.barrier()
        together(group)
    return found


def test_a_group_shrinks_down_to_one_rank():
    assert run(one_after_the_other)[2] == [(0,), (0, 3), (0, 1, 3)]


def in_a_control_message(group):
    group.barrier()
    if group.rank == 1:
        die()
    error = raised(group.all_gather, "x" * 100_000)
    assert error[0] == RendezvousFailed.__name__, error
    assert "rank 1 (pid " in error[1]
    found = group.recover(timeout=LONG)
    together(group)
    return found.dead


def test_what_a_broken_control_message_left_in_the_sockets_is_not_taken_for_a_new_one():
    assert run(in_a_control_message) == [(1,), None, (1,), (1,)]


def in_agreement(group, when):
    """Rank 0 dies; rank 2 dies in the agreement about it, or in what follows."""
    operator: Any = Operator(group)
    pages: Any = Agreement
    publish, read = pages._publish, pages._read

    def dying_publish(self):
        if when == "before":
            die()
        publish(self)
        if when == "after":
            die()

    def dying_read(self, rank):
        if when == "reading" and rank == 3:
            die()
        return read(self, rank)

    if group.rank == 2:
        pages._publish, pages._read = dying_publish, dying_read
        operator._quiesce = die if when == "quiesce" else operator._quiesce
        operator._recover = (lambda living: die()) if when == "recover" else operator._recover
    group.barrier()
    if group.rank == 0:
        die()
    found = group.recover(timeout=LONG)
    if found.dead != (0, 2):  # rank 2 died when this rank needed nothing more of it
        found = group.recover(timeout=LONG)
    together(group)
    return found.dead, operator.asked[-1]


@pytest.mark.parametrize("when", ["before", "after", "reading", "quiesce", "recover"])
def test_a_second_death_during_recovery_is_agreed_on_in_the_same_call(when):
    results = run(in_agreement, when)
    assert results[1] == results[3] == ((0, 2), ("recover", 0b1010))
    assert results[0] is results[2] is None


def all_here(group):
    """A barrier, after which a suspect may hear that a peer, which is through, recovers."""
    with contextlib.suppress(RendezvousFailed):
        group.barrier()


def stopped(group, suspects):
    all_here(group)
    if group.rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    found = group.recover(suspects=suspects.get(group.rank, ()), timeout=LONG)
    together(group)
    return found.dead


@pytest.mark.parametrize("suspects", [{0: [3], 1: [3], 2: [3]}, {2: [3]}, {0: [0, 3]}])
def test_a_stopped_rank_is_killed_if_one_suspects_it(suspects):
    assert run(stopped, suspects) == [(3,)] * 3 + [None]


def in_a_message(group):
    """Rank 1 waits for a stopped rank longer than its peers, who suspect both."""
    agreement._LATE = 5.0
    all_here(group)
    if group.rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    if group.rank == 1:
        kind, text, _ = raised(group.all_gather, 1, timeout=LONG)
        assert kind == RendezvousFailed.__name__
        assert "left its calls to recover" in text
    else:
        time.sleep(0.2)
    found = group.recover(suspects=[] if group.rank == 1 else [1, 3], timeout=LONG)
    together(group)
    return found.dead


def test_a_suspect_that_waits_in_a_message_for_another_is_called_and_lives():
    assert run(in_a_message) == [(3,)] * 3 + [None]


def woken(group):
    agreement._LATE = LONG
    all_here(group)
    if group.rank == 3:
        time.sleep(0.2)
    found = group.recover(suspects=[(group.rank + 1) % 4, 3], timeout=2 * LONG)
    together(group)
    return found.dead


def test_a_suspect_that_comes_in_time_lives():
    assert run(woken) == [()] * 4


def not_suspected(group):
    group.barrier()
    if group.rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    late = raised(group.recover, timeout=0.3)
    again = group.recover(suspects=[3], timeout=LONG)
    together(group)
    return late[:2], again.dead


def test_a_living_rank_that_does_not_come_is_named_and_not_left_out():
    for (kind, text), dead in run(not_suspected)[:3]:
        assert kind == RecoveryFailed.__name__
        assert "rank 3 (pid " in text
        assert "call recover again with suspects=[3]" in text
        assert dead == (3,)


def refused(group):
    def send(fd, number):
        raise PermissionError(1, "Operation not permitted")

    system: Any = signal
    real, system.pidfd_send_signal = signal.pidfd_send_signal, send
    all_here(group)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    error = raised(group.recover, suspects=[1], timeout=LONG)
    pid = group.pid(1)
    if group.rank == 0:
        os.kill(pid, signal.SIGKILL)
    system.pidfd_send_signal = real
    return error[:2], group.recover(timeout=LONG).dead, pid


def test_a_suspect_that_cannot_be_killed_is_named_with_what_to_do():
    for (kind, text), dead, pid in (each for each in run(refused) if each is not None):
        assert kind == RecoveryFailed.__name__
        assert f"rank 1 (pid {pid}) is suspected, lives, and cannot be killed" in text
        assert "end its process, then call recover again" in text
        assert dead == (1,)


def left(group):
    """A rank that closed its group and lives on is not gone."""
    group.barrier()
    if group.rank == 2:
        group.close()
        time.sleep(1.0)
        return None
    early = raised(group.recover, timeout=0.2)
    return early[:2], group.recover(timeout=LONG).dead


def test_a_rank_that_left_and_lives_is_waited_for():
    results = run(left)
    for rank in (0, 1, 3):
        (kind, text), dead = results[rank]
        assert kind == RecoveryFailed.__name__
        assert "rank 2 (pid " in text
        assert dead == (2,)


def closes_all(group, opens):
    """Rank 1 closes its descriptors, as a daemon does, and may have others by the same numbers."""
    all_here(group)
    if group.rank == 1:
        os.closerange(3, 1 << 16)
        while opens and os.open("/dev/zero", os.O_RDONLY) < 100:  # which poll says is readable
            pass
        with contextlib.suppress(RecoveryFailed):
            group.recover(timeout=LONG)
        time.sleep(LONG)
    early = raised(group.recover, timeout=1.0)[:2]
    found = group.recover(suspects=[1], timeout=LONG)
    together(group)
    return early, found.dead


@pytest.mark.parametrize("opens", [False, True])
def test_a_rank_that_closed_its_descriptors_takes_nobody_for_dead(opens):
    for (kind, text), dead in run(closes_all, opens)[::2]:
        assert kind == RecoveryFailed.__name__
        what = "took a living rank for dead" if opens else "neither called recover nor ended"
        assert re.match(rf"rank 1 \(pid \d+\) {what}", text), text
        assert "end the process, or call recover again with suspects=[1]" in text
        assert dead == (1,)


def by_two_threads(group):
    """A thread of rank 1 is in a recovery, for which rank 0 does not come before another tried."""
    refused = None
    with Heap.create(group, 64) as heap:
        may_come = heap.tensor((1,), torch.int32, rank=0)
        group.barrier()
        if group.rank == 1:
            thread = threading.Thread(target=group.recover, kwargs={"timeout": LONG})
            thread.start()
            while not group._recovering.locked():
                time.sleep(0.001)
            refused = raised(group.recover, suspects=[0, 2, 3], timeout=LONG)[:2]
            may_come.fill_(1)
            thread.join()
        else:
            while group.rank == 0 and not may_come.item():
                time.sleep(0.001)
            group.recover(timeout=LONG)
        together(group)
    return refused


def test_a_second_thread_may_not_recover_meanwhile():
    kind, text = run(by_two_threads)[1]
    assert kind == OutOfOrder.__name__
    assert text == "two threads of rank 1 recover one group at a time; call it from one"


def in_two_groups(group):
    meeting = Meeting.open(3) if group.rank == 0 else None
    address = group.all_gather(meeting.address if meeting else None)[0]
    second = weft.Group.from_meeting(
        meeting or Meeting.at(address),
        rank=3 - group.rank,
        size=4,
        device=torch.device("cpu"),
        timeout=LONG,
    )
    with second:
        group.barrier()
        if group.rank == 1:
            die()
        found = second.recover(timeout=LONG).dead, group.recover(timeout=LONG).dead
        together(second)
        together(group)
        return found


def test_two_groups_recover_each_by_itself():
    assert run(in_two_groups) == [((2,), (1,)), None, ((2,), (1,)), ((2,), (1,))]


def found_by_torch(group):
    second = weft.Group.from_torch(group.process_group(), device="cpu", timeout=LONG)
    with second:
        operator = Operator(second)
        group.barrier()
        if group.rank == 0:  # which serves torch's store
            die()
        found = second.recover(timeout=LONG)
        together(second)
        return found.dead, operator.asked[-1]


def test_ranks_of_a_process_group_recover_without_rank_0():
    assert run(found_by_torch)[1:] == [((0,), ("recover", 0b1110))] * 3


def in_a_creation(group):
    if group.rank == 3:
        group.barrier()
        die()
    if group.rank == 0:  # as if it had been further than the others when rank 3 died
        group._generation += 1
    group.barrier()
    group.recover(timeout=LONG)
    return together(group)


def test_a_creation_that_was_interrupted_leaves_equal_generations():
    assert run(in_a_creation) == [2, 2, 2, None]


def fails_at_first(group):
    operator: Any = Operator(group)
    works = operator._recover

    def fails(living):
        raise ValueError("no memory")

    if group.rank == 1:
        operator._recover = fails
    group.barrier()
    if group.rank == 0:
        die()
    error = raised(group.recover, timeout=LONG)
    operator._recover = works
    return error[:2], group.recover(timeout=LONG).dead, operator.asked[-1]


def test_one_that_cannot_write_its_memory_is_named_on_all_and_may_try_again():
    text = "recovering failed on rank 1 of 4: ValueError: no memory"
    result = (["CreationFailed", text], (0,), ("recover", 0b1110))
    assert run(fails_at_first) == [None, result, result, result]


def fails_alike(group):
    operator: Any = Operator(group)

    def fails(living):
        raise OutOfOrder("an expert is missing")

    operator._recover = fails
    group.barrier()
    if group.rank == 0:
        die()
    error = raised(group.recover, timeout=LONG)[:2]
    together(group)
    return error


def test_what_stops_every_rank_is_raised_as_what_it_is():
    assert run(fails_alike)[1:] == [["OutOfOrder", "an expert is missing"]] * 3


def closed_on_one(group):
    first, second = Operator(group), Operator(group)
    group.barrier()
    if group.rank == 0:
        die()
    if group.rank == 1:
        del first
    found = group.recover(timeout=LONG)
    return list(found.finished), second.asked[-1][0]


def test_an_operator_that_one_rank_has_no_more_is_left_as_it_is():
    assert run(closed_on_one)[1:] == [(["Operator 2"], "recover")] * 3


def under_a_call(group, stop):
    with weft.AllToAll(
        group,
        max_tokens=8,
        top_k=2,
        num_experts=8,
        hidden=64,
        timeout=1.0 if stop else LONG,
        first_timeout=LONG,
    ) as exchange:
        x = torch.ones(8, 64, dtype=torch.bfloat16)
        ids = torch.arange(16).view(8, 2) % 8
        weights = torch.full((8, 2), 0.5)
        for _ in range(3):
            exchange.dispatch(x, ids, weights)
            exchange.combine()
        group.barrier()
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP if stop else signal.SIGKILL)
        error = raised(exchange.dispatch, x, ids, weights)
        found = group.recover(timeout=LONG)
        together(group)
        for _ in range(3):  # token t goes to expert t alone, which returns what it receives
            alone = torch.stack([torch.arange(8), torch.full((8,), -1)], 1)
            received = exchange.dispatch(x, alone, torch.ones(8, 2))
            exchange.output().copy_(weft.reference.identity_experts(received, x.dtype))
            after = exchange.combine()[:, 0].tolist()
        with contextlib.suppress(BadExpertId):  # tokens 2 and 6 go to experts of the dead rank
            exchange.check()
        return error[0], found.dead, dict(found.finished), after


@pytest.mark.parametrize("stop", [False, True])
def test_survivors_of_a_call_recover(stop):
    """A rank that stopped is suspected by those that waited for it in vain."""
    results = run(under_a_call, stop)
    assert results[2] is None
    for rank in (0, 1, 3):
        error, dead, finished, after = results[rank]
        assert error == ("PeerTimeout" if stop else "PeerDied")
        assert (dead, finished) == ((2,), {"AllToAll 1": 3})
        assert after == [0.0 if expert // 2 == 2 else 1.0 for expert in range(8)]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"suspects": [4]}, r"suspects\[0\] is 4; .*0\.\.3"),
        ({"suspects": 1}, "suspects is 1"),
        ({"timeout": 0}, "timeout is 0"),
    ],
)
def test_wrong_arguments_of_a_recovery_are_named(given, text):
    for kind, said in launch(refuse, given, ranks=4, device="threads"):
        assert kind == InvalidArgument.__name__
        assert re.search(text, said), said


def refuse(group, given):
    return raised(group.recover, **given)[:2]


@pytest.mark.parametrize(("ranks", "device"), [(2, "threads"), (1, "cpu")])
def test_ranks_that_cannot_recover_are_told(ranks, device):
    for kind, text in launch(refuse, {}, ranks=ranks, device=device):
        assert kind == InvalidArgument.__name__
        assert "it needs two ranks or more, each a process, of one machine" in text


def all_die(group):
    group.barrier()
    die()


def test_a_launch_that_nobody_survives_fails():
    with pytest.raises(RankFailed, match=r"rank \d of 4 died: .*SIGKILL"):
        run(all_die)
