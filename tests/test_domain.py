# SPDX-License-Identifier: Apache-2.0
"""Domains of more than 32 ranks, up to 72, where a rank set takes several words.

Every result is compared with `weft.reference`, bit by bit, also after a rank has died.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest

import weft
from tests import lowlatency_rounds, sums
from tests.baseline import die
from tests.lowlatency_rounds import Mode
from tests.ranks import on_ranks
from tests.rounds import Round, combine_options, play
from weft.errors import BadExpertId, PeerDied

RANKS, VICTIM = 72, 70  # in the last word of a set, and above the bits of the host's first word
WAYS = ("pull", "push", "fp8")
MODES = (Mode(), Mode(reduce="sender", combine_dtype="fp8"))


def case_of(ranks: int) -> Round:
    """Return a round with up to 8 tokens per rank and experts that do not divide by the ranks."""
    return Round(
        tokens=tuple((5 * rank + 3) % 9 for rank in range(ranks)),
        top_k=6,
        experts=ranks + 11,
        hidden=128,
        add=True,
    )


class Domain:
    """One operator of each kind, and a round of all of them among the living."""

    def __init__(self, group: weft.Group, stack: ExitStack, ways=WAYS, modes=MODES) -> None:
        self.group, self.case, self.modes = group, case_of(group.size), modes
        sizes = self.case.sizes(8)
        self.exchanges = [
            stack.enter_context(weft.AllToAll(group, **sizes, **combine_options(way)))
            for way in ways
        ]
        self.low = [stack.enter_context(mode.make(group, self.case, 8)) for mode in modes]
        self.sum = stack.enter_context(
            weft.AllReduce(group, max_tokens=8, hidden=128, missing="drop")
        )

    def play(self, seed: int, living: list[int]) -> None:
        """Run one round of every operator."""
        case = self.case.next(seed=seed)
        for a2a in self.exchanges:
            play(a2a, case, poison=False, living=living)
        for mode, low in zip(self.modes, self.low, strict=True):
            lowlatency_rounds.play(low, mode, case, living=living, checks=False)
        sums.play(self.sum, sums.Sum(tokens=5, hidden=128, seed=seed), "auto", None, living)


@on_ranks(33, "threads")
def test_more_than_one_word_of_ranks(group: weft.Group) -> None:
    case, living = case_of(33), list(range(33))
    with weft.AllToAll(group, **case.sizes(8)) as a2a:
        play(a2a, case, poison=False)
    with MODES[0].make(group, case, 8) as low:
        lowlatency_rounds.play(low, MODES[0], case, living=living, checks=False)
    with weft.AllReduce(group, max_tokens=8, hidden=128) as reduce:
        sums.play(reduce, sums.Sum(tokens=5, hidden=128), "auto", None, living)


@pytest.mark.slow
@on_ranks(40, "threads")
def test_every_way_with_more_than_one_word_of_ranks(group: weft.Group) -> None:
    with ExitStack() as stack:
        domain = Domain(group, stack)
        for seed in range(2):
            domain.play(seed, list(range(group.size)))
        two_shots = stack.enter_context(
            weft.AllReduce(group, max_tokens=2 * group.size, hidden=128)
        )
        sums.play(two_shots, sums.Sum(tokens=group.size + 3, hidden=128), "twoshot")


@pytest.mark.slow
@on_ranks(RANKS, "cpu", dies=[VICTIM])
def test_72_ranks_and_a_death_among_them(group: weft.Group) -> None:
    """All others name the dead rank, agree on it, and continue."""
    with ExitStack() as stack:
        domain = Domain(group, stack, ways=("push",), modes=MODES[1:])
        whole = list(range(RANKS))
        domain.play(0, whole)
        group.barrier()
        if group.rank == VICTIM:
            die()
        with pytest.raises(PeerDied, match=rf"rank {VICTIM} died"):
            domain.play(0, whole)
        recovery = group.recover(timeout=600.0)
        assert recovery.dead == (VICTIM,)
        assert len(recovery.living) == RANKS - 1
        domain.play(1, list(recovery.living))
        for exchange in (*domain.exchanges, *domain.low):
            with suppress(BadExpertId):  # of ids that went to the dead rank's experts
                exchange.check()
