# SPDX-License-Identifier: Apache-2.0
"""A rank dies, stops, raises or closes: the others notice it soon, and blame that rank.

Deadlines are ten minutes here, so an error that comes at all has not waited for one.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import weft
from tests.faults import ANY_PEER, DIE, plan_fault
from tests.operators import FOR_EACH_PEER, HIDDEN, KINDS, POINTS, TOP_K
from tests.patience import hurry
from weft.errors import GroupError, PeerDied, PeerLeft, PeerTimeout, RankFailed
from weft.memory.header import RING_RECORDS

SOON = 60.0  # seconds: a loaded machine may take long, but a deadline takes ten times that
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def blamed(text: str) -> int:
    """The rank that an error names, behind its own and the phase."""
    found = re.search(r"rank (\d+)", re.sub(r"^rank \d+, [^:]*: ", "", text))
    assert found is not None, text
    return int(found[1])


def dying(group: weft.Group, kind: str, point: int, victim: int, peer: int) -> tuple[float, str]:
    with KINDS[kind].open(group, faults=True) as op:
        op.round()
        group.barrier()
        if group.rank == victim:
            plan_fault(op.made, point, DIE, peer=peer)
        start = time.monotonic()
        with pytest.raises(PeerDied) as caught:
            op.rounds(3)  # a rank that dies after its last flag is missed in the round after
        assert op.made.history(victim)[0].epoch == 1, "its history stays"
        return time.monotonic() - start, str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_survivor_names_the_rank_that_died_at_any_point(ranks, kind):
    name = KINDS[kind].name
    for point in POINTS[name]:
        if (kind, point) == ("oneshot", 11):  # only owners of a token record its moments
            continue
        victim = point % 3
        # Between two flags: one peer has been told, the other one never is.
        each = point in FOR_EACH_PEER[name]
        peers = [(victim + 1) % 3, (victim + 2) % 3] if each else [ANY_PEER]
        for peer in peers:
            told = ranks(3, "cpu")(dying, kind, point, victim, peer, tolerate_deaths=True)
            assert told[victim] is None
            for survivor in {0, 1, 2} - {victim}:
                waited, text = told[survivor]
                assert waited < SOON
                assert text.startswith(f"rank {survivor}, ")
                assert blamed(text) == victim, (point, peer, text)


def killed(group: weft.Group, kind: str, first: bool) -> tuple[float, str]:
    with KINDS[kind].open(group) as op:
        if not first:
            op.rounds(RING_RECORDS // 2 + 2)  # the ring holds records of other epochs
            hurry(op.made, SOON)
        group.barrier()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank == 2:
            time.sleep(0.5)  # a long expert: rank 0 waits for it, too
        start = time.monotonic()
        with pytest.raises(PeerDied) as caught:
            op.round()
        return time.monotonic() - start, str(caught.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("kind", ["pull", "receiver", "oneshot"])
def test_a_killed_rank_is_noticed_without_a_deadline(ranks, kind, first, device):
    told = ranks(3, device)(killed, kind, first, tolerate_deaths=True)
    assert told[1] is None
    for waited, text in (told[0], told[2]):
        assert waited < SOON
        assert blamed(text) == 1
        assert re.search(r"process \d+ ended before it made its part of epoch", text)


WAYS_TO_LEAVE = ("raise", "close", "skip", "middle")


def leaving(group: weft.Group, kind: str) -> dict[str, str]:
    """Rank 1 leaves an object after another, in a way of its own each time."""
    said = {}
    for how in WAYS_TO_LEAVE:
        try:
            said[how] = leave(group, kind, how)
        except ValueError:
            said[how] = "left"
        group.barrier()
    return said


def leave(group: weft.Group, kind: str, how: str) -> str:
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
            return "left"
        start = time.monotonic()
        with pytest.raises(PeerLeft) as caught:
            op.round()
        assert time.monotonic() - start < SOON
        return str(caught.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["pull", "fp8", "receiver", "twoshot"])
def test_who_raises_or_closes_tells_the_others(ranks, kind, device):
    texts = ranks(3, device)(leaving, kind)
    for how in WAYS_TO_LEAVE:
        for rank in (0, 2):
            text = texts[rank][how]
            assert blamed(text) == 1, text
            why = "raised ValueError: no such expert" if how == "raise" else "closed its "
            assert f"rank 1 {why}" in text or "rank 1 left" in text, text
    assert any("no such expert" in texts[rank]["raise"] for rank in (0, 2))


def leaving_a_group(group: weft.Group) -> None:
    """The object outlives its group's `with`: nobody closes it."""
    op = KINDS["pull"].open(group)
    op.round()
    if group.rank == 1:
        raise ValueError("in the function of a rank")
    with pytest.raises(PeerLeft, match="rank 1 raised ValueError: in the function of a rank"):
        op.round()


@pytest.mark.parametrize("device", ["cpu", "threads"])
def test_a_raising_rank_is_the_cause_of_a_launch(ranks, device):
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 of 3 raised ValueError") as caught:
        ranks(3, device)(leaving_a_group)
    assert "Also failed" not in str(caught.value)  # the others got the reason, and returned
    assert time.monotonic() - start < SOON


def finishing(group: weft.Group, kind: str) -> bool:
    """Who is done closes and ends at once, while others still wait in the same round."""
    right = True
    for _ in range(3):
        with KINDS[kind].open(group) as op:
            for number in range(10):
                op.round(float(number))
            last = op.enqueue(3.0)  # a GPU has not done it yet when it is closed
        wanted = 3.0 * (group.size if op.kind.name == "allreduce" else TOP_K)
        right &= bool((last == wanted).all())
    return right


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_end_in_good_order_disturbs_nobody(ranks, kind, device):
    assert all(ranks(3, device)(finishing, kind))


def stopped(group: weft.Group, kind: str, folder: str) -> str:
    """Rank 1 is stopped before its second call: a deadline, and the right rank."""
    with KINDS[kind].open(group) as op:
        op.round()
        hurry(op.made, 3.0)
        pid = group.all_gather(os.getpid())[1]
        if group.rank == 1:
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(GroupError):  # the others have left by now, and told
                op.round()
            return ""
        try:
            with pytest.raises(PeerTimeout) as caught:
                op.rounds(2)
        finally:
            Path(folder, str(group.rank)).touch()
            if group.rank == 0:
                while not Path(folder, "2").exists():
                    time.sleep(0.05)
                os.kill(pid, signal.SIGCONT)
        return str(caught.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["pull", "sender", "twoshot"])
def test_a_stopped_rank_is_named_when_the_deadline_is_over(ranks, kind, device, tmp_path):
    texts = ranks(3, device)(stopped, kind, str(tmp_path))
    for rank in (0, 2):
        assert blamed(texts[rank]) == 1 or "for rank 1" in texts[rank], texts[rank]


def late(group: weft.Group, kind: str) -> str:
    """The clock starts with the wait: what an error states is what a caller's clock shows."""
    with KINDS[kind].open(group) as op:
        op.round()
        hurry(op.made, 1.0)
        if group.rank == 1:
            group.barrier()
            return ""
        start = time.monotonic()
        with pytest.raises(PeerTimeout) as caught:
            op.round()
        waited = time.monotonic() - start
        group.barrier()
        found = re.search(r"within ([\d.]+) s", str(caught.value))
        assert found is not None
        told = float(found[1])
        assert 0.99 < told <= waited + 0.01
        return str(caught.value)


@pytest.mark.parametrize("kind", ["pull", "receiver", "oneshot"])
def test_an_error_tells_how_long_it_waited(ranks, kind):
    assert blamed(ranks(2, "cpu")(late, kind)[0]) == 1
