"""Ranks are killed and stopped at random in calls of every kind; survivors go on, and are right.

    python -m tests.chaos --seconds 3600 [--seed 17]

A seed says who dies, when and how, so a run that failed can be made again. Four ranks make rounds
of an AllToAll, a LowLatencyAllToAll, an AllReduce and an MoE layer whose experts each lie on three
ranks. One or two of them are killed at a fault point of a kernel, at a random moment (of a round,
of an agreement, of a recovery), or are stopped by SIGSTOP, as one that hangs. In half of the runs
new processes then take their numbers, of which some are killed as well. Every result is compared
with the reference over the living, and at the end nothing may be mapped that was not before.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import weft
from tests import lowlatency_rounds, sums
from tests.alltoall.test_recovery import CASE as ROUND
from tests.alltoall.test_recovery import TOKENS, one_round
from tests.lowlatency_rounds import Mode
from tests.memory.baseline import state
from tests.moe.test_moe_recovery import CASE as LAYER
from tests.moe.test_moe_recovery import THRICE, WAYS
from tests.moe.test_relocation import hold, open_layer
from tests.recovery import plan_death
from weft.errors import BadExpertId, CreationFailed, GroupError, RendezvousFailed
from weft.memory.launch import launch

RANKS, STEPS, REPLACED = 4, 24, 16
KINDS = ("alltoall", "lowlatency", "reduce", "layer")
POINTS = {"alltoall": range(1, 8), "lowlatency": range(1, 8), "reduce": range(8, 11)}
LONG = 600.0
HANGS = 8.0  # seconds until a stopped rank is given up: a busy machine is slow, too
BROKEN = (GroupError, RendezvousFailed, CreationFailed)


@dataclass(frozen=True)
class Death:
    """rank: who.   step: before which.   how: "point", "kill", "stop" or "recovery".

    after: seconds from there, for all but "point".
    """

    rank: int
    step: int
    how: str
    after: float


@dataclass(frozen=True)
class Plan:
    """What a seed says. newcomers: seconds after which each new process dies; None: it lives."""

    seed: int
    way: str
    deaths: tuple[Death, ...]
    replaces: bool
    newcomers: tuple[float | None, ...]

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Draw everything."""
        draw = random.Random(seed)
        victims = draw.sample(range(RANKS), draw.choice((1, 1, 2)))
        deaths: list[Death] = []
        for rank in victims:
            how = draw.choices(("point", "kill", "stop", "recovery"), (4, 4, 1, 2))[0]
            if how == "recovery" and not deaths:
                how = "kill"  # there is nothing to recover from before
            deaths.append(Death(rank, draw.randrange(2, REPLACED - 4), how, draw.random() / 20))
        late = [draw.choice((None, None, 3 * draw.random())) for _ in victims]
        replaces = draw.random() < 0.5
        return cls(seed, draw.choice(list(WAYS)), tuple(deaths), replaces, tuple(late))

    @property
    def timeout(self) -> float:
        """Deadline of a call."""
        return HANGS if any(each.how == "stop" for each in self.deaths) else LONG


@dataclass
class Rank:
    """One rank's objects, and where it is."""

    group: weft.Group
    plan: Plan
    step: int = 0
    new: bool = False  # took a dead rank's number
    recoveries: int = 0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    operators: dict[str, Any] = field(default_factory=dict)

    def open(self, stack: ExitStack) -> None:
        """Make everything, in the same order on all ranks."""
        group, more = self.group, {"timeout": self.plan.timeout, "first_timeout": LONG}
        points: dict[str, Any] = {**more, "_defines": ("WEFT_FAULTS=1",)}
        sizes: dict[str, Any] = {
            "max_tokens": TOKENS,
            "top_k": ROUND.top_k,
            "num_experts": ROUND.experts,
        }
        mode = Mode(more=points)
        made: dict[str, Any] = {
            "alltoall": weft.AllToAll(group, hidden=ROUND.hidden, **sizes, **points),
            "lowlatency": mode.make(group, ROUND, TOKENS),
            "reduce": weft.AllReduce(group, max_tokens=8, hidden=256, missing="drop", **points),
            "layer": open_layer(group, LAYER, THRICE, **WAYS[self.plan.way], **more),
        }
        for each in made.values():
            stack.enter_context(each)
        self.operators = made

    def run(self) -> None:
        """All steps, whatever happens."""
        while True:
            try:
                if self.step >= REPLACED and self.plan.replaces and len(self.group.living) < RANKS:
                    self.replace()
                    continue
                if self.step < STEPS:
                    self.disturb()
                    self.one_step()
                    self.step += 1
                    continue
                if self.dying:  # somewhere before the others part
                    time.sleep(LONG)
                self.group.barrier(timeout=self.plan.timeout)
                return
            except BROKEN:
                self.recover()

    @property
    def dying(self) -> bool:
        """Is this rank to die?"""
        return not self.new and any(d.rank == self.group.rank for d in self.plan.deaths)

    def disturb(self) -> None:
        """What the plan has for this rank before this step."""
        for death in self.plan.deaths if self.dying else ():
            if death.rank != self.group.rank or death.step != self.step:
                continue
            kind = KINDS[self.step % len(KINDS)]
            if death.how == "point" and kind in POINTS:
                points = POINTS[kind]
                plan_death(self.operators[kind], points[self.plan.seed % len(points)])
            elif death.how != "recovery":
                end(death.after, signal.SIGSTOP if death.how == "stop" else signal.SIGKILL)

    def one_step(self) -> None:
        """A call of every kind in turn, compared with the reference over the living."""
        kind, living, seed = KINDS[self.step % len(KINDS)], list(self.group.living), self.step
        operator = self.operators[kind]
        if kind == "alltoall":
            case = ROUND.next(seed=seed)
            one_round(operator, case, living, "pull", rows=None, halves=False)
        elif kind == "lowlatency":
            case, mode = ROUND.next(seed=seed), Mode()
            lowlatency_rounds.play(operator, mode, case, living=living, checks=False)
        elif kind == "reduce":
            sums.play(operator, sums.Sum(tokens=5, seed=seed), "auto", None, living)
        else:
            x, logits = LAYER.next(seed=seed).of(self.group.rank, self.group.device)
            hold(operator, LAYER, operator(x, logits), seed)
        if len(living) == RANKS:
            operator.check()
            return
        with suppress(BadExpertId):  # of a rank that is gone; said once for each
            operator.check()

    def recover(self) -> None:
        """Go back to where all of the living are."""
        for death in self.plan.deaths if self.dying else ():
            if death.rank == self.group.rank and death.how == "recovery":
                end(death.after, signal.SIGKILL)
        suspects = [d.rank for d in self.plan.deaths if d.how == "stop"]
        while True:
            try:
                self.group.recover(suspects=suspects, timeout=LONG)
                said = self.group.all_gather(self.step, timeout=self.plan.timeout)
                self.step = min(said[rank] for rank in self.group.living)
                self.recoveries += 1
                return
            except BROKEN:
                continue

    def replace(self) -> None:
        """Take in new processes, until all live."""
        group = self.group
        meeting = group.open_meeting()
        gone = [rank for rank in range(RANKS) if rank not in group.living]
        if group.rank == group.living[0]:
            for at, rank in enumerate(gone):
                once = not self.processes[at:]  # the second one of a number lives
                dies = self.plan.newcomers[at] if once else None
                self.processes.append(start(meeting.address, rank, self.plan.seed, dies))
        group.replace(meeting, timeout=LONG)
        self.go_on_with_all()

    def go_on_with_all(self) -> None:
        """After a replacement: the new ranks hear where the old ones are."""
        self.step = max(self.group.all_gather(self.step, timeout=LONG))


def end(after: float, how: signal.Signals) -> None:
    """This process, some time from now."""
    threading.Timer(after, os.kill, (os.getpid(), how)).start()


def start(address: str, rank: int, seed: int, dies: float | None) -> subprocess.Popen[bytes]:
    """A new process that is to be rank `rank`."""
    given = [address, str(rank), str(seed), "never" if dies is None else str(dies)]
    code = "import sys; from tests.chaos import newcomer; newcomer(*sys.argv[1:])"
    return subprocess.Popen([sys.executable, "-c", code, *given])


def newcomer(address: str, rank: str, seed: str, dies: str) -> None:
    """What a new process does."""
    if dies != "never":
        end(float(dies), signal.SIGKILL)
    with ExitStack() as stack:
        group = weft.Group.join(address, rank=int(rank), size=RANKS, device="cpu", timeout=LONG)
        stack.enter_context(group)
        this = Rank(group, Plan.of(int(seed)), new=True)
        this.open(stack)
        group.enter(timeout=LONG)
        try:
            this.go_on_with_all()
        except BROKEN:
            this.step = REPLACED
            this.recover()
        this.run()


def rank_body(group: weft.Group, seed: int) -> dict[str, Any]:
    """A rank of the beginning; what a survivor has to say."""
    before = state()
    this = Rank(group, Plan.of(seed))
    with ExitStack() as stack:
        this.open(stack)
        this.run()
    codes = [process.wait(LONG) for process in this.processes]
    after = state()
    return {
        "living": group.living,
        "recoveries": this.recoveries,
        "codes": codes,
        "mapped": after[1] - before[1],
        "files": after[0] - before[0],
    }


def one_run(seed: int) -> None:
    """Raises AssertionError, or what a rank raised, with the seed in its text."""
    plan = Plan.of(seed)
    victims = {death.rank for death in plan.deaths}
    try:
        told = launch(rank_body, seed, ranks=RANKS, timeout=LONG, tolerate_deaths=True)
    except Exception as error:
        raise AssertionError(f"chaos of seed {seed} ({plan}): {error}") from error
    survivors = {rank for rank, each in enumerate(told) if each is not None}
    assert survivors == set(range(RANKS)) - victims, f"seed {seed}: {plan}: {told}"
    for rank in survivors:
        each = told[rank]
        expected = range(RANKS) if plan.replaces else sorted(survivors)
        assert each["living"] == tuple(expected), f"seed {seed}: {plan}: {told}"
        assert each["recoveries"] >= 1, f"seed {seed}: {plan}: {told}"
        assert each["mapped"] == 0, f"seed {seed}: {plan}: {told}"
        assert each["files"] <= 0, f"seed {seed}: {plan}: {told}"
        assert set(each["codes"]) <= {0, -signal.SIGKILL}, f"seed {seed}: {plan}: {told}"


def main() -> None:
    """Run seed after seed for so long."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0, help="the first; each run takes the next")
    given = parser.parse_args()
    began, seed = time.monotonic(), given.seed
    while time.monotonic() - began < given.seconds:
        print(seed, Plan.of(seed), flush=True)
        one_run(seed)
        seed += 1
    print(f"{seed - given.seed} runs, seeds {given.seed} to {seed - 1}, all right")


if __name__ == "__main__":
    main()
