# SPDX-License-Identifier: Apache-2.0
"""A rank is late, absent, lying or stops all: on every operator a typed error in time, no hang."""

from __future__ import annotations

import threading
import time

import pytest

import weft
from tests.faults import (
    BEFORE_FLAG,
    COMBINE_ENTER,
    DELAY,
    DISPATCH_ENTER,
    LIE,
    REDUCE_ENTER,
    STAY_AWAY,
    plan_fault,
)
from tests.operators import KINDS, Kind
from tests.patience import hurry
from weft.errors import Aborted, GeometryMismatch, GroupError, PeerTimeout

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EXCHANGE, REDUCE = {DISPATCH_ENTER: "dispatch", COMBINE_ENTER: "combine"}, {REDUCE_ENTER: ""}
# Where a rank may stay away, and the phase in which the others miss it.
ABSENT: dict[str, tuple[Kind, dict[int, str]]] = {
    "pull": (KINDS["pull"], EXCHANGE),
    "receiver": (KINDS["receiver"], EXCHANGE),
    "oneshot": (KINDS["oneshot"], REDUCE),
    "twoshot": (KINDS["twoshot"], REDUCE),
    "bulk": (Kind("allreduce", {"backends": ("twoshot_bulk",)}), REDUCE),
    "epilogue": (
        Kind("allreduce", {"backends": ("twoshot",), "epilogue_at": "receiver"}),
        REDUCE,
    ),
}


def absent(group: weft.Group, name: str) -> dict[int, tuple[float, str]]:
    """What this rank raises, and after how long, by the point where rank 1 stays away."""
    kind, points = ABSENT[name]
    found = {}
    for point in points:
        with kind.open(group, faults=True) as op:
            op.round()
            hurry(op.made, 2.0)
            if group.rank == 1:
                plan_fault(op.made, point, STAY_AWAY)
            group.barrier()
            start, text = time.monotonic(), ""
            try:
                if group.rank == 1 and kind.name == "lowlatency" and point == DISPATCH_ENTER:
                    op.begin(1.0)  # and no combine, which would wait for the others
                else:
                    op.round()
            except PeerTimeout as error:
                text = str(error)
                with pytest.raises(PeerTimeout):  # a broken group stays broken
                    op.round()
            found[point] = time.monotonic() - start, text
            group.barrier()  # closing would show the others that this rank has left
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ABSENT)
def test_an_absent_rank_is_named_within_the_deadline(ranks, device, name):
    results = ranks(3, device)(absent, name)
    for point, phase in ABSENT[name][1].items():
        found_out = 0
        for rank in (0, 2):
            waited, text = results[rank][point]
            assert waited > 0.5
            where = f"rank {rank}, {phase or 'all-reduce'}"
            if phase:
                seen = f"{where}: rank 1 did not publish epoch 2" in text
                assert not seen or "its flag shows epoch 1" in text
            else:
                seen = f"{where}, epoch 2: the " in text and "did not come from rank 1" in text
            found_out += seen
            assert seen or f"{where}: rank {2 - rank} waited in vain for rank 1" in text, text
        assert found_out >= 1


def from_the_start(group: weft.Group, name: str) -> tuple[float, float]:
    """How long a late rank was waited for, and then one that makes no first call."""
    kind, points = ABSENT[name]
    with kind.open(group, faults=True) as op:
        op.round()  # a GPU loads torch's kernels at their first call, which takes long
        if group.rank == 1:
            plan_fault(op.made, next(iter(points)), DELAY, epoch=2, argument=300_000_000)
        start = time.monotonic()
        op.round()
        late = time.monotonic() - start
    with kind.open(group, first_timeout=2.0) as op:
        group.barrier()
        start = time.monotonic()
        if group.rank != 1:
            missed = "rank 1 did not publish epoch 1|did not come from rank 1|for rank 1"
            with pytest.raises(PeerTimeout, match=missed):
                op.round()
        waited = time.monotonic() - start
        group.barrier()  # a rank that gives back memory holds up the others of its GPU
    return late, waited


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["pull", "receiver", "oneshot"])
def test_a_late_rank_is_waited_for_and_the_first_round_has_a_deadline(ranks, device, name):
    for rank, (late, waited) in enumerate(ranks(3, device)(from_the_start, name)):
        assert 0.25 < late < 100.0
        assert rank == 1 or waited > 0.5


def deceived(group: weft.Group, name: str) -> tuple[str, str]:
    with KINDS[name].open(group, faults=True) as op:
        op.round()
        if group.rank == 2:
            plan_fault(op.made, BEFORE_FLAG, LIE, peer=0)
        try:
            op.round()
        except GroupError as error:
            return type(error).__name__, str(error)
        return "", ""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["pull", "receiver"])
def test_another_geometry_is_noticed_in_band(ranks, device, name):
    kind_of_error, text = ranks(3, device)(deceived, name)[0]
    assert kind_of_error == GeometryMismatch.__name__
    assert "rank 0, dispatch: rank 2 made another call than this rank, which called with" in text


def aborted(group: weft.Group, name: str) -> list[tuple[float, str]]:
    """Rank 0 asks all to stop: while it waits itself, from a thread, or while only others wait."""
    found = []
    for asker_waits in (True, False):
        with KINDS[name].open(group) as op:
            op.round()
            group.barrier()
            start = time.monotonic()
            if group.rank == 2:  # nobody can finish without it
                group.barrier()
            elif group.rank == 0 and not asker_waits:
                time.sleep(0.3)
                op.made.abort()
                group.barrier()
            else:
                if group.rank == 0:
                    threading.Timer(0.3, op.made.abort).start()
                with pytest.raises(Aborted):
                    op.round()
                group.barrier()
            waited = time.monotonic() - start
            with pytest.raises(Aborted) as caught:
                op.round()
            found.append((waited, str(caught.value)))
            group.barrier()
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["pull", "receiver", "twoshot"])
def test_abort_ends_the_waits_of_all_ranks_at_once(ranks, device, name):
    for rank, found in enumerate(ranks(3, device)(aborted, name)):
        for waited, text in found:
            assert 0.2 < waited < 100.0
            assert "called abort()" in text
            assert ("because rank 0" if rank else "this rank") in text
