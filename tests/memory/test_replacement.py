# SPDX-License-Identifier: Apache-2.0
"""New processes take the numbers of ranks that are gone; what survivors hold stays where it is."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from typing import Any

import pytest
import torch

import weft
from tests.memory.baseline import raised, shares_mapped
from tests.memory.test_recovery import LONG, Operator, die, run, together
from tests.moe.layers import CONFIGS, Case, bound
from tests.rounds import Round, play
from weft.errors import (
    CreationFailed,
    InvalidArgument,
    OutOfOrder,
    RecoveryFailed,
    RendezvousFailed,
)
from weft.memory import Heap
from weft.memory.control_plane import ControlPlane
from weft.memory.launch import launch
from weft.memory.meeting import Meeting
from weft.moe import ExpertWeights, balance

NEWCOMER = """
import sys
from {module} import {body}
{body}(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
"""


def start(body, address, rank, *given):
    """A new interpreter that is to be rank `rank`."""
    code = NEWCOMER.format(module=body.__module__, body=body.__name__)
    return subprocess.Popen([sys.executable, "-c", code, address, str(rank), *map(str, given)])


def fork(body, address, rank, *given):
    """A process that is to be rank `rank`, by the fork server of this one: torch is in it."""
    server: Any = forkserver._forkserver
    server.ensure_running = lambda: None  # as it would in the launcher; here it starts another
    process = multiprocessing.get_context("forkserver").Process(
        target=born, args=(dict(os.environ), body, address, rank, *given)
    )
    process.start()
    return process


def born(environment, body, *given):
    os.environ.update(environment)
    torch.set_num_threads(1)
    body(*given)


def ended(process):
    """The exit code of a forked process, once it has one."""
    process.join()
    return process.exitcode


def lose(group, victim):
    """Go on without a rank, which dies."""
    group.barrier()
    if group.rank == victim:
        die()
    group.recover(timeout=LONG)


def begin(group, body, rank, *given):
    """A meeting, and on rank 0 the process that comes to it as `rank`."""
    meeting = group.open_meeting()
    return meeting, fork(body, meeting.address, rank, *given) if group.rank == 0 else None


def join(address, rank):
    return weft.Group.join(address, rank=rank, size=4, device="cpu", timeout=LONG)


def fill(group, heap, value):
    """Each rank writes its number into every share, and reads its own."""
    for peer in range(4):
        heap.tensor((4,), torch.int32, rank=peer)[group.rank] = value + group.rank
    group.barrier()
    here = heap.tensor((4,), torch.int32).tolist()
    group.barrier()
    return here


def newcomer(address, rank):
    with join(address, rank) as group:
        first, second = Operator(group), Operator(group)
        group.enter(timeout=LONG)
        group.barrier()
        for operator in (first, second):
            assert fill(group, operator.heap, 10) == [10, 11, 12, 13]
        assert group.all_gather(rank) == [0, 1, 2, 3]
        again = weft.Heap.create(group, 64)
        group.all_gather([again.generation, again.generation])


def replaced(group, victims):
    first = Operator(group)
    closed = Operator(group)
    closed.heap.close()
    second = Operator(group)
    where = [operator.heap.address(rank) for operator in (first, second) for rank in range(4)]
    views = [first.heap.tensor((4,), torch.int32, rank=rank) for rank in range(4)]
    before = shares_mapped()
    assert fill(group, first.heap, 0) == [0, 1, 2, 3]
    if group.rank in victims:
        die()
    assert group.recover(timeout=LONG).dead == tuple(victims)
    meeting = group.open_meeting()
    processes = []
    if group.rank == group.living[0]:
        processes = [fork(newcomer, meeting.address, rank) for rank in victims]
    group.replace(meeting, timeout=LONG)
    assert group.living == (0, 1, 2, 3)
    assert shares_mapped() == before
    assert where == [o.heap.address(rank) for o in (first, second) for rank in range(4)]
    for rank in victims:  # new memory, zero, under the views that there were
        assert views[rank].tolist() == [0, 0, 0, 0]
    group.barrier()
    for operator in (first, second):
        assert operator.asked[-2:] == ["quiesce", ("recover", 0b1111)]
        assert fill(group, operator.heap, 10) == [10, 11, 12, 13]
    assert [view.tolist() for view in views] == [[10, 11, 12, 13]] * 4
    assert group.all_gather(group.rank) == [0, 1, 2, 3]
    again = Heap.create(group, 64)
    said = group.all_gather([again.generation, second.heap.generation + 1])
    assert all(mine == said[0][0] and other == said[0][1] for mine, other in [said[group.rank]])
    assert {tuple(each) for each in said} == {(4, 4)}
    return [ended(process) for process in processes]


@pytest.mark.parametrize("victims", [[2], [0], [1, 3]])
def test_new_processes_take_the_place_of_the_dead(victims):
    results = run(replaced, victims)
    first = next(rank for rank in range(4) if rank not in victims)
    assert results[first] == [0] * len(victims)


def killed_again(address, rank, when):
    group = join(address, rank)
    if when == "joined":
        die()
    Operator(group)
    if when == "made":
        die()
    group.enter(timeout=LONG)
    if when == "entered":
        die()


def loses_it_again(group, when):
    """A replacement that dies at any step is recovered from, and replaced."""
    operator = Operator(group)
    lose(group, 3)
    for body, given in ((killed_again, [when]), (lives_on, [])):
        meeting, process = begin(group, body, 3, *given)
        error = raised(group.replace, meeting, timeout=LONG)[0]
        if body is killed_again:
            assert error in ("nothing", "RendezvousFailed", "CreationFailed")
            assert group.recover(timeout=LONG).dead == (3,)
    assert error == "nothing"
    assert ("recover", 0b1111) in operator.asked
    group.barrier()
    return ended(process) if process else None


def lives_on(address, rank):
    group = join(address, rank)
    made = Operator(group)
    group.enter(timeout=LONG)
    group.barrier()
    assert ("recover", 0b1111) in made.asked


@pytest.mark.parametrize("when", ["joined", "made", "entered"])
def test_a_replacement_that_dies_is_replaced(when):
    assert run(loses_it_again, when) == [0, None, None, None]


def meets_some(address, rank, how):
    """A new process that ends when rank 0 has its part of the first message, and no other has."""
    plane: Any = ControlPlane
    send = plane._send

    def one_part(self, peer, op, *given):
        send(self, peer, op, *given)
        if op == "replace":
            die() if how == "dies" else os.kill(os.getpid(), signal.SIGSTOP)

    plane._send = one_part
    join(address, rank)


def start_may_take_long():
    """Deadlines of this rank begin where all have met: a new process imports torch before."""
    groups: Any = weft.memory.recovery
    meet = groups.meet
    groups.meet = lambda *place, **given: meet(*place, **{**given, "timeout": LONG})


def meets_only_some(group, how):
    """All survivors take a new process in, or none does; then another takes the number."""
    plane: Any = ControlPlane
    take = plane.hear
    operator = Operator(group)
    lose(group, 3)

    def late(self, peer, op):
        """Has sent its part before it hears of the end, which rank 0 must not hear from it."""
        if op == "replace":
            time.sleep(0.5)
        return take(self, peer, op)

    if group.rank > 0:
        plane.hear = late
    meeting, process = begin(group, meets_some, 3, how)
    met = []
    meet_again = group._meet_again

    def noted(*given):
        met.append(meet_again(*given))
        return met[0]

    group._meet_again = noted
    start_may_take_long()
    wait = {"dies": LONG, "stops": 2.0, "rank 0 gives up": 4.0 if group.rank else 1.0}[how]
    error, text, _ = raised(group.replace, meeting, timeout=wait)
    gave_up = how == "rank 0 gives up" and group.rank == 0
    assert error == (RecoveryFailed if gave_up else RendezvousFailed).__name__, text
    if gave_up:  # and finds out in its recovery that none has taken it in
        assert "neither called recover nor ended" in text
    else:
        assert "rank 3 (pid " in text or "another survivor did not meet all" in text
    if process is not None:
        process.kill()
        process.join()
    plane.hear = take
    del group._meet_again
    dead = group.recover(timeout=LONG).dead
    assert group.all_gather(bool(met)) == [True, False, False, None]
    meeting, process = begin(group, lives_on, 3)
    group.replace(meeting, timeout=LONG)
    assert ("recover", 0b1111) in operator.asked
    group.barrier()
    return dead, ended(process) if process else 0


@pytest.mark.parametrize("how", ["dies", "stops", "rank 0 gives up"])
def test_a_new_process_that_only_some_have_met_is_taken_in_by_none(how):
    assert run(meets_only_some, how)[:3] == [((3,), 0)] * 3


def gives_up(group):
    """Rank 0 gives up waiting for the others, who then have met the new process as well."""
    operator = Operator(group)
    lose(group, 3)
    meeting, process = begin(group, lives_on, 3)
    take_in = group._take_in

    def late(*given):
        time.sleep(2.5)
        return take_in(*given)

    if group.rank > 0:
        group._take_in = late
    start_may_take_long()
    wait = LONG if group.rank else 1.0
    error, text, _ = raised(group.replace, meeting, timeout=wait)
    assert error == ("RendezvousFailed" if group.rank else "RecoveryFailed"), text
    assert ("rank 0 gave up waiting" if group.rank else "neither called recover") in text
    dead = group.recover(timeout=LONG).dead
    assert group.all_gather(group.rank) == [0, 1, 2, None]
    assert operator.asked[-1] == ("recover", 0b0111)
    return dead, ended(process) if process else 0


def test_a_survivor_that_gives_up_waiting_takes_in_what_the_others_have():
    assert run(gives_up)[:3] == [((3,), 1), ((3,), 0), ((3,), 0)]


class Interrupted(Exception):
    """What a signal handler may raise, anywhere."""


def interrupts(call):
    def interrupted(*given):
        call(*given)
        raise Interrupted

    return interrupted


def interrupted_while_it_moves(group, where):
    """Rank 1 is interrupted when all have decided to take the new process in."""
    operator = Operator(group)
    lose(group, 3)
    meeting, process = begin(group, lives_on, 3)
    before = len(os.listdir("/proc/self/fd"))
    if group.rank == 1:
        place: Any = operator if where == "_quiesce" else group._control
        setattr(place, where, interrupts(getattr(place, where)))
    error, text, _ = raised(group.replace, meeting, timeout=2.0)
    assert error == ("Interrupted" if group.rank == 1 else "RendezvousFailed"), text
    operator.__dict__.pop("_quiesce", None)
    if process is not None:
        process.kill()
        process.join()
    dead = group.recover(timeout=LONG).dead
    together(group)
    return dead, len(os.listdir("/proc/self/fd")) - before


@pytest.mark.parametrize("where", ["_quiesce", "_tell"])
def test_an_interrupted_survivor_goes_on_with_the_others_and_loses_no_descriptor(where):
    found = run(interrupted_while_it_moves, where)
    assert found[:3] == [((3,), -1), ((3,), 0), ((3,), 0)]  # rank 0 had the listener besides


def of_other_sizes(address, rank):
    group = join(address, rank)
    assert raised(Heap.create, group, 8192)[0] == "GeometryMismatch"


def with_other_operators(group):
    made = Heap.create(group, 4096)
    lose(group, 1)
    meeting, process = begin(group, of_other_sizes, 1)
    error = raised(group.replace, meeting, timeout=LONG)[:2]
    code = ended(process) if process else 0
    made.close()
    return error, code, group.recover(timeout=LONG).dead


def test_a_replacement_with_other_operators_is_refused_with_both_values():
    for result in run(with_other_operators):
        if result is not None:
            (kind, text), code, dead = result
            assert (kind, code, dead) == ("GeometryMismatch", 0, (1,))
            assert "rank 0 has size=4096 and rank 1 has size=8192" in text


def loses_its_hub(group):
    """Rank 0, where all meet, dies; a child that it forked has the listener, too."""
    lose(group, 2)
    meeting = group.open_meeting()
    child = os.fork() if group.rank == 0 else None
    if child == 0:
        time.sleep(LONG)
        os._exit(0)
    child = group.all_gather(child)[0]
    if group.rank == 0:
        die()
    error = raised(group.replace, meeting, timeout=60.0)
    dead = group.recover(timeout=LONG).dead
    if group.rank == 1:
        os.kill(child, signal.SIGKILL)
    return error, dead


def test_survivors_that_wait_for_a_dead_hub_are_told_while_its_child_lives():
    for (kind, text, took), dead in run(loses_its_hub)[1::2]:
        assert kind == RendezvousFailed.__name__
        assert re.fullmatch(r"rank 0 \(pid \d+\) died before all ranks had met", text), text
        assert took < 30.0
        assert dead == (0, 2)


def loses_one_that_came(group, over):
    """Rank 1 forks a child and dies where it waits in the meeting."""

    def fork_and_die():
        time.sleep(1.0)
        if os.fork() == 0:
            while not over.exists():
                time.sleep(0.1)
            os._exit(0)
        die()

    lose(group, 2)
    meeting = group.open_meeting()
    if group.rank == 1:
        threading.Thread(target=fork_and_die).start()
    error = raised(group.replace, meeting, timeout=60.0)
    dead = group.recover(timeout=LONG).dead
    over.touch()
    return error, dead


def test_a_death_in_the_meeting_is_told_while_a_forked_child_lives(tmp_path):
    for (kind, text, took), dead in run(loses_one_that_came, tmp_path / "over")[::3]:
        assert kind == RendezvousFailed.__name__
        assert re.fullmatch(r"rank 1 \(pid \d+\) died before all ranks had met", text), text
        assert took < 30.0
        assert dead == (1, 2)


def with_nobody(group):
    """Nobody is gone; then nobody comes. The survivors go on."""
    meeting = Meeting.open() if group.rank == 0 else None
    address = group.all_gather(meeting.address if meeting else None)[0]
    meeting = meeting or Meeting.at(address)
    early = raised(group.replace, meeting)[0]
    if group.rank == 3:
        die()
    group.recover(timeout=LONG)
    late = raised(group.replace, meeting, timeout=0.3)
    assert raised(group.all_gather, 1)[0] == RendezvousFailed.__name__
    assert group.recover(timeout=LONG).dead == (3,)
    assert group.all_gather(1) == [1, 1, 1, None]
    return early, late[:2]


def test_survivors_go_on_where_nobody_comes():
    for result in run(with_nobody)[:3]:
        early, (kind, text) = result
        assert early == OutOfOrder.__name__
        assert kind == RendezvousFailed.__name__
        assert "rank 3 of 4 did not come" in text


def both_join(address, rank):
    assert raised(join, address, rank)[0] == "RendezvousFailed"


def one_too_many(group):
    lose(group, 1)
    group.barrier()
    if group.rank == 3:  # a survivor that takes itself for a newcomer
        address = group.all_gather(None)[0]
        return raised(weft.Group.join, address, rank=3, size=4, device="cpu", timeout=LONG)[:2]
    opens = group.rank == 0
    meeting = Meeting.open() if opens else None
    address = group.all_gather(meeting.address if meeting else None)[0]
    process = fork(both_join, address, 1) if opens else None
    error = raised(group.replace, meeting or Meeting.at(address), timeout=LONG)[:2]
    return error, ended(process) if process else 0


def test_as_many_join_as_are_gone():
    for result in run(one_too_many):
        if result is not None and result[1] == 0:
            kind, text = result[0]
            assert kind == RendezvousFailed.__name__
            assert "goes on without ranks [1], and ranks [1, 3] join" in text


ROUND = Round(tokens=(8, 3, 8, 5))
LAYER = Case(CONFIGS["deepseek"], tokens=(8, 3, 8, 5))
LOADS = ([1.0] * 8, [9.0, 1, 1, 1, 1, 1, 1, 8], [1.0, 2, 3, 4, 5, 6, 7, 8])
PLACEMENTS = [balance(loads, 4, 8) for loads in LOADS]
TIMES: Any = {"timeout": LONG, "first_timeout": LONG}
KINDS = ("exchange", "leased exchange", "reduce", "layer", "sibling", "leased layer")


@dataclass
class Made:
    """What is open: its kind, the workspace of a layer, and where the experts of one are."""

    kind: str
    workspace: int
    placement: int
    object: Any = None


class Stack:
    """Objects that a sequence of steps opens, moves and closes; the seed decides it alone."""

    def __init__(self, seed: int, group: weft.Group | None) -> None:
        self.group, self.random, self.open = group, random.Random(seed), dict[int, Made]()
        for number in range(1, 13):
            self.step(number)
        for kind in ("exchange", "layer", "sibling", "leased layer"):  # none is ever missing
            self.add(100 + KINDS.index(kind), kind)

    def step(self, number: int) -> None:
        layers = [n for n, made in self.open.items() if "layer" in made.kind or made.workspace]
        verb = self.random.choice(["open", "open", "open", "close", "relocate", "fail"])
        if verb == "open":
            self.add(number, self.random.choice(KINDS))
        elif verb == "close" and self.open:
            made = self.open.pop(self.random.choice(sorted(self.open)))
            if made.object is not None:
                made.object.close()
        elif verb == "relocate" and layers:
            made = self.open[self.random.choice(layers)]
            made.placement = self.place()
            if made.object is not None:
                self.callable(made).relocate(PLACEMENTS[made.placement])
        elif verb == "fail" and self.group is not None:
            with pytest.raises(CreationFailed, match="rank 1"):
                LAYER.open(self.group, replicas=PLACEMENTS[0], num_sms=self.group.rank % 2 or None)

    def place(self) -> int:
        return self.random.randrange(len(PLACEMENTS))

    def add(self, number: int, kind: str) -> None:
        workspaces = [m.workspace for m in self.open.values() if m.workspace > 0]
        workspace = {"layer": number, "leased layer": -1}.get(kind, 0)
        if kind == "sibling":
            workspace = self.random.choice([*workspaces, number])
        made = self.open[number] = Made(kind, workspace, self.place())
        if self.group is not None:
            self.make(made)

    def make(self, made: Made) -> None:
        group = self.group
        assert group is not None
        exchange = ROUND.sizes(8) | TIMES
        replicas = PLACEMENTS[made.placement]
        weights = partial(stacked, group.device)
        own = {"shared": LAYER.shared(group.device), "correction": LAYER.correction(group.device)}
        sizes = TIMES | {"max_tokens": 8, "missing": "drop", "replicas": replicas} | own
        elder = next(
            (m for m in self.open.values() if m.workspace == made.workspace and m.object), None
        )
        if made.kind == "exchange":
            made.object = weft.AllToAll(group, **exchange)
        elif made.kind == "leased exchange":
            made.object = weft.lease(group, weft.AllToAll, **exchange)
        elif made.kind == "reduce":
            made.object = weft.AllReduce(group, max_tokens=8, hidden=128, **TIMES)
        elif made.kind == "leased layer":
            made.object = weft.lease(group, weft.MoE, LAYER.config, weights, **sizes)
        elif elder is not None:
            made.object = elder.object.sibling(weights, replicas=replicas, **own)
        else:
            made.object = weft.MoE(group, LAYER.config, weights, **sizes)

    def callable(self, made: Made) -> Any:
        return made.object.operator if made.kind.startswith("leased") else made.object

    def work(self) -> None:
        assert self.group is not None
        rank = self.group.rank
        for number, made in self.open.items():
            called = self.callable(made)
            if "exchange" in made.kind:
                play(called, ROUND.next(seed=number))
            elif made.kind == "reduce":
                rows = torch.full((8, 128), rank + 1.0, dtype=torch.bfloat16)
                assert torch.equal(called.fused(rows).out, torch.full_like(rows, 10.0))
            else:
                x, logits = LAYER.next(seed=number).of(rank, torch.device("cpu"))
                wanted = LAYER.wanted(called, x, logits)
                error = (called(x, logits).float() - wanted).abs().max()
                assert error <= bound(LAYER.config, wanted), (number, made.kind)


def stacked(device: torch.device, local: tuple[int, ...]) -> ExpertWeights:
    return ExpertWeights.stack(LAYER.config, [LAYER.expert(e) for e in local], device)


def works(address, rank, seed):
    """Make what is open, in the order in which it was opened."""
    plan = Stack(int(seed), None)
    group = plan.group = join(address, rank)
    for made in plan.open.values():
        plan.make(made)
    group.enter(timeout=LONG)
    plan.work()
    group.barrier()


def replaced_at_work(group, seed):
    before = group.timeout
    stack = Stack(seed, group)
    stack.work()
    where = [heap_of(stack.callable(made)).base for made in stack.open.values()]
    group.barrier()
    if group.rank == 2:
        die()
    assert raised(stack.work)[0] in ("PeerDied", "RendezvousFailed")
    group.recover(timeout=LONG)
    group.open_meeting()
    files = len(os.listdir("/proc/self/fd"))
    meeting = group.open_meeting()
    assert len(os.listdir("/proc/self/fd")) == files, "the earlier meeting is closed"
    process = start(works, meeting.address, 2, seed) if group.rank == 0 else None
    group.replace(meeting, timeout=LONG)
    assert group.timeout == before
    assert where == [heap_of(stack.callable(made)).base for made in stack.open.values()]
    stack.work()
    group.barrier()
    return process.wait() if process else 0


def heap_of(called: Any) -> Heap:
    heap: Heap = getattr(called, "exchange", called).heap
    return heap


@pytest.mark.parametrize("seed", range(3))
def test_any_objects_work_on_with_a_replacement(seed):
    print(f"seed {seed}")
    assert run(replaced_at_work, seed) == [0, 0, None, 0]


def wrong(group):
    return [
        raised(group.replace, "x")[:2],
        raised(group.replace, Meeting(0, b""), timeout=0)[:2],
        raised(group.enter, timeout=-1)[:2],
    ]


def test_wrong_arguments_are_named():
    for said in launch(wrong, ranks=2):
        assert [kind for kind, _ in said] == [InvalidArgument.__name__] * 3
        assert "meeting is 'x'" in said[0][1]
        assert "timeout is 0" in said[1][1]
        assert "timeout is -1" in said[2][1]
