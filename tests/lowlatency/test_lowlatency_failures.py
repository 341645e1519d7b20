"""A rank is late, absent, lying, dead or wants to stop: a typed error in time, never a hang."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

import weft
from tests.alltoall.test_failures import (
    AFTER_PAYLOAD,
    ANY_EPOCH,
    ANY_PEER,
    BEFORE_FLAG,
    BEFORE_POLL,
    BEFORE_READ,
    BEFORE_READY,
    COMBINE_ENTER,
    DELAY,
    DIE,
    DISPATCH_ENTER,
    DROP,
    JITTER,
    LIE,
    STAY_AWAY,
)
from tests.lowlatency_rounds import Mode, play
from tests.patience import hurry
from tests.rounds import Round
from weft.errors import Aborted, GeometryMismatch, GroupError, PeerDied, PeerTimeout, RankFailed
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.memory.header import HEADER_BYTES, Fault, Header

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASE = Round(tokens=(8, 3, 8), hidden=128)
FAULTS: dict[str, object] = {"_defines": ("WEFT_FAULTS=1",)}


def make(group: weft.Group, mode: Mode = Mode(), **more: object) -> LowLatencyAllToAll:  # noqa: B008
    options = {"timeout": 600.0, "first_timeout": 600.0, **FAULTS, **mode.more, **more}
    return replace(mode, more=options).make(group, CASE, 8)


def plan_fault(
    a2a: LowLatencyAllToAll,
    point: int,
    action: int,
    *,
    peer: int = ANY_PEER,
    epoch: int = ANY_EPOCH,
    argument: int = 0,
) -> None:
    fault = Fault(point=point, action=action, peer=peer, epoch=epoch, argument=argument)
    view = a2a.heap.tensor((HEADER_BYTES,), torch.uint8)
    raw = torch.frombuffer(bytearray(fault), dtype=torch.uint8)
    view[Header.fault.offset : Header.fault.offset + len(raw)].copy_(raw)


def one_round(a2a: LowLatencyAllToAll) -> None:
    x, ids, weights, _ = CASE.of(a2a.rank, a2a.group.device)
    got = a2a.dispatch(x, ids, weights)
    a2a.combine(torch.zeros_like(got.x, dtype=x.dtype), ids, weights, got.handle)
    if a2a.group.device.type == "cuda":
        torch.cuda.synchronize()
    a2a.check()


def disturbed(group: weft.Group, rounds: int, longest_ns: int, more: dict[str, object]) -> None:
    mode = Mode(more=more)
    with make(group, mode) as a2a:
        for point in range(DISPATCH_ENTER, BEFORE_READ + 1):
            if group.rank == point % group.size:
                plan_fault(a2a, point, JITTER, argument=longest_ns)
            for seed in range(rounds):
                split_phase = "split_phase" in more and seed % 2 == 0
                play(a2a, mode, CASE.next(seed=seed), poison=seed % 8 == 0, split_phase=split_phase)


@pytest.mark.parametrize("kind", [*KINDS, "threads"])
@pytest.mark.parametrize("more", [{}, {"split_phase": True}], ids=["whole", "split_phase"])
def test_delays_at_every_point_change_no_byte(ranks, kind, more):
    ranks(3, kind)(disturbed, 12, 400_000, more)


def absent(group: weft.Group, point: int) -> tuple[float, str]:
    with make(group) as a2a:
        one_round(a2a)
        hurry(a2a, 2.0)
        if group.rank == 1:
            plan_fault(a2a, point, STAY_AWAY)
        group.barrier()
        start, text = time.monotonic(), ""
        try:
            if group.rank == 1 and point == DISPATCH_ENTER:
                x, ids, weights, _ = CASE.of(group.rank, group.device)
                a2a.dispatch(x, ids, weights)  # and no combine, which would wait for the others
            else:
                one_round(a2a)
        except PeerTimeout as error:
            text = str(error)
            with pytest.raises(PeerTimeout):  # a broken group stays broken
                one_round(a2a)
        waited = time.monotonic() - start
        group.barrier()  # closing would show the others that this rank has left
        return waited, text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("point", "phase"), [(DISPATCH_ENTER, "dispatch"), (COMBINE_ENTER, "combine")]
)
def test_an_absent_rank_is_named_within_the_deadline(ranks, kind, point, phase):
    results = ranks(3, kind)(absent, point)
    for rank in (0, 2):
        waited, text = results[rank]
        assert waited > 0.5
        told = f"rank {rank}, {phase}: rank {2 - rank} waited in vain for rank 1 and left the group"
        seen = f"rank {rank}, {phase}: rank 1 did not publish epoch 2"
        assert seen in text or told in text, text
        assert told in text or "(its flag shows epoch 1)" in text


def absent_from_the_start(group: weft.Group) -> float:
    with make(group) as loaded:  # a GPU loads torch's kernels at their first call, which takes long
        one_round(loaded)
    with make(group, first_timeout=2.0) as a2a:
        group.barrier()
        start = time.monotonic()
        if group.rank != 1:
            with pytest.raises(
                PeerTimeout, match=r"rank 1 did not publish epoch 1 .* epoch 0\)|for rank 1"
            ):
                one_round(a2a)
        waited = time.monotonic() - start
        group.barrier()  # a rank that gives back memory holds up the others of its GPU
        return waited


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_round_has_a_deadline_of_its_own(ranks, kind):
    waited = ranks(3, kind)(absent_from_the_start)
    assert all(seconds > 0.5 for rank, seconds in enumerate(waited) if rank != 1)


def silent(group: weft.Group) -> str:
    """Rank 2 sends rank 0 nothing of its dispatch, and everybody else its part."""
    with make(group) as a2a:
        one_round(a2a)
        if group.rank == 0:
            hurry(a2a, 2.0)
        if group.rank == 2:
            plan_fault(a2a, BEFORE_FLAG, DROP, peer=0)
        group.barrier()
        try:
            one_round(a2a)
        except GroupError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_word_is_named(ranks, kind):
    texts = ranks(3, kind)(silent)
    assert "rank 0, dispatch: rank 2 did not publish epoch 2" in texts[0]
    assert "(its flag shows epoch 1)" in texts[0]


def lying(group: weft.Group) -> str:
    with make(group) as a2a:
        one_round(a2a)
        if group.rank == 2:
            plan_fault(a2a, BEFORE_FLAG, LIE)
        try:
            one_round(a2a)
        except GeometryMismatch as error:
            return str(error)
        except PeerTimeout:
            return "late"
        return ""


@pytest.mark.parametrize("kind", KINDS)
def test_another_geometry_is_noticed_in_band(ranks, kind):
    for rank, text in enumerate(ranks(3, kind)(lying)):
        assert text == "late" or f"rank {rank}, dispatch: rank 2 called with geometry" in text
        assert rank == 2 or text != ""


def killed(group: weft.Group, point: int) -> None:
    with make(group, timeout=600.0) as a2a:
        one_round(a2a)
        if group.rank == 1:
            plan_fault(a2a, point, DIE)
        with pytest.raises(PeerDied, match="rank 1 died"):
            one_round(a2a)
        assert a2a.history(1)[0].epoch == 1
        time.sleep(0.5)  # the launcher sees the death first


@pytest.mark.parametrize(
    "point", [DISPATCH_ENTER, BEFORE_FLAG, AFTER_PAYLOAD, BEFORE_POLL, COMBINE_ENTER, BEFORE_READY]
)
def test_a_killed_rank_is_named_and_its_history_stays(ranks, point):
    with pytest.raises(RankFailed, match="rank 1 of 3"):
        ranks(3, "cpu")(killed, point)


def aborted(group: weft.Group) -> tuple[str, float]:
    with make(group) as a2a:
        one_round(a2a)
        if group.rank == 1:
            threading.Timer(0.3, a2a.abort).start()
            time.sleep(0.6)
            with pytest.raises(Aborted, match="this rank, 1, called abort"):
                one_round(a2a)
            return "", 0.0
        start = time.monotonic()
        with pytest.raises(Aborted) as caught:
            one_round(a2a)
        return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("kind", KINDS)
def test_abort_ends_every_wait(ranks, kind):
    results = ranks(3, kind)(aborted)
    for rank in (0, 2):
        text, seconds = results[rank]
        assert "because rank 1 called abort()" in text
        assert seconds < 100.0


def slow_peer(group: weft.Group) -> float:
    """A peer that is late, but not too late, breaks nothing."""
    with make(group) as a2a:
        one_round(a2a)
        if group.rank == 2:
            plan_fault(a2a, BEFORE_READY, DELAY, epoch=2, argument=300_000_000)
        start = time.monotonic()
        one_round(a2a)
        return time.monotonic() - start


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_rank_is_waited_for(ranks, kind):
    assert all(0.25 < seconds < 100.0 for seconds in ranks(3, kind)(slow_peer))
