# SPDX-License-Identifier: Apache-2.0
"""A rank dies, hangs, raises or closes: the others notice soon, and their errors name that rank.

Deadlines are ten minutes here, so an error that comes at all has not waited for one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import weft
from tests.baseline import die, raises_soon
from tests.faults import ANY_PEER, DIE, plan_fault
from tests.operators import FOR_EACH_PEER, HIDDEN, KINDS, POINTS, TOP_K
from tests.patience import hurry
from tests.ranks import on_ranks
from weft.errors import PeerDied, PeerLeft, RankFailed
from weft.heap.header import RING_RECORDS

SOON = 60.0  # seconds: a loaded machine may take long, but a deadline takes ten times that


def blamed(text: str) -> int:
    """Return the rank that an error names after its own rank and the phase."""
    result = re.search(r"rank (\d+)", re.sub(r"^rank \d+, [^:]*: ", "", text))
    assert result is not None, text
    return int(result[1])


def deaths() -> Iterator[Any]:
    """Yield each fault point of each kind; one of those that share points in the fast tier."""
    for kind, each in KINDS.items():
        marks = [pytest.mark.slow] if kind in ("push", "fp8", "sender") else []
        for point in POINTS[each.name]:
            victim = point % 3
            # Between two flags: one peer has been told, the other one never is.
            peers = [(victim + 1) % 3, (victim + 2) % 3]
            for peer in peers if point in FOR_EACH_PEER[each.name] else [ANY_PEER]:
                if (kind, point) != ("oneshot", 11):  # only owners of a token record its moments
                    yield pytest.param(kind, point, victim, peer, marks=marks)


@pytest.mark.parametrize(("kind", "point", "victim", "peer"), list(deaths()))
@on_ranks(3, "cpu", dies="victim")
def test_every_survivor_names_the_rank_that_died_at_any_point(group, kind, point, victim, peer):
    with KINDS[kind].open(group, faults=True) as op:
        op.round()
        group.barrier()
        if group.rank == victim:
            plan_fault(op.made, point, DIE, peer=peer)
        with raises_soon(PeerDied, f"^rank {group.rank}, ", SOON) as caught:
            op.rounds(3)  # a rank that dies after its last flag is missed in the round after
        assert op.made.history(victim)[0].epoch == 1, "its history stays"
        assert blamed(str(caught.value)) == victim


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("kind", ["pull", "receiver", "oneshot"])
@on_ranks(3, "cpu", "cuda", dies=[1])
def test_a_killed_rank_is_noticed_without_a_deadline(group, kind, first):
    with KINDS[kind].open(group) as op:
        if not first:
            op.rounds(RING_RECORDS // 2 + 2)  # the ring holds records of other epochs
            hurry(op.made, SOON)
        group.barrier()
        if group.rank == 1:
            die()
        if group.rank == 2:
            time.sleep(0.5)  # a long expert: rank 0 waits for it, too
        text = r"process \d+ ended before it made its part of epoch"
        with raises_soon(PeerDied, text, SOON) as caught:
            op.round()
        assert blamed(str(caught.value)) == 1


def leave(group: weft.Group, kind: str, how: str) -> str:
    """Leave an object on rank 1 in one way; return what the others raise."""
    with KINDS[kind].open(group) as op:
        if how != "skip":
            op.round()
        if group.rank == 1:
            if how == "raise":
                raise ValueError("no such expert")
            if how in ("close", "skip"):
                op.made.close()
            if how == "middle" and kind != "twoshot":  # a dispatch that no combine follows
                ids = torch.zeros((0, TOP_K), dtype=torch.int64, device=group.device)
                op.made.dispatch(torch.zeros((0, HIDDEN), device=group.device).bfloat16(), ids)
            return ""
        with raises_soon(PeerLeft, "", SOON) as caught:
            op.round()
        return str(caught.value)


@pytest.mark.parametrize("kind", ["pull", "fp8", "receiver", "twoshot"])
@on_ranks(3, "cpu", "cuda")
def test_a_rank_that_raises_or_closes_is_named(group, kind):
    for how in ("raise", "close", "skip", "middle"):
        text = ""
        try:
            text = leave(group, kind, how)
        except ValueError:
            assert group.rank == 1
        texts = group.all_gather(text)
        why = "raised ValueError: no such expert" if how == "raise" else "closed its "
        for text in texts[::2]:
            assert blamed(text) == 1, text
            assert f"rank 1 {why}" in text or "rank 1 left" in text, text
        assert how != "raise" or any("no such expert" in text for text in texts)


def leave_a_group(group: weft.Group) -> None:
    op = KINDS["pull"].open(group)
    op.round()
    if group.rank == 1:
        raise ValueError("in the function of a rank")
    with pytest.raises(PeerLeft, match="rank 1 raised ValueError: in the function of a rank"):
        op.round()


@pytest.mark.parametrize("device", ["cpu", "threads"])
def test_a_raising_rank_is_the_cause_of_a_launch(ranks, device):
    with raises_soon(RankFailed, "rank 1 of 3 raised ValueError", SOON) as caught:
        ranks(3, device)(leave_a_group)
    assert "Also failed" not in str(caught.value)  # the others got the reason, and returned


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(3, "cpu", "cuda")
def test_a_regular_exit_disturbs_no_rank(group, kind):
    """A rank that is done closes and exits at once, while others still wait in the same round."""
    for _ in range(3):
        with KINDS[kind].open(group) as op:
            for number in range(10):
                op.round(float(number))
            last = op.enqueue(3.0)  # a GPU has not done it yet when it is closed
        expected = 3.0 * (group.size if op.kind.name == "allreduce" else TOP_K)
        assert bool((last == expected).all())
