# SPDX-License-Identifier: Apache-2.0
"""Ranks die one by one or at once; the others continue with the same objects, bit by bit.

After each recovery the memory of the dead can be neither read nor written.
"""

import threading
import time
from typing import Any

import pytest
import torch

import weft
from tests import faults
from tests.baseline import die
from tests.operators import EMULATED, KINDS, SUBJECTS, Operator
from tests.patience import SECONDS
from tests.ranks import on_ranks
from tests.recovery import Survivors, plan_death, run_until_broken
from tests.sums import Sum, play
from weft.errors import Aborted, BadExpertId, PeerDied

ORDER = (2, 0, 3)  # the ranks die in this order; rank 1 is left alone
PHASES = {
    "dispatch": (faults.DISPATCH_ENTER, faults.AFTER_PAYLOAD, faults.BEFORE_FLAG),
    "waits": (faults.BEFORE_POLL, faults.BEFORE_READ, faults.BEFORE_POLL),
    "combine": (faults.COMBINE_ENTER, faults.BEFORE_READY, faults.BEFORE_READ),
    "sum": (faults.REDUCE_ENTER, faults.AFTER_ROWS, faults.BEFORE_ROWS),
    "sum's waits": (faults.BEFORE_ROWS,) * 3,
    "send": (faults.COMBINE_ENTER, faults.AFTER_PAYLOAD, faults.COMBINE_ENTER),
}
EXCHANGES = [name for name in EMULATED if not name.startswith("all-reduce")]
# One phase of each in the fast tier.
DEATHS: list[Any] = [
    pytest.param(name, phase, marks=[] if i % 3 == j else pytest.mark.slow)
    for i, name in enumerate(EXCHANGES)
    for j, phase in enumerate(("dispatch", "combine", "waits"))
]
DEATHS += [(name, "send") for name in SUBJECTS if name.startswith("sends")]
DEATHS += [("all-reduce", "sum"), pytest.param("all-reduce", "sum's waits", marks=pytest.mark.slow)]


def lose_one_by_one(group, name, points):
    """Kill a rank at each point, or for None before a round of emulated kernels; continue."""
    survivors, emulated = Survivors(group), None in points
    with SUBJECTS[name](group, **({} if emulated else {"_defines": faults.FAULTS})) as subject:
        if emulated:
            subject.emulate()
        made, sums = subject.operator, isinstance(subject.operator, weft.AllReduce)
        subject.rounds(4, survivors.ranks)
        for dies, point in zip(ORDER, points, strict=False):
            survivors.barrier()
            if group.rank == dies:
                die() if point is None else plan_death(made, point)
            text = run_until_broken(lambda: subject.rounds(1, survivors.ranks, checks=False))
            assert f"rank {dies}" in text or "left its calls to recover" in text, text
            assert any(operator.broken for operator in (made, *subject.beside))
            survivors.lose(dies, sealed=[made, *subject.beside])
            assert not made.broken
            assert made.count_finished_rounds() == 0
            subject.rounds(8, survivors.ranks, checks=False)
            if not sums:
                with pytest.raises(
                    BadExpertId, match=f"expert of rank {dies}, which has exited: [^(]*$"
                ):
                    made.check()  # names it once, and no other
            subject.rounds(2, survivors.ranks)
            assert sums or made.count_finished_rounds() == 10
        survivors.barrier()


@pytest.mark.parametrize(("name", "phase"), DEATHS)
@on_ranks(4, "cpu", dies=ORDER)
def test_survivors_continue_after_a_death_in_any_phase(group, name, phase):
    lose_one_by_one(group, name, PHASES[phase])


@pytest.mark.slow
@pytest.mark.parametrize("name", EMULATED)
@on_ranks(4, "cpu", dies=ORDER[:2])
def test_kernels_continue_without_reading_the_dead(group, name):
    lose_one_by_one(group, name, (None, None))


@on_ranks(3, "cpu", dies=[2])
def test_a_sum_over_all_is_refused_when_a_rank_is_gone(group: weft.Group) -> None:
    case, survivors = Sum(tokens=5), Survivors(group)
    with weft.AllReduce(group, max_tokens=8, hidden=256, _defines=faults.FAULTS) as ar:
        play(ar, case, "twoshot")
        survivors.barrier()
        if group.rank == 2:
            plan_death(ar, faults.AFTER_ROWS)
        run_until_broken(lambda: play(ar, case, "twoshot"))
        survivors.lose(2)
        x = torch.ones((3, 256), dtype=torch.bfloat16)
        assert ar.broken
        for _ in range(2):
            with pytest.raises(PeerDied, match="rank 2 has exited, and this all-reduce sums"):
                ar.fused(x)
        survivors.barrier()


WRAPS = (1 << 40) - 200  # of an epoch, among the rounds after a recovery
CASES = ("pull", "fp8", "receiver", "sender", "oneshot")


def open_kind(group: weft.Group, kind: str) -> Operator:
    more: dict[str, Any] = {"missing": "drop", "backends": None} if kind == "oneshot" else {}
    return KINDS[kind].open(group, _first_epoch=WRAPS, **more)


def kill(survivors: Survivors, op: Operator, *dies: int) -> None:
    survivors.barrier()
    if survivors.group.rank in dies:
        die()
    run_until_broken(lambda: op.round())
    survivors.lose(*dies, sealed=[op.operator])


@pytest.mark.parametrize("kind", CASES)
@on_ranks(4, "cpu", dies=[1, 3])
def test_many_rounds_after_two_deaths(group: weft.Group, kind: str) -> None:
    survivors, rounds = Survivors(group), 400
    with open_kind(group, kind) as op:
        op.rounds(2)
        kill(survivors, op, 1, 3)  # at once
        first = op.enqueue(3.0).clone()
        if kind == "oneshot":
            assert bool((first == 3.0 * len(survivors.ranks)).all())
        else:
            with pytest.raises(BadExpertId, match="which has exited"):
                op.operator.check()
        for _ in range(rounds):
            last = op.enqueue(3.0)
        assert torch.equal(first, last)
        op.operator.check()
        assert op.operator.count_finished_rounds() == rounds + 1
        survivors.barrier()


@on_ranks(3, "cpu")
def test_a_rank_that_recovers_ends_its_own_calls_and_its_peers(group: weft.Group) -> None:
    with open_kind(group, "pull") as op:
        op.round()
        group.barrier()
        if group.rank == 0:
            errors: list[BaseException] = []

            def wait() -> None:
                try:
                    op.round()
                except BaseException as error:
                    errors.append(error)

            clock = op.operator.read_own_header().waiting_ns
            thread = threading.Thread(target=wait)
            thread.start()
            until = time.monotonic() + SECONDS
            while op.operator.read_own_header().waiting_ns == clock and time.monotonic() < until:
                time.sleep(0.01)  # until the call waits for its peers
            op.operator.quiesce()
            thread.join(60.0)
            assert isinstance(errors[0], Aborted)
            with pytest.raises(Aborted):
                op.round()
        elif group.rank == 1:
            text = run_until_broken(lambda: op.round())
            assert "rank 0 left its calls to recover its group before it made its part" in text
        group.barrier()  # rank 2 makes no call
