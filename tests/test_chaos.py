# SPDX-License-Identifier: Apache-2.0
"""Kill and stop random ranks at random points, and check the survivors' results.

python -m tests.test_chaos 3600 [17]  # seconds, and the first seed
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.baseline import resource_counts
from tests.moe.test_moe_recovery import CASE as LAYER
from tests.moe.test_moe_recovery import THRICE, WAYS
from tests.moe.test_relocation import hold, open_layer
from tests.recovery import plan_death
from tests.subjects import SUBJECTS, Subject
from weft.errors import BadExpertId, CreationFailed, ExpertsLost, GroupError, RendezvousFailed
from weft.group import control as control_plane
from weft.group import meeting, wire
from weft.group.meeting import Meeting
from weft.launcher import processes
from weft.launcher.launch import launch
from weft.moe import ExpertWeights, Replicas

RANKS, STEPS, REPLACED = 4, 30, 18
KINDS = ("alltoall", "lowlatency", "reduce", "layer", "relocate")
POINTS = {"alltoall": range(1, 8), "lowlatency": range(1, 8), "reduce": range(8, 11)}
PLACES = (THRICE, Replicas(THRICE.logical[::-1], RANKS))
CALL = 8.0  # seconds for a call or a control message: a busy machine is slow, too
JOIN = 12.0  # for new processes to come, and each of their steps
RECOVER = 15.0
LIMIT = 240.0  # for a run, which may compile kernels first
TRIES = 8  # recoveries one after the other
BROKEN = (GroupError, RendezvousFailed, CreationFailed)
IMPORTED = (Subject.__module__, open_layer.__module__, "pytest", "sympy")  # sympy: by torch, in 5 s
BEFORE_END = threading.Lock()  # held for good by a process that is struck no more
REFUSED = 3  # exit code of a new process that was not taken in


@dataclass(frozen=True)
class Death:
    """When and how a process is killed or stopped.

    place: "round" (before `step`); the first "recovery" or "replacement" that it takes part in;
        "newcomer" (from its start).
    how: "point" (a fault point of a kernel), "kill", "stop".
    after: seconds from there, or control messages, or the number of the fault point.
    """

    place: str
    how: str
    after: float
    frames: bool = False
    step: int = 0

    def arm(self) -> None:
        if self.frames:
            self._at_frame()
        else:
            timer = threading.Timer(self.after, self._strike)
            timer.daemon = True
            timer.start()

    def _strike(self) -> None:
        with BEFORE_END:
            os.kill(os.getpid(), signal.SIGSTOP if self.how == "stop" else signal.SIGKILL)

    def _at_frame(self) -> None:
        """Kill this rank before it sends a given control message; each message goes to one peer."""
        send, left = wire.send, [int(self.after)]

        def counted(*args: Any) -> bool:
            left[0] -= 1
            if left[0] == 0:
                self._strike()
            return send(*args)

        for module in (control_plane, meeting):
            vars(module)["send"] = counted


@dataclass(frozen=True)
class Plan:
    """Deaths of the ranks, and of new processes in the order of their start; later ones live."""

    seed: int
    way: str
    replaces: bool
    deaths: dict[int, Death]
    newcomers: tuple[Death | None, ...]

    @classmethod
    def from_seed(cls, seed: int) -> Plan:
        draw = random.Random(seed)
        replaces = draw.random() < 0.5
        victims = draw.sample(range(RANKS), draw.choice((1, 1, 2)))
        deaths: dict[int, Death] = {}
        for rank in victims:
            places = ["round"] if not deaths else ["round", "recovery"] + ["replacement"] * replaces
            deaths[rank] = drawn_death(draw, draw.choice(places))
        newcomers = [
            drawn_death(draw, "newcomer") if draw.random() < 0.7 else None
            for _ in range(len(victims) + 1)
        ]
        return cls(seed, draw.choice(list(WAYS)), replaces, deaths, tuple(newcomers))

    def stops(self, place: str = "") -> bool:
        every = (*self.deaths.values(), *filter(None, self.newcomers))
        return any(death.how == "stop" and place in ("", death.place) for death in every)

    def __str__(self) -> str:
        struck = [f"rank {rank}: {death}" for rank, death in self.deaths.items()]
        new = [str(death) for death in self.newcomers] if self.replaces else []
        return f"{self.way}; {'; '.join(struck)}" + "".join(f"; new: {each}" for each in new)


def drawn_death(draw: random.Random, place: str) -> Death:
    how = "stop" if draw.random() < 0.2 else "kill"
    if place == "round":
        step = draw.randrange(2, REPLACED - 4)
        kind = KINDS[step % len(KINDS)]
        if kind == "relocate" and draw.random() < 0.8:
            return Death(place, how, draw.randrange(1, 60), frames=True, step=step)
        if kind in POINTS and how == "kill" and draw.random() < 0.5:
            return Death(place, "point", draw.choice(POINTS[kind]), step=step)
        return Death(place, how, draw.random() / 20, step=step)
    frames = {"recovery": 10, "replacement": 40, "newcomer": 90}[place]
    seconds = {"recovery": 0.02, "replacement": 0.5, "newcomer": 1.5}[place]
    if draw.random() < 0.7:
        return Death(place, how, draw.randrange(1, frames), frames=True)
    return Death(place, how, seconds * draw.random())


@dataclass
class Rank:
    group: weft.Group
    plan: Plan
    folder: Path
    new: bool = False  # took a dead rank's number
    step: int | None = 0  # None: before it knows where the others are
    recoveries: int = 0
    operators: dict[str, Any] = field(default_factory=dict)
    subjects: dict[str, Subject] = field(default_factory=dict)

    def open(self, stack: ExitStack) -> None:
        group, more = self.group, {"timeout": CALL, "first_timeout": CALL}
        points: dict[str, Any] = {**more, "_defines": ("WEFT_FAULTS=1",)}
        names = {"alltoall": "pull", "lowlatency": "low latency", "reduce": "all-reduce"}
        for kind, name in names.items():
            self.subjects[kind] = stack.enter_context(SUBJECTS[name].open(group, **points))
            self.operators[kind] = self.subjects[kind].made
        layer = open_layer(group, LAYER, THRICE, **WAYS[self.plan.way], **more)
        self.operators["layer"] = stack.enter_context(layer)
        group.timeout = CALL

    def run(self) -> None:
        together = self.step is not None
        while True:
            try:
                if not together:
                    self.come_together()
                    together = True
                assert self.step is not None
                if self.step >= REPLACED and self.plan.replaces and len(self.group.living) < RANKS:
                    together = False
                    self.replace()
                elif self.step < STEPS:
                    self.disturb()
                    self.one_step(self.step)
                    self.step += 1
                elif self.death is not None:
                    time.sleep(CALL)
                    raise AssertionError(f"rank {self.group.rank} still lives: {self.death}")
                else:
                    if self.new:  # who is struck in the last message may leave the others apart
                        BEFORE_END.acquire(blocking=False)
                    self.group.barrier()
                    return
            except BROKEN:
                together = False
                self.recover()

    @property
    def death(self) -> Death | None:
        return None if self.new else self.plan.deaths.get(self.group.rank)

    def strike(self, place: str) -> None:
        if self.death is not None and self.death.place == place:
            self.death.arm()

    def disturb(self) -> None:
        death = self.death
        if death is None or death.place != "round" or death.step != self.step:
            return
        if death.how == "point":
            plan_death(self.operators[KINDS[self.step % len(KINDS)]], int(death.after))
        else:
            death.arm()

    def one_step(self, step: int) -> None:
        kind, living = KINDS[step % len(KINDS)], list(self.group.living)
        if kind == "relocate":
            self.operators["layer"].relocate(PLACES[step // len(KINDS) % 2])
            return
        operator = self.operators[kind]
        if kind == "layer":
            x, logits = LAYER.next(seed=step).inputs_of(self.group.rank, self.group.device)
            hold(operator, LAYER, operator(x, logits), step)
        else:
            self.subjects[kind].play(step, living)
        if len(living) == RANKS:
            operator.check()
            return
        with suppress(BadExpertId):  # of a rank that is gone; raised once for each
            operator.check()

    def recover(self) -> None:
        self.strike("recovery")
        suspects = [rank for rank, death in self.plan.deaths.items() if death.how == "stop"]
        if self.plan.stops("newcomer"):
            suspects = list(self.plan.deaths)
        last: Exception | None = None
        for _ in range(TRIES):
            try:
                self.group.recover(suspects=suspects, timeout=RECOVER)
            except (ExpertsLost, CreationFailed) as error:
                last = error
                if "a relocation failed" not in str(error):
                    continue
            except BROKEN as error:
                last = error
                continue
            self.recoveries += 1
            return
        raise AssertionError(f"{TRIES} recoveries failed, the last one by: {last}") from last

    def come_together(self) -> None:
        """Return to the common step of all old ranks, with the weights of one placement."""
        layer = self.operators["layer"]
        reported = self.group.all_gather([self.step, layer._placement.relocation_failed])
        known = [reported[rank] for rank in self.group.living]
        step = min(each[0] for each in known if each[0] is not None)
        if any(mixed or at is None for at, mixed in known):
            place, rank = PLACES[step % 2], self.group.rank
            own = [LAYER.expert(e) for e in place.logical_experts(rank)]
            weights = ExpertWeights.stack(LAYER.config, own, self.group.device)
            layer.relocate(place, weights=weights)
        self.step = step

    def replace(self) -> None:
        group = self.group
        self.strike("replacement")
        meeting = group.open_meeting()
        if group.rank == group.living[0]:
            gone = [rank for rank in range(RANKS) if rank not in group.living]
            ask(self.folder, "start", meeting.address, gone)
        try:
            group.replace(meeting, timeout=JOIN)
        except BROKEN:
            ask(self.folder, "end", meeting.address)
            raise


def ask(folder: Path, what: str, address: str, ranks: list[int] | None = None) -> None:
    path = folder / f"{time.monotonic_ns()}.{os.getpid()}"
    path.write_text(json.dumps([what, address, ranks]))
    path.rename(path.with_suffix(".ask"))


class Newcomers:
    """New processes, started and ended by the driver because any rank may die. Context manager.

    A thread does what ranks `ask` for. One that ends, ends its meeting, as a launcher does.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder, self._stop = plan, folder, threading.Event()
        self._late = iter(plan.newcomers)
        self.started: list[tuple[str, BaseProcess]] = []  # with the address of its meeting
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        ended: set[int] = set()
        try:
            while not self._stop.wait(0.01):
                for path in sorted(self._folder.glob("*.ask")):
                    what, address, ranks = json.loads(path.read_text())
                    path.unlink()
                    for rank in ranks or ():
                        self._start(address, rank)
                    if what == "end":
                        self._end(address)
                for at, (address, process) in enumerate(self.started):
                    if at not in ended and process.exitcode is not None:
                        ended.add(at)
                        Meeting.from_address(address).abort(f"{process.name} ended")
        except BaseException as error:
            self._error = error

    def _start(self, address: str, rank: int) -> None:
        death = next(self._late, None)
        inputs = address, rank, self._plan.seed, death, str(self._folder), len(self.started)
        name = f"the new process of rank {rank}"
        process = processes.start_fork_server(IMPORTED).Process(
            target=newcomer, args=inputs, name=name
        )
        process.start()
        self.started.append((address, process))

    def _end(self, address: str) -> None:
        for place, process in self.started:
            if place == address and process.exitcode is None:
                process.kill()

    def __enter__(self) -> Newcomers:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        processes = [process for _, process in self.started]
        deadline = time.monotonic() + CALL
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._stop.set()
        self._thread.join()
        stuck = [process.name for process in processes if process.exitcode is None]
        for process in processes:
            process.kill()
            process.join()
        if self._error is not None:
            raise self._error
        assert not stuck, f"{', '.join(stuck)} did not end"


def newcomer(
    address: str, rank: int, seed: int, death: Death | None, folder: str, number: int
) -> None:
    plan = Plan.from_seed(seed)
    with stacks(Path(folder), f"newcomer {rank} {number}"):
        before = resource_counts()
        if death is not None:
            death.arm()
        try:
            group = weft.Group.join(address, rank=rank, size=RANKS, device="cpu", timeout=JOIN)
        except BROKEN:
            sys.exit(REFUSED)
        with group, ExitStack() as stack:
            this = Rank(group, plan, Path(folder), new=True, step=None)
            group.timeout = JOIN
            try:
                this.open(stack)
                group.enter(timeout=JOIN)
            except BROKEN:
                sys.exit(REFUSED)
            this.run()
        Path(folder, f"newcomer {rank} {number}.json").write_text(json.dumps(outcome(this, before)))


@contextlib.contextmanager
def stacks(folder: Path, name: str) -> Iterator[None]:
    """Context manager that writes all thread stacks if a process runs too long or raises."""
    torch.set_num_threads(1)
    path = folder / f"{name}.stack"
    with path.open("w") as file:
        file.write(f"pid {os.getpid()}\n")
        file.flush()
        faulthandler.dump_traceback_later(LIMIT - 10.0, file=file)
        try:
            yield
        except Exception:
            file.write(traceback.format_exc())
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
    path.unlink()


def outcome(this: Rank, before: tuple[int, int, int]) -> dict[str, Any]:
    after = resource_counts()
    kept = {"mapped": after[1] - before[1], "files": after[0] - before[0]}
    return {"living": this.group.living, "recoveries": this.recoveries, **kept}


def rank_body(group: weft.Group, seed: int, folder: str) -> dict[str, Any]:
    with stacks(Path(folder), f"rank {group.rank}"):
        before = resource_counts()
        this = Rank(group, Plan.from_seed(seed), Path(folder))
        with ExitStack() as stack:
            this.open(stack)
            this.run()
        return outcome(this, before)


def work(plan: Plan, folder: Path) -> None:
    with Newcomers(plan, folder) as new:
        messages = launch(
            rank_body, plan.seed, str(folder), ranks=RANKS, timeout=LIMIT, tolerate_deaths=True
        )
    survivors = {rank for rank, each in enumerate(messages) if each is not None}
    assert survivors == set(range(RANKS)) - set(plan.deaths), f"{messages}"
    reported = {f"rank {rank}": messages[rank] for rank in survivors}
    for path in folder.glob("newcomer *.json"):
        reported[path.stem] = json.loads(path.read_text())
    joined = {int(name.split()[1]) for name in reported if name.startswith("newcomer")}
    assert joined == (set(plan.deaths) if plan.replaces else set()), f"{reported}"
    for name, each in reported.items():
        expected = range(RANKS) if plan.replaces else sorted(survivors)
        assert list(each["living"]) == list(expected), f"{name}: {reported}"
        assert each["recoveries"] >= 1 or name.startswith("newcomer"), f"{name}: {reported}"
        assert each["mapped"] == 0, f"{name}: {reported}"
        assert each["files"] <= 0, f"{name}: {reported}"
    ends = {process.name: process.exitcode for _, process in new.started}
    assert {*ends.values()} <= {0, -signal.SIGKILL, REFUSED}, f"{ends}"


def one_run(seed: int) -> None:
    """Play one seed. Raises AssertionError with the seed and the stacks of hanging ranks."""
    plan = Plan.from_seed(seed)
    processes.start_fork_server(IMPORTED)  # whose own directory is not one of this run
    shared = in_shared_memory()
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as place,
        pytest.MonkeyPatch.context() as patch,
    ):
        folder, below = Path(place), Path(place, "tmp")
        below.mkdir()  # ranks meet in directories below it
        patch.setattr(tempfile, "tempdir", str(below))
        patch.setenv("TMPDIR", str(below))
        try:
            work(plan, folder)
            deadline = time.monotonic() + CALL
            while left := [*os.listdir(below), *of_fork_server(), *(in_shared_memory() - shared)]:
                assert time.monotonic() < deadline, f"left: {left}"
                time.sleep(0.1)
        except Exception as error:
            where = [f"{path.stem}: {path.read_text()}" for path in folder.glob("*.stack")]
            text = "\n".join([f"chaos of seed {seed} ({plan}): {error}", *sorted(where)])
            raise AssertionError(text) from error


def in_shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("weft")}


def of_fork_server() -> list[str]:
    server: Any = forkserver
    parent, result = server._forkserver._forkserver_pid, []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and fields[0] != "Z":
                result.append(f"{path.parent.name} ({fields[0]})")
    return result


SEEDS = [seed for seed in range(40) if not Plan.from_seed(seed).stops()][:8]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_survivors_are_right_for_some_seeds(seed):
    print(seed, Plan.from_seed(seed))
    one_run(seed)


def main() -> None:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    end = time.monotonic() + seconds
    while (start := time.monotonic()) < end:
        one_run(seed)
        print(f"{seed}, {time.monotonic() - start:.1f} s: {Plan.from_seed(seed)}", flush=True)
        seed += 1


if __name__ == "__main__":
    from tests import test_chaos  # so that processes find what they run by its name

    test_chaos.main()
