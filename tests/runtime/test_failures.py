# SPDX-License-Identifier: Apache-2.0
"""A rank is late, absent, inconsistent or aborts: every operator raises a typed error in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

import weft
from tests import faults
from tests.baseline import raises_soon
from tests.operators import KINDS, Kind
from tests.patience import hurry
from tests.ranks import on_ranks
from tests.subjects import SUBJECTS
from weft.errors import Aborted, PeerDied, PeerTimeout
from weft.heap.header import EPOCH_MASK, ErrorRecord
from weft.runtime.report import ABORTED, ALL_REDUCE, PEER_DIED, PEER_TIMEOUT, build_group_error

EXCHANGE, REDUCE = (
    {faults.DISPATCH_ENTER: "dispatch", faults.COMBINE_ENTER: "combine"},
    {faults.REDUCE_ENTER: ""},
)
# Where a rank may stay away, and the phase in which the others miss it.
ABSENT: dict[str, tuple[Kind, dict[int, str]]] = {
    "pull": (KINDS["pull"], EXCHANGE),
    "receiver": (KINDS["receiver"], EXCHANGE),
    "oneshot": (KINDS["oneshot"], REDUCE),
    "twoshot": (KINDS["twoshot"], REDUCE),
    "bulk": (Kind("allreduce", {"backends": ("twoshot_bulk",)}), REDUCE),
    "epilogue": (Kind("allreduce", {"backends": ("twoshot",), "epilogue_at": "receiver"}), REDUCE),
}


@pytest.mark.parametrize("name", ABSENT)
@on_ranks(3, "cpu", "cuda")
def test_an_absent_rank_is_named_within_the_deadline(group: weft.Group, name: str) -> None:
    kind, points = ABSENT[name]
    for point, phase in points.items():
        with kind.open(group, faults=True) as op:
            op.round()
            hurry(op.made, 1.0)
            if group.rank == 1:
                faults.plan_fault(op.made, point, faults.STAY_AWAY)
            group.barrier()
            start, text = time.monotonic(), ""
            try:
                if group.rank == 1 and kind.name == "lowlatency" and point == faults.DISPATCH_ENTER:
                    op.begin(1.0)  # and no combine, which would wait for the others
                else:
                    op.round()
            except PeerTimeout as error:
                text = str(error)
                with pytest.raises(PeerTimeout):  # a broken group stays broken
                    op.round()
            waited = time.monotonic() - start
            texts = group.all_gather(text)  # closing would show the others that this rank has left
        seen = [is_seen(rank, phase, texts[rank]) for rank in (0, 2)]
        assert any(seen)
        assert group.rank == 1 or waited > 0.5


def is_seen(rank: int, phase: str, text: str) -> bool:
    """Whether a rank itself misses rank 1, rather than learning of it from the other rank."""
    where = f"rank {rank}, {phase or 'all-reduce'}"
    if phase:
        seen = f"{where}: rank 1 did not publish epoch 2" in text
        assert not seen or "its flag shows epoch 1" in text
    else:
        seen = f"{where}, epoch 2: the " in text and "did not arrive from rank 1" in text
    assert seen or f"{where}: rank {2 - rank} timed out waiting for rank 1" in text, text
    return seen


@pytest.mark.parametrize("name", ["pull", "push", "fp8", "low latency", "low latency, sender"])
@on_ranks(4, "cpu", "cuda")
def test_delays_at_every_point_change_no_byte(group: weft.Group, name: str) -> None:
    with SUBJECTS[name].open(group, _defines=faults.FAULTS) as subject:
        for point in range(faults.DISPATCH_ENTER, faults.BEFORE_READ + 1):
            if group.rank == point % group.size:
                faults.plan_fault(subject.made, point, faults.JITTER, argument=400_000)
            subject.rounds(12, range(group.size))


@pytest.mark.parametrize("name", ["pull", "receiver", "oneshot"])
@on_ranks(3, "cpu", "cuda")
def test_a_late_rank_is_waited_for_and_the_first_round_has_a_deadline(group, name):
    kind, points = ABSENT[name]
    with kind.open(group, faults=True) as op:
        op.round()  # a GPU loads torch's kernels at their first call, which takes long
        if group.rank == 1:
            faults.plan_fault(
                op.made, next(iter(points)), faults.DELAY, epoch=2, argument=300_000_000
            )
        start = time.monotonic()
        op.round()
        assert 0.25 < time.monotonic() - start < 100.0
    with kind.open(group, first_timeout=1.0) as op:
        group.barrier()
        start = time.monotonic()
        if group.rank != 1:
            missed = "rank 1 did not publish epoch 1|did not arrive from rank 1|for rank 1"
            with pytest.raises(PeerTimeout, match=missed):
                op.round()
            assert time.monotonic() - start > 0.5
        group.barrier()  # a rank that gives back memory holds up the others of its GPU


@pytest.mark.parametrize("name", ["pull", "receiver", "twoshot"])
@on_ranks(3, "cpu", "cuda")
def test_abort_ends_the_waits_of_all_ranks_at_once(group: weft.Group, name: str) -> None:
    """Rank 0 aborts: while it waits itself, from a thread, or while only others wait."""
    for asker_waits in (True, False):
        with KINDS[name].open(group) as op:
            op.round()
            group.barrier()
            start = time.monotonic()
            if group.rank == 2:  # no rank can finish without it
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
            assert 0.2 < time.monotonic() - start < 100.0
            with pytest.raises(Aborted, match=r"called abort\(\)") as caught:
                op.round()
            who = "because rank 0" if group.rank else "this rank"
            assert who in str(caught.value)
            group.barrier()


@pytest.mark.parametrize("name", ["pull", "receiver", "oneshot"])
@on_ranks(2, "cpu")
def test_ctrl_c_ends_a_wait_at_once(group: weft.Group, name: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs begin without it
    with KINDS[name].open(group) as operator:
        group.barrier()
        if group.rank == 0:  # it waits for rank 1, which makes no call
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with raises_soon(KeyboardInterrupt, "", 30.0):
                operator.round()
            with pytest.raises(Aborted, match=r"called abort\(\) or was interrupted"):
                operator.round()
        group.barrier()


DISPATCH, LAST = 1, EPOCH_MASK
LATE: dict[str, Any] = {"code": PEER_TIMEOUT, "rank": 0, "peer": 1}
DEAD: dict[str, Any] = {"code": PEER_DIED, "rank": 0, "peer": 2, "phase": DISPATCH, "expected": 5}
LIMITS = [
    (first, {**LATE, "phase": phase, "expected": epoch, "reported_by": reporter}, f" {option}= if")
    for phase in (DISPATCH, ALL_REDUCE)
    for reporter in (0, 3)
    for first, epoch, option in (
        (0, 1, "first_timeout"),
        (0, 2, "timeout"),
        (LAST - 4, LAST - 3, "first_timeout"),
        (LAST - 4, 3, "timeout"),
        (LAST, 0, "first_timeout"),
    )
]


@pytest.mark.parametrize("machines", [1, 2])
def test_errors_name_ranks_limits_and_whether_the_group_recovers(machines: int) -> None:
    late = LATE | {"phase": DISPATCH, "expected": 5, "reported_by": 3}
    aborted = {"code": ABORTED, "rank": 1, "peer": 1, "phase": DISPATCH, "expected": 5}
    for first, fields, text in (
        *LIMITS,
        (0, late | {"peer": 2}, "rank 2 timed out in its own part of this call"),
        (0, late, "rank 2 timed out waiting for rank 1"),
        (0, late | {"peer": 0}, "rank 2 timed out waiting for this rank, 0,"),
        (0, aborted, "because this rank called abort() or was interrupted"),
        (0, DEAD, "rank 2 died: process 102 ended"),
    ):
        calls = lambda rank: 100 + rank, lambda rank: "", lambda rank, value: f"{value} of {rank}"
        record = ErrorRecord(**fields)
        error = build_group_error(record, *calls, first_epoch=first, machines=machines)
        kind = {PEER_TIMEOUT: PeerTimeout, ABORTED: Aborted, PEER_DIED: PeerDied}[record.code]
        assert type(error) is kind
        assert text in str(error)
        if kind is not Aborted:
            assert ("group.recover()" in str(error)) == (machines == 1)
