# SPDX-License-Identifier: Apache-2.0
"""Survivors agree on the dead ranks, and continue without them."""

import contextlib
import os
import signal
import threading
import time
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import weft
from tests.baseline import die
from tests.ranks import on_ranks
from tests.rounds import Round, play
from weft import errors
from weft.group import agreement, recovery
from weft.group.agreement import Agreement
from weft.group.meeting import Meeting
from weft.group.waits import Waits
from weft.heap import Heap
from weft.launcher.launch import launch

LONG = 600.0  # a deadline that no test waits for
on_four = partial(on_ranks, 4, "cpu", timeout=LONG)


class Operator:
    """A share of memory that records the calls of its group."""

    def __init__(self, group: weft.Group, *, rounds: int = 0) -> None:
        self.heap = Heap.create(group, 4096)
        self.asked: list[Any] = []
        self.rounds = rounds
        group.attach(self)

    def mark_peer_dead(self, rank: int) -> None:
        self.asked.append(("ended", rank))

    def announce_leave(self, reason: str, *, drain: bool = False) -> None: ...

    def suspected_ranks(self) -> set[int]:
        return set()

    def read_progress(self, rank: int) -> None: ...

    def leave_for_mismatch(self, reason: str) -> None:
        self.asked.append(reason)

    def quiesce(self) -> None:
        self.asked.append("quiesce")

    def count_finished_rounds(self) -> int:
        return self.rounds

    @property
    def heap_generation(self) -> int:
        return self.heap.generation

    def exclude_calls(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark_asleep(self) -> None: ...

    def leave_closed(self, rank: int) -> None: ...

    def waits(self) -> Waits:
        return Waits(0, (), ())

    def restart(self, living: int) -> None:
        self.asked.append(("recover", living))


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def together(group):
    """Check that control messages and shared memory work among the living ranks."""
    assert group.all_gather(group.rank) == [r if r in group.living else None for r in range(4)]
    group.agree({"a": 1}, label="a")
    with Heap.create(group, 64) as heap:
        for peer in group.living:
            heap.tensor((4,), torch.int32, rank=peer)[group.rank] = 1
        group.barrier()
        own = heap.tensor((4,), torch.int32).tolist()
        group.barrier()
    assert own == [int(rank in group.living) for rank in range(4)]
    return heap.generation


def survive(group, dead, **options):
    recovered = group.recover(timeout=LONG, **options)
    assert recovered.dead == tuple(dead)
    together(group)
    return recovered


@pytest.mark.parametrize("victims", [[0], [2], [0, 3], [1, 2, 3]])
@on_four(dies="victims")
def test_survivors_of_ranks_that_were_killed_agree(group, victims):
    operator = Operator(group, rounds=10 + group.rank)
    group.barrier()
    if group.rank in victims:
        die()
    living = tuple(r for r in range(4) if r not in victims)
    assert group.living == (0, 1, 2, 3)
    recovered = survive(group, victims)
    assert group.living == recovered.living == living
    assert operator.asked[-2:] == ["quiesce", ("recover", sum(1 << r for r in living))]
    assert dict(recovered.finished) == {"Operator 1": 10 + living[0]}
    assert recovered.seconds < 100.0


@on_four(dies=[1])
def test_remains_of_a_broken_message_are_skipped(group):
    group.barrier()
    if group.rank == 1:
        die()
    with pytest.raises(errors.RendezvousFailed, match=r"rank 1 \(pid "):
        group.all_gather("x" * 100_000)
    survive(group, [1])


@pytest.mark.parametrize("when", ["before", "after", "reading", "quiesce", "recover"])
@on_four(dies=[0, 2])
def test_a_second_death_during_recovery_is_agreed_on_in_the_same_call(group, when):
    """Rank 0 dies; rank 2 dies during the agreement about it, or later."""
    operator: Any = Operator(group)
    pages: Any = Agreement
    publish, read = pages._publish, pages._read

    def dying_publish(self):
        if when == "after":
            publish(self)
        die()

    def dying_read(self, rank):
        return die() if rank == 3 else read(self, rank)

    if group.rank == 2:
        if when in ("before", "after"):
            pages._publish = dying_publish
        elif when == "reading":
            pages._read = dying_read
        elif when == "quiesce":
            operator.quiesce = die
        else:
            operator.restart = lambda living: die()
    group.barrier()
    if group.rank == 0:
        die()
    dead = group.recover(timeout=LONG).dead
    if dead != (0, 2):  # rank 2 died when this rank needed nothing more of it
        dead = group.recover(timeout=LONG).dead
    together(group)
    assert (dead, operator.asked[-1]) == ((0, 2), ("recover", 0b1010))


def meet_once(group):
    """Enter a barrier, after which a suspect may learn that a peer has begun to recover."""
    with contextlib.suppress(errors.RendezvousFailed):
        group.barrier()


@pytest.mark.parametrize("suspects", [{2: [3]}, {0: [0, 3]}])
@on_four(dies=[3])
def test_a_stopped_suspect_is_killed(group, suspects):
    meet_once(group)
    if group.rank == 3:
        stop()
    survive(group, [3], suspects=suspects.get(group.rank, ()))


@on_four(dies=[3])
def test_a_suspect_that_waits_in_a_message_survives(group):
    """Rank 1 waits for a stopped rank longer than its peers, which suspect both."""
    agreement.SUSPECT_SECONDS = 5.0
    meet_once(group)
    if group.rank == 3:
        stop()
    if group.rank == 1:
        with pytest.raises(errors.RendezvousFailed, match="left its calls to recover"):
            group.all_gather(1, timeout=LONG)
    else:
        time.sleep(0.2)
    survive(group, [3], suspects=[] if group.rank == 1 else [1, 3])


@on_four(dies=[3])
def test_an_absent_living_rank_is_named_and_not_dropped(group):
    group.barrier()
    if group.rank == 3:
        stop()
    text = r"rank 3 \(pid .*call recover again with suspects=\[3\]"
    with pytest.raises(errors.RecoveryFailed, match=text):
        group.recover(timeout=0.3)
    survive(group, [3], suspects=[3])


@on_four(dies=[1])
def test_a_suspect_that_cannot_be_killed_is_named_with_the_fix(group, tmp_path):
    patch = pytest.MonkeyPatch()
    refused = Mock(side_effect=PermissionError(1, "Operation not permitted"))
    patch.setattr(signal, "pidfd_send_signal", refused)
    meet_once(group)
    if group.rank == 1:
        stop()
    text = rf"rank 1 \(pid {group.pid(1)}\) is suspected but alive, and this rank cannot kill it"
    with pytest.raises(errors.RecoveryFailed, match=text):
        group.recover(suspects=[1], timeout=LONG)
    (tmp_path / str(group.rank)).touch()
    if group.rank == 0:
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.01)
        os.kill(group.pid(1), signal.SIGKILL)
    patch.undo()
    survive(group, [1])


@on_four()
def test_a_rank_that_left_and_lives_is_waited_for(group):
    group.barrier()
    if group.rank == 2:
        group.close()
        time.sleep(1.0)
        return
    with pytest.raises(errors.RecoveryFailed, match=r"rank 2 \(pid "):
        group.recover(timeout=0.2)
    survive(group, [2])


@pytest.mark.parametrize("opens", [False, True])
@on_four(dies=[1])
def test_a_rank_with_closed_descriptors_reports_no_death(group, opens):
    """The rank closed all descriptors, as a daemon does, and may have reused their numbers."""
    meet_once(group)
    if group.rank == 1:
        os.closerange(3, 1 << 16)
        while opens and os.open("/dev/zero", os.O_RDONLY) < 100:  # which poll says is readable
            pass
        with contextlib.suppress(errors.RecoveryFailed):
            group.recover(timeout=LONG)
        time.sleep(LONG)
    what = "neither called recover nor ended"
    if opens:
        time.sleep(2.0)  # rank 1 recovers first; where others wait already, it cannot tell them
        what = f"(took a living rank for dead|{what})"
    with pytest.raises(errors.RecoveryFailed, match=rf"^rank 1 \(pid \d+\) {what}") as early:
        group.recover(timeout=20.0 if opens else 1.0)
    assert "end the process, or call recover again with suspects=[1]" in str(early.value)
    survive(group, [1], suspects=[1])


@on_four()
def test_a_second_thread_may_not_recover(group):
    """One thread of rank 1 waits in a recovery for rank 0, while another thread tries one."""
    with Heap.create(group, 64) as heap:
        may_come = heap.tensor((1,), torch.int32, rank=0)
        group.barrier()
        if group.rank == 1:
            thread = threading.Thread(target=group.recover, kwargs={"timeout": LONG})
            thread.start()
            while not group._recovery._lock.locked():
                time.sleep(0.001)
            with pytest.raises(
                errors.OutOfOrder, match="^two threads of rank 1 recover one group concurr"
            ):
                group.recover(suspects=[0, 2, 3], timeout=LONG)
            may_come.fill_(1)
            thread.join()
        else:
            while group.rank == 0 and not may_come.item():
                time.sleep(0.001)
            group.recover(timeout=LONG)
        together(group)


@on_four(dies=[1])
def test_two_groups_recover_each_by_itself(group):
    meeting = Meeting.open(3) if group.rank == 0 else None
    address = group.all_gather(meeting.address if meeting else None)[0]
    place, cpu = meeting or Meeting.from_address(address), torch.device("cpu")
    with weft.Group.from_meeting(
        place, rank=3 - group.rank, size=4, device=cpu, timeout=LONG
    ) as second:
        group.barrier()
        if group.rank == 1:
            die()
        survive(second, [2])
        survive(group, [1])
        together(second)


@on_four(dies=[0])
def test_ranks_of_a_process_group_recover_without_rank_0(group):
    with weft.Group.from_torch(group.process_group(), device="cpu", timeout=LONG) as second:
        operator = Operator(second)
        group.barrier()
        if group.rank == 0:  # which serves torch's store
            die()
        survive(second, [0])
        assert operator.asked[-1] == ("recover", 0b1110)


@on_four(dies=[3])
def test_a_creation_that_was_interrupted_leaves_equal_generations(group):
    if group.rank == 3:
        group.barrier()
        die()
    if group.rank == 0:  # as if it had been further than the others when rank 3 died
        group._messages.generation += 1
    group.barrier()
    group.recover(timeout=LONG)
    assert together(group) == 2


NO_MEMORY, MISSING = ValueError("no memory"), errors.OutOfOrder("an expert is missing")
FAILURES: list[tuple[list[int], Exception, type[Exception], str]] = [
    ([1], NO_MEMORY, errors.CreationFailed, "on rank 1 of 4: ValueError: no memory"),
    ([1, 2, 3], MISSING, errors.OutOfOrder, "an expert is missing"),
]


@pytest.mark.parametrize(("fails", "error", "kind", "text"), FAILURES)
@on_four(dies=[0])
def test_a_failed_recovery_raises_on_all_and_may_be_retried(group, fails, error, kind, text):
    operator: Any = Operator(group)
    if group.rank in fails:
        operator.restart = Mock(side_effect=error)
    group.barrier()
    if group.rank == 0:
        die()
    with pytest.raises(kind, match=text):
        group.recover(timeout=LONG)
    operator.__dict__.pop("restart", None)
    survive(group, [0])
    assert operator.asked[-1] == ("recover", 0b1110)


@on_four(dies=[0])
def test_an_operator_closed_on_one_rank_is_not_recovered(group):
    first, second = Operator(group), Operator(group)
    group.barrier()
    if group.rank == 0:
        die()
    if group.rank == 1:
        del first
    assert list(survive(group, [0]).finished) == ["Operator 2"]
    assert second.asked[-1][0] == "recover"


@on_four(dies=[2])
def test_a_stopped_rank_is_suspected_by_those_that_timed_out_on_it(group):
    case = Round((8, 8, 8, 8))
    with case.open(group, timeout=1.0, first_timeout=LONG) as exchange:
        play(exchange, case)
        group.barrier()
        if group.rank == 2:
            stop()
        with pytest.raises(errors.PeerTimeout):
            play(exchange, case, poison=False)
        assert dict(survive(group, [2]).finished) == {"AllToAll 1": 1}
        play(exchange, case, poison=False, living=group.living)
        with contextlib.suppress(errors.BadExpertId):  # of the dead rank's experts
            exchange.check()


@pytest.mark.parametrize(("size", "device"), [(2, "threads"), (1, "cpu")])
@on_ranks("size")
def test_only_ranks_in_several_processes_recover(group, size, device):
    with pytest.raises(errors.InvalidArgument, match="at least two ranks that are processes of"):
        group.recover()


def all_die(group):
    group.barrier()
    die()


def test_a_launch_without_survivors_fails():
    with pytest.raises(errors.RankFailed, match=r"rank \d of 4 died: .*SIGKILL"):
        launch(all_die, ranks=4, tolerate_deaths=True)


@pytest.mark.parametrize(("ranks_of_agent", "warns"), [("4", True), ("1", False)])
def test_recovery_under_a_torchrun_agent_of_several_ranks_is_warned_about(
    ranks_of_agent, warns, monkeypatch, caplog
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_of_agent)
    recovery._warn_under_torchrun.cache_clear()
    for _ in range(2):
        recovery._warn_under_torchrun()
    assert caplog.text.count("Start one agent per rank") == warns
