# SPDX-License-Identifier: Apache-2.0
"""New processes replace dead ranks; the survivors' memory keeps its addresses."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing import forkserver
from typing import Any

import pytest
import torch

import weft
from tests.baseline import call_outcome, die, open_files, raises_soon, shares_mapped
from tests.group.test_recovery import LONG, Operator, on_four, stop, together
from tests.moe.layers import CONFIGS, Case
from tests.ranks import on_ranks
from tests.rounds import Round, play
from weft import errors
from weft.group.control import ControlPlane
from weft.group.meeting import Meeting
from weft.heap import Heap
from weft.moe import balance

NEWCOMER = """
import sys
from {module} import {body}
{body}(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
"""


def start(body, address, rank, *args):
    """Start a new interpreter that will join as rank `rank`."""
    code = NEWCOMER.format(module=body.__module__, body=body.__name__)
    return subprocess.Popen([sys.executable, "-c", code, address, str(rank), *map(str, args)])


def fork(body, address, rank, *args):
    """Start a process that will join as rank `rank`, by this process's fork server."""
    server: Any = forkserver._forkserver
    server.ensure_running = lambda: None  # as it would in the launcher; here it starts another
    args = (dict(os.environ), body, address, rank, *args)
    process = multiprocessing.get_context("forkserver").Process(target=born, args=args)
    process.start()
    return process


def born(environment, body, *args):
    os.environ.update(environment)
    server: Any = forkserver._forkserver
    server.ensure_running = lambda: None
    torch.set_num_threads(1)
    body(*args)


def end_well(process, code=0):
    """Wait for the new process, if this rank started one, or kill it for code -9."""
    if process is not None:
        if code == -9:
            process.kill()
        process.join()
        assert process.exitcode == code


def recover(group, *dead):
    assert group.recover(timeout=LONG).dead == dead


def lose(group, *victims):
    group.barrier()
    if group.rank in victims:
        die()
    recover(group, *victims)


def begin(group, body, rank, *args):
    meeting = group.open_meeting()
    return meeting, fork(body, meeting.address, rank, *args) if group.rank == 0 else None


def lose_and_begin(group, body, *args):
    """Lose rank 3 and start a process for it; return an operator, the meeting and the process."""
    operator = Operator(group)
    lose(group, 3)
    return operator, *begin(group, body, 3, *args)


def alone(rank):
    return weft.Group.for_replacement(rank=rank, size=4, device="cpu", timeout=LONG)


def fill(group, heap, value):
    """Write this rank's number into every share, and check the numbers of all ranks in its own."""
    for peer in range(4):
        heap.tensor((4,), torch.int32, rank=peer)[group.rank] = value + group.rank
    group.barrier()
    assert heap.tensor((4,), torch.int32).tolist() == [value + rank for rank in range(4)]
    group.barrier()


def newcomer(address, rank):
    with alone(rank) as group:
        assert group.living == (rank,)
        first, closed, second = (Operator(group) for _ in range(3))
        closed.heap.close()
        group.join(address, timeout=LONG)
        group.barrier()
        for operator in (first, second):
            fill(group, operator.heap, 10)
        assert group.all_gather(Heap.create(group, 64).generation) == [4] * 4


@pytest.mark.parametrize("victims", [[2], [0], [1, 3]])
@on_four(dies="victims")
def test_new_processes_replace_the_dead(group, victims):
    first = Operator(group)
    closed = Operator(group)
    closed.heap.close()
    second = Operator(group)
    heaps = first.heap, second.heap
    addresses = [heap.address(rank) for heap in heaps for rank in range(4)]
    views = [first.heap.tensor((4,), torch.int32, rank=rank) for rank in range(4)]
    before = shares_mapped()
    fill(group, first.heap, 0)
    lose(group, *victims)
    meeting = group.open_meeting()
    processes = []
    if group.rank == group.living[0]:
        processes = [fork(newcomer, meeting.address, rank) for rank in victims]
    waiting = set() if group.rank == meeting.hub else set(victims)
    while waiting < set(victims):  # the others wait in `replace`
        waiting = meeting.find_waiting_ranks()
    assert meeting.hub == group.living[0]
    group.replace(meeting, timeout=LONG)
    assert group.living == (0, 1, 2, 3)
    assert shares_mapped() == before
    assert addresses == [heap.address(rank) for heap in heaps for rank in range(4)]
    for rank in victims:  # new memory, zero, under the views that there were
        assert views[rank].tolist() == [0, 0, 0, 0]
    group.barrier()
    for operator in (first, second):
        assert operator.asked[-2:] == ["quiesce", ("recover", 0b1111)]
        fill(group, operator.heap, 10)
    assert [view.tolist() for view in views] == [[10, 11, 12, 13]] * 4
    assert group.all_gather(Heap.create(group, 64).generation) == [4] * 4
    for process in processes:
        end_well(process)


def lives_on(address, rank, dies_when=""):
    group = alone(rank)
    operator = Operator(group)
    if dies_when == "waits":  # the survivors have not begun to replace it
        threading.Timer(1.0, die).start()
    elif dies_when == "joins":
        patched: Any = operator
        patched.quiesce = die
    group.join(address, timeout=LONG)
    if dies_when == "joined":
        die()
    group.barrier()
    assert ("recover", 0b1111) in operator.asked


def take_in(group, operator):
    meeting, process = begin(group, lives_on, 3)
    group.replace(meeting, timeout=LONG)
    assert ("recover", 0b1111) in operator.asked
    group.barrier()
    end_well(process)


@pytest.mark.parametrize("when", ["waits", "joins", "joined"])
@on_four(dies=[3])
def test_a_replacement_that_dies_is_replaced(group, when):
    operator, meeting, _ = lose_and_begin(group, lives_on, when)
    error = call_outcome(group.replace, meeting, timeout=LONG)[0]
    assert error in ("nothing", "RendezvousFailed", "CreationFailed")
    recover(group, 3)
    take_in(group, operator)


@on_four(dies=[3])
def test_another_process_joins_at_the_meeting_of_one_that_ended(group):
    """The first one waits for the survivors, and ends before they call `replace`."""
    operator, meeting, process = lose_and_begin(group, lives_on)
    if group.rank == meeting.hub:
        for is_alive in (True, False):
            while (3 in meeting.find_waiting_ranks()) != is_alive:
                time.sleep(0.01)
            if is_alive:
                end_well(process, -9)
        process = fork(lives_on, meeting.address, 3)
    group.barrier()
    group.replace(meeting, timeout=LONG)
    assert ("recover", 0b1111) in operator.asked
    group.barrier()
    end_well(process)


def meets_some(address, rank, how):
    """End this process when its part of the first message has reached rank 0 only."""
    plane: Any = ControlPlane
    send = plane._send

    def one_part(self, peer, op, *args):
        send(self, peer, op, *args)
        if op == "replace":
            die() if how == "dies" else stop()

    plane._send = one_part
    group = alone(rank)
    _ = Operator(group)
    group.join(address, timeout=LONG)


def start_may_take_long():
    """Start this rank's deadlines after all have met, because a process starts first."""
    groups: Any = weft.group.recovery
    meet = groups.meet
    groups.meet = lambda *place, **inputs: meet(*place, **{**inputs, "timeout": LONG})


@pytest.mark.parametrize("how", ["dies", "stops", "rank 0 gives up"])
@on_four(dies=[3])
def test_a_partly_met_process_is_admitted_by_no_rank(group, how):
    plane: Any = ControlPlane
    take, met = plane.receive, []

    def late(self, peer, op):
        """Send the own part before noticing the end, which rank 0 must not learn from this rank."""
        if op == "replace":
            time.sleep(0.5)
        return take(self, peer, op)

    operator, meeting, process = lose_and_begin(group, meets_some, how)
    if group.rank > 0:
        plane.receive = late
    meet_again = group._recovery._connect_newcomers

    def noted(*args):
        met.append(meet_again(*args))
        return met[0]

    group._recovery._connect_newcomers = noted
    start_may_take_long()
    wait = {"dies": LONG, "stops": 2.0, "rank 0 gives up": 4.0 if group.rank else 1.0}[how]
    if how == "rank 0 gives up" and group.rank == 0:
        # It finds out in its recovery that none has taken the process in.
        expected: Any = errors.RecoveryFailed, "neither called recover nor ended"
    else:
        expected = errors.RendezvousFailed, r"rank 3 \(pid |another survivor did not connect"
    with pytest.raises(expected[0], match=expected[1]):
        group.replace(meeting, timeout=wait)
    end_well(process, -9)
    plane.receive = take
    del group._recovery._connect_newcomers
    recover(group, 3)
    assert group.all_gather(bool(met)) == [True, False, False, None]
    take_in(group, operator)


@on_four(dies=[3])
def test_a_survivor_that_times_out_still_admits_the_process(group):
    """Rank 0 stops waiting for the others, which have met the new process."""
    operator, meeting, process = lose_and_begin(group, lives_on)
    move = group._recovery._admit_newcomers

    def late(*args):
        time.sleep(2.5)
        return move(*args)

    if group.rank > 0:
        group._recovery._admit_newcomers = late
    start_may_take_long()
    kind = errors.RendezvousFailed if group.rank else errors.RecoveryFailed
    text = "rank 0 gave up waiting" if group.rank else "neither called recover"
    with pytest.raises(kind, match=text):
        group.replace(meeting, timeout=LONG if group.rank else 1.0)
    recover(group, 3)
    assert group.all_gather(group.rank) == [0, 1, 2, None]
    assert operator.asked[-1] == ("recover", 0b0111)
    end_well(process, 1)


def interrupts(call):
    """Return the same function, which a signal handler interrupts at its end."""

    def interrupted(*args):
        call(*args)
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize("where", ["quiesce", "_notify"])
@on_four(dies=[3])
def test_an_interrupted_survivor_continues_without_a_leak(group, where):
    """Rank 1 is interrupted after all have decided to admit the new process."""
    operator, meeting, process = lose_and_begin(group, lives_on)
    before, patch = open_files(), pytest.MonkeyPatch()
    if group.rank == 1:
        place: Any = operator if where == "quiesce" else group._messages.control
        patch.setattr(place, where, interrupts(getattr(place, where)))
    start_may_take_long()
    with pytest.raises(KeyboardInterrupt if group.rank == 1 else errors.RendezvousFailed):
        group.replace(meeting, timeout=2.0)
    patch.undo()
    end_well(process, -9)
    recover(group, 3)
    together(group)
    assert open_files() - before == (-1 if group.rank == 0 else 0)  # which had the listener


def of_other_sizes(address, rank, sizes, num_closed):
    group = alone(rank)
    heaps = [Heap.create(group, size) for size in sizes]
    for heap in heaps[:num_closed]:
        heap.close()
    assert call_outcome(group.recover)[0] == "OutOfOrder"
    assert call_outcome(group.join, address)[0] == "GeometryMismatch"
    assert call_outcome(group.join, address)[0] == "OutOfOrder"


@pytest.mark.parametrize(
    ("sizes", "num_closed", "text"),
    [
        ([64, 8192], 1, "rank 0 has size=4096 and rank 1 has size=8192"),
        ([4096], 0, "the generation of an object differs: rank 0 has 2 and rank 1 has 1; create"),
        ([64, 4096], 0, "the number of open objects differs: rank 0 has 1 and rank 1 has 2"),
    ],
)
@on_four(dies=[1])
def test_a_replacement_with_other_objects_is_refused(group, sizes, num_closed, text):
    Heap.create(group, 64).close()
    heap = Heap.create(group, 4096)
    lose(group, 1)
    meeting, process = begin(group, of_other_sizes, 1, sizes, num_closed)
    with pytest.raises(errors.GeometryMismatch, match=text):
        group.replace(meeting, timeout=LONG)
    end_well(process)
    heap.close()
    recover(group, 1)


@pytest.mark.parametrize("dead", [[0, 2], [1, 2]], ids=["the hub", "one that came"])
@on_four(dies="dead")
def test_a_death_in_the_meeting_is_reported_despite_a_forked_child(group, tmp_path, dead):
    """The child has the sockets of the rank that dies, and the listener of rank 0."""
    over, victim = tmp_path / "over", dead[0]

    def fork_and_die():
        if victim == 1:
            time.sleep(1.0)  # it waits in the meeting
        if os.fork() == 0:
            while not over.exists():
                time.sleep(0.1)
            os._exit(0)
        die()

    lose(group, 2)
    meeting = group.open_meeting()
    if group.rank == victim:
        threading.Thread(target=fork_and_die).start()
        if victim == 0:
            time.sleep(LONG)
    text = rf"^rank {victim} \(pid \d+\) died before all ranks had connected$"
    with raises_soon(errors.RendezvousFailed, text):
        group.replace(meeting, timeout=LONG)
    recover(group, *dead)
    over.touch()


def is_one_too_many(address, rank):
    assert call_outcome(alone(rank).join, address)[0] == "RendezvousFailed"


@on_four(dies=[1])
def test_only_dead_ranks_are_replaced(group):
    """Rank 3 is a survivor that joins as if it were new."""
    lose(group, 1)
    opened = Meeting.open() if group.rank == 0 else None  # without looking for the dead
    address = group.all_gather(opened.address if opened else None)[0]
    process = fork(is_one_too_many, address, 1) if group.rank == 0 else None
    if group.rank == 3:
        is_one_too_many(address, 3)
    else:
        text = r"continues without ranks \[1\], but ranks \[1, 3\] join"
        with pytest.raises(errors.RendezvousFailed, match=text):
            group.replace(opened or Meeting.from_address(address), timeout=LONG)
    end_well(process)


ROUND = Round(tokens=(8, 3, 8, 5))
LAYER = Case(CONFIGS["deepseek"], tokens=(8, 3, 8, 5))
LOADS = ([1.0] * 8, [9.0, 1, 1, 1, 1, 1, 1, 8], [1.0, 2, 3, 4, 5, 6, 7, 8])
PLACEMENTS = [balance(loads, 4, 8) for loads in LOADS]
# Kind, the layer whose workspace a sibling shares, where its experts are at first and in the end;
# None: it is closed before.
PLAN: dict[str, tuple[str, str, int, int | None]] = {
    "first": ("layer", "", 0, None),
    "exchange": ("exchange", "", 0, 0),
    "of first": ("layer", "first", 1, 1),
    "closed": ("exchange", "", 0, None),
    "second": ("layer", "", 1, 2),
    "leased": ("leased exchange", "", 0, 0),
    "reduce": ("reduce", "", 0, 0),
    "leased layer": ("leased layer", "", 0, 1),
    "again": ("leased layer", "", 2, 2),
    "of second": ("layer", "second", 2, 0),
}


class Objects:
    def __init__(self, group: weft.Group) -> None:
        self.group, self.open = group, dict[str, Any]()

    def make(self, name: str, kind: str, elder: str, place: int) -> None:
        group, device = self.group, self.group.device
        own: Any = {"shared": LAYER.shared(device), "correction": LAYER.correction(device)}
        own["replicas"] = PLACEMENTS[place]
        sizes: Any = ROUND.sizes(8) if "exchange" in kind else {"max_tokens": 8, "hidden": 128}
        cls: Any = weft.AllReduce if kind == "reduce" else weft.AllToAll
        args: tuple[Any, ...] = ()
        if "layer" in kind:
            weights = partial(LAYER.weights, device=device)
            if elder in self.open:
                self.open[name] = self.open[elder].sibling(weights, **own)
                return
            cls, args = weft.MoE, (LAYER.config, weights)
            sizes = {"max_tokens": 8, "missing": "drop"} | own
        make = partial(weft.lease, group, cls) if "leased" in kind else partial(cls, group)
        self.open[name] = make(*args, **sizes)

    def callables(self) -> dict[str, Any]:
        return {name: getattr(each, "operator", each) for name, each in self.open.items()}

    def bases(self) -> list[int]:
        return [getattr(c, "exchange", c).heap.base for c in self.callables().values()]

    def work(self) -> None:
        rank = self.group.rank
        for seed, called in enumerate(self.callables().values()):
            if isinstance(called, weft.AllToAll):
                play(called, ROUND.next(seed=seed))
            elif isinstance(called, weft.AllReduce):
                rows = torch.full((8, 128), rank + 1.0, dtype=torch.bfloat16)
                out: Any = called.fused(rows, out=True).out
                assert (out == 10.0).all()
            else:
                x, logits = LAYER.next(seed=seed).inputs_of(rank, torch.device("cpu"))
                LAYER.check(called(x, logits), LAYER.expected(called, x, logits))


def nap(group):
    group.sleep()
    group.wake()


def works(address, rank):
    """Construct the survivors' objects in the same order, also the closed ones."""
    group = alone(rank)
    objects = Objects(group)
    for name, (kind, elder, place, last) in PLAN.items():
        objects.make(name, kind, elder, place if last is None else last)
    for name, (_, _, _, last) in PLAN.items():
        if last is None:
            objects.open.pop(name).close()
    for called in objects.callables().values():
        if isinstance(called, weft.MoE):  # runs rounds alone, as engines do in captures
            called(*LAYER.next(seed=0).inputs_of(rank, torch.device("cpu")))
    nap(group)
    group.join(address, timeout=LONG)
    objects.work()
    nap(group)
    objects.work()
    group.barrier()


@on_four(dies=[2])
def test_all_objects_work_with_a_replacement(group):
    before, objects = group.timeout, Objects(group)
    for name, (kind, elder, place, _) in PLAN.items():
        objects.make(name, kind, elder, place)
    with pytest.raises(errors.CreationFailed, match="rank 1"):
        LAYER.open(group, replicas=PLACEMENTS[0], num_sms=group.rank % 2 or None)
    for name, (_, _, place, last) in PLAN.items():
        if last is None:
            objects.open.pop(name).close()
        elif last != place:
            objects.callables()[name].relocate(PLACEMENTS[last])
    objects.work()
    addresses = objects.bases()
    group.barrier()
    if group.rank == 2:
        die()
    with pytest.raises((errors.PeerDied, errors.RendezvousFailed)):
        objects.work()
    recover(group, 2)
    nap(group)
    group.open_meeting()
    files = open_files()
    meeting = group.open_meeting()
    assert open_files() == files, "the earlier meeting is closed"
    process = fork(works, meeting.address, 2) if group.rank == 0 else None
    (control_calls, *_) = [peer.skew.count for peer in group.waits()["control"].peers]
    group.replace(meeting, timeout=LONG)
    assert group.waits()["control"].peers[0].skew.count > control_calls
    assert (group.timeout, objects.bases()) == (before, addresses)
    objects.work()
    nap(group)
    objects.work()
    group.barrier()
    end_well(process)


@on_ranks(2, "cpu")
def test_invalid_arguments_are_refused(group):
    place: Any = Meeting(0, b"")
    make: Any = partial(weft.Group.for_replacement, device="cpu", rank=0)
    for text, call in (
        ("meeting is 'x'", partial(group.replace, "x")),
        (r"suspects\[0\] is 2; .*0\.\.1", partial(group.recover, suspects=[2])),
        ("suspects is 1", partial(group.recover, suspects=1)),
        ("timeout is 0", partial(group.recover, timeout=0)),
        ("timeout is 0", partial(group.replace, place, timeout=0)),
        ("meeting is 0", partial(group.join, 0)),
        ("timeout is -1", partial(group.join, place, timeout=-1)),
        *(("size is", partial(make, size=size)) for size in (1, 73, 1 << 64, 2.0, True, "2")),
    ):
        with pytest.raises(errors.InvalidArgument, match=text):
            call()
    meeting = group.open_meeting()
    for call in (group.replace, group.join):  # all ranks live
        with pytest.raises(errors.OutOfOrder):
            call(meeting)


def test_a_new_process_waits_for_the_survivors_as_long_as_it_may():
    """The time of a step may be another one."""
    with weft.Group.for_replacement(rank=1, size=2, device="cpu") as group:
        meeting = Meeting.open()
        try:
            with pytest.raises(errors.RendezvousFailed, match=r"within 0\.05 s: check whether its"):
                group.join(meeting.address, timeout=LONG, rendezvous_timeout=0.05)
        finally:
            meeting.close()
