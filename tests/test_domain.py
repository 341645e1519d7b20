# SPDX-License-Identifier: Apache-2.0
"""Domains of more than 32 ranks, up to 72: sets of ranks take several words there.

Every result is compared with `weft.reference`, bit by bit, also after a rank has died.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import Any

import pytest

import weft
from tests import lowlatency_rounds, sums
from tests.lowlatency_rounds import Mode
from tests.rounds import Round, combining, play
from weft.errors import InvalidArgument, PeerDied
from weft.shape import MAX_RANKS

RANKS, VICTIM = 72, 70  # in the last word of a set, and above the bits of the host's first word
WAYS = ("pull", "push", "fp8")
PATIENT: dict[str, Any] = {"timeout": 120.0, "first_timeout": 120.0}  # all ranks share few cores
MODES = (Mode(more=PATIENT), Mode(reduce="sender", combine_dtype="fp8", more=PATIENT))


def case_of(ranks: int) -> Round:
    """Tokens of every rank, 8 at most, and experts that do not divide by the ranks."""
    return Round(
        tokens=tuple((5 * rank + 3) % 9 for rank in range(ranks)),
        top_k=6,
        experts=ranks + 11,
        hidden=128,
        add=True,
    )


class Domain:
    """One operator of each kind, and a round of all of them among the living."""

    def __init__(self, group: weft.Group, stack: ExitStack) -> None:
        self.group, self.case = group, case_of(group.size)
        sizes = self.case.sizes(8)
        self.exchanges = [
            stack.enter_context(weft.AllToAll(group, **sizes, **combining(way), **PATIENT))
            for way in WAYS
        ]
        self.low = [stack.enter_context(mode.make(group, self.case, 8)) for mode in MODES]
        self.sum = stack.enter_context(
            weft.AllReduce(group, max_tokens=8, hidden=128, missing="drop", **PATIENT)
        )

    def play(self, seed: int, living: list[int]) -> None:
        """Rounds of every operator."""
        case = self.case.next(seed=seed)
        for a2a in self.exchanges:
            play(a2a, case, poison=False, living=living)
        for mode, low in zip(MODES, self.low, strict=True):
            lowlatency_rounds.play(low, mode, case, living=living, checks=False)
        sums.play(self.sum, sums.Sum(tokens=5, hidden=128, seed=seed), "auto", None, living)


def rounds(group: weft.Group) -> None:
    with ExitStack() as stack:
        domain = Domain(group, stack)
        for seed in range(2):
            domain.play(seed, list(range(group.size)))
        two_shots = stack.enter_context(
            weft.AllReduce(group, max_tokens=2 * group.size, hidden=128, **PATIENT)
        )
        sums.play(two_shots, sums.Sum(tokens=group.size + 3, hidden=128), "twoshot")


def rounds_and_a_death(group: weft.Group) -> tuple[int, ...]:
    """A rank dies; all others name it, agree on it, and go on."""
    with ExitStack() as stack:
        domain = Domain(group, stack)
        domain.play(0, list(range(group.size)))
        group.barrier()
        if group.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerDied, match=rf"rank {VICTIM} died"):
            domain.play(0, list(range(group.size)))
        found = group.recover(timeout=300.0)
        assert found.dead == (VICTIM,)
        assert len(found.living) == RANKS - 1
        domain.play(1, list(found.living))
        return found.dead


@pytest.mark.parametrize("ranks", [33, pytest.param(40, marks=pytest.mark.slow)])
def test_more_than_one_word_of_ranks(ranks: int) -> None:
    weft.launch(rounds, ranks=ranks, device="threads")


@pytest.mark.slow
def test_72_ranks_and_a_death_among_them() -> None:
    said = weft.launch(rounds_and_a_death, ranks=RANKS, timeout=3000.0, tolerate_deaths=True)
    assert said == [None if rank == VICTIM else (VICTIM,) for rank in range(RANKS)]


def test_more_ranks_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"ranks is 73; it must be an integer in 1\.\.72"):
        weft.launch(rounds, ranks=MAX_RANKS + 1, device="threads")
