# SPDX-License-Identifier: Apache-2.0
"""A rank dies, raises, closes, aborts or is late: the others notice soon, and name that rank.

Deadlines are ten minutes here unless a test hurries, so an error that comes has not waited for one.
"""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import weft
from tests import faults
from tests.baseline import die, raises_soon
from tests.faults import ANY_PEER, DIE, plan_fault
from tests.launcher.test_launch import wait_until
from tests.operators import FOR_EACH_PEER, HIDDEN, KINDS, POINTS, SUBJECTS, TOP_K, Kind
from tests.patience import hurry
from tests.ranks import on_ranks
from weft import errors, logs
from weft.errors import Aborted, PeerDied, PeerLeft, PeerTimeout, RankFailed
from weft.heap.header import EPOCH_MASK, RING_RECORDS, ErrorRecord
from weft.runtime import waits
from weft.runtime.report import ABORTED, ALL_REDUCE, PEER_DIED, PEER_TIMEOUT, build_group_error

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
            plan_fault(op.operator, point, DIE, peer=peer)
        with raises_soon(PeerDied, f"^rank {group.rank}, ", SOON) as caught:
            op.rounds(3)  # a rank that dies after its last flag is missed in the round after
        assert op.operator.history(victim)[0].epoch == 1, "its history stays"
        assert blamed(str(caught.value)) == victim


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("kind", ["pull", "receiver", "oneshot"])
@on_ranks(3, "cpu", "cuda", dies=[1])
def test_a_killed_rank_is_noticed_without_a_deadline(group, kind, first):
    with KINDS[kind].open(group) as op:
        if not first:
            op.rounds(RING_RECORDS // 2 + 2)  # the ring holds records of other epochs
            hurry(op.operator, SOON)
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
                op.operator.close()
            if how == "middle" and kind != "twoshot":  # a dispatch that no combine follows
                ids = torch.zeros((0, TOP_K), dtype=torch.int64, device=group.device)
                op.operator.dispatch(torch.zeros((0, HIDDEN), device=group.device).bfloat16(), ids)
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


def test_a_raising_rank_is_the_cause_of_a_launch(ranks):
    with raises_soon(RankFailed, "rank 1 of 3 raised ValueError", SOON) as caught:
        ranks(3, "cpu")(leave_a_group)
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


EXCHANGE = {faults.DISPATCH_ENTER: "dispatch", faults.COMBINE_ENTER: "combine"}
REDUCE = {faults.REDUCE_ENTER: ""}
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
            hurry(op.operator, 1.0)
            if group.rank == 1:
                plan_fault(op.operator, point, faults.STAY_AWAY)
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
    with SUBJECTS[name](group, _defines=faults.FAULTS) as subject:
        for point in range(faults.DISPATCH_ENTER, faults.BEFORE_READ + 1):
            if group.rank == point % group.size:
                plan_fault(subject.operator, point, faults.JITTER, argument=400_000)
            subject.rounds(12, range(group.size))


@pytest.mark.parametrize("name", ["pull", "receiver", "oneshot"])
@on_ranks(3, "cpu", "cuda")
def test_a_late_rank_is_waited_for_and_the_first_round_has_a_deadline(group, name):
    kind, (point, *_) = ABSENT[name]
    with kind.open(group, faults=True) as op:
        op.round()  # a GPU loads torch's kernels at their first call, which takes long
        if group.rank == 1:
            plan_fault(op.operator, point, faults.DELAY, epoch=2, argument=300_000_000)
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


def test_a_long_wait_is_logged_with_the_late_rank(ranks, caplog, monkeypatch):
    monkeypatch.setattr(logs, "FIRST_LOG_SECONDS", 0.4)

    def body(group):
        with KINDS["pull"].open(group) as op:
            for text, call in (
                ("in barrier for ranks to enter it: rank 1 .*last in ", group.barrier),
                ("after 0 finished rounds, for other ranks: rank 1 .*is in no call", op.round),
                ("rank 1 .*last in barrier and combine 1 of AllToAll", group.barrier),
            ):
                if group.rank == 1:
                    wait_until(lambda text=text: re.search(text, caplog.text), what=text)
                call()

    ranks(2, "threads")(body)
    # Closed operators are polled no more. Fixtures of other tests may keep open ones.
    polled = waits.WAIT_WATCHER._states
    wait_until(
        lambda: all(each.read_own_header() is not None for each in list(polled)), what="closed"
    )


@pytest.mark.parametrize("name", ["pull", "receiver"])
@on_ranks(3, "cpu", "cuda")
def test_another_geometry_is_detected_in_band(group, name):
    with KINDS[name].open(group, faults=True) as op:
        op.round()
        if group.rank == 2:
            plan_fault(op.operator, faults.BEFORE_FLAG, faults.LIE, peer=0)
        text = "^rank 0, dispatch: rank 2 made a different call from this rank, which called with"
        told = pytest.raises(errors.GeometryMismatch, match=text)
        with contextlib.suppress(errors.GroupError) if group.rank else told:
            op.round()


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
                op.operator.abort()
                group.barrier()
            else:
                if group.rank == 0:
                    threading.Timer(0.3, op.operator.abort).start()
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
# The record of an error: code, peer, phase, epoch, reporter; the epoch before the first; and words.
ERRORS = [
    (PEER_TIMEOUT, 2, DISPATCH, 5, 3, 0, "rank 2 timed out in its own part of this call"),
    (PEER_TIMEOUT, 1, DISPATCH, 5, 3, 0, "rank 2 timed out waiting for rank 1"),
    (PEER_TIMEOUT, 0, DISPATCH, 5, 3, 0, "rank 2 timed out waiting for this rank, 0,"),
    (ABORTED, 0, DISPATCH, 5, 0, 0, "because this rank called abort() or was interrupted"),
    (PEER_DIED, 2, DISPATCH, 5, 0, 0, "rank 2 died: process 102 ended"),
    *(
        (PEER_TIMEOUT, 1, phase, epoch, 3, first, f" {option}= if")
        for phase in (DISPATCH, ALL_REDUCE)
        for option, first, epoch in (
            *(("first_timeout", 0, 1), ("first_timeout", LAST, 0)),
            *(("timeout", 0, 2), ("timeout", LAST - 4, 3)),
        )
    ),
]


@pytest.mark.parametrize("machines", [1, 2])
def test_errors_name_ranks_limits_and_whether_the_group_recovers(machines: int) -> None:
    names = ("code", "peer", "phase", "expected", "reported_by")
    for *values, first, text in ERRORS:
        calls = lambda rank: 100 + rank, lambda rank: "", lambda rank, value: f"{value} of {rank}"
        record = ErrorRecord(rank=0, **dict(zip(names, values, strict=True)))
        error = build_group_error(record, *calls, first_epoch=first, machines=machines)
        kind = {PEER_TIMEOUT: PeerTimeout, ABORTED: Aborted, PEER_DIED: PeerDied}[record.code]
        assert type(error) is kind
        assert text in str(error)
        if kind is not Aborted:
            assert ("group.recover()" in str(error)) == (machines == 1)
