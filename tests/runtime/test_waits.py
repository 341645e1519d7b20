# SPDX-License-Identifier: Apache-2.0
"""Recorded waits name the late rank, its delay and its cause, and rounds are counted."""

import statistics
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.faults import AFTER_PAYLOAD, DELAY, plan_fault
from tests.operators import KINDS
from tests.ranks import on_ranks
from weft.group.waits import BOUNDS_NS, PeerWaits, PhaseTimes, WaitTimes
from weft.heap.header import PHASES, Record, header_structs
from weft.runtime import waits
from weft.runtime.read_waits import read_waits

FIRST_PHASES = ("dispatch", "all-reduce")


def waits_of(operator: Any, phase: str = "") -> Mapping[int, PeerWaits]:
    """Return a rank's waits for each peer in a phase; by default in the first one of a round."""
    phases, group = (phase,) if phase else FIRST_PHASES, operator.group
    peers = (peer for peer in range(group.size) if peer != group.rank)
    waits = {peer: PeerWaits(peer, phases[0], 0, WaitTimes(), WaitTimes()) for peer in peers}
    return waits | {e.peer: e for e in operator.waits().peers if e.phase in phases}


def last_start(operator: Any) -> float:
    """Return when a rank's last first phase began, in seconds of a clock that the ranks share."""
    starts = [r.start_ns for r in operator.history() if PHASES[r.phase] in FIRST_PHASES]
    return float(max(starts)) / 1e9


def name_late_ranks(group: weft.Group, op: Any, rounds: int, seconds: float) -> None:
    """Delay another rank in each round, and compare the recorded waits with the ranks' clock."""
    named, shares = [], []
    op.rounds(2)
    before: dict[int, float] = {}
    for i in range(rounds):
        group.barrier()
        if group.rank == i % group.size:
            time.sleep(seconds)
        op.round()
        waits = waits_of(op.operator).values()
        after = {entry.peer: entry.seconds for entry in waits}
        waited = {peer: after[peer] - before.get(peer, 0.0) for peer in after}
        before = after
        starts = group.all_gather(last_start(op.operator))
        second, last = sorted(starts)[-2:]
        late = starts.index(last)
        if i > 0 and group.rank != late and last - second > seconds / 2:
            named.append(max(waited, key=waited.__getitem__) == late)
            shares.append(waited[late] / (last - starts[group.rank]))
    named, shares = (sum(group.all_gather(values), []) for values in (named, shares))
    # A CPU rank whose core another program takes sees too late what arrived meanwhile.
    assert sum(named) >= 0.7 * len(named) > rounds * (group.size - 1) / 3
    assert 0.8 < statistics.median(shares) < 1.2


@pytest.mark.parametrize("size", [4, 8])
@on_ranks("size", "cpu")
def test_the_late_rank_and_its_delay_are_recorded(group: weft.Group, size: int) -> None:
    for name, kind in KINDS.items():
        # Of eight ranks, four own no token of a twoshot and wait for no peer's rows of it.
        if (name == "twoshot") == (size == 4):
            with kind.open(group) as op:
                name_late_ranks(group, op, 12, 0.04)


# Ranks that share a GPU take turns of milliseconds on it, so their waits begin late.
DELAYS = [
    pytest.param(size, seconds, marks=pytest.mark.gpu(size))
    for size in (2, 4)
    for seconds in (50e-6, 1e-3)
]


@pytest.mark.parametrize(("size", "seconds"), [*DELAYS, (4, 50e-3)])
@pytest.mark.parametrize("name", KINDS)
@on_ranks("size", "cuda")
def test_gpus_name_the_late_rank_and_its_delay(
    group: weft.Group, name: str, size: int, seconds: float
) -> None:
    """A round of another operator ends on all GPUs at once, then a kernel delays one of them.

    With a GPU for each of four ranks, another one is delayed by half of that time.
    """
    rounds, named, shares, half_shares = 100, 0, [], []
    has_half_late = size > 2
    alone = torch.cuda.device_count() >= group.size
    with KINDS["pull"].open(group) as meeting, KINDS[name].open(group) as op:
        meeting.rounds(2)
        op.rounds(2)
        before: dict[int, float] = {}
        for i in range(rounds + 1):
            late, half_late = i % group.size, (i + 1) % size if has_half_late else -1
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            group.barrier()
            torch.cuda._sleep(2_000_000)  # while the host enqueues what follows
            meeting.enqueue(1.0)
            begun.record()
            if group.rank == late:
                torch.cuda._sleep(int(seconds * 1.7e9))  # cycles
            elif group.rank == half_late and alone:
                torch.cuda._sleep(int(seconds / 2 * 1.7e9))
            ended.record()
            op.enqueue(1.0)
            torch.cuda.synchronize()
            after = {entry.peer: entry.seconds for entry in waits_of(op.operator).values()}
            waited = {peer: after[peer] - before.get(peer, 0.0) for peer in after}
            before = after
            delays = group.all_gather(begun.elapsed_time(ended) / 1000)
            if i > 0 and group.rank != late:
                named += max(waited, key=waited.__getitem__) == late
                if group.rank != half_late:
                    shares.append(waited[late] / delays[late])
                if has_half_late and group.rank != half_late:
                    half_shares.append(waited[half_late] / delays[late])
    assert named >= 0.99 * rounds * (group.size - 1) / group.size
    if alone:
        assert 0.8 < statistics.median(shares) < 1.2
        assert not has_half_late or statistics.median(half_shares) < 0.7


@pytest.mark.parametrize("name", KINDS)
@on_ranks(2, "threads", "emulated", "cuda")
def test_every_round_is_counted(group: weft.Group, name: str, device: str) -> None:
    rounds = 5
    with KINDS[name].open(group) as op:
        op.rounds(rounds)
        waits = op.operator.waits()
        reduces = name in ("oneshot", "twoshot")
        phases = ("all-reduce",) if reduces else ("dispatch", "combine")
        assert [(times.phase, times.rounds) for times in waits.phases] == [
            (phase, rounds) for phase in phases
        ]
        assert list(group.waits()) == ["control", next(iter(group.members()))]
        for entry in waits.peers:
            assert entry.phase in phases
            assert entry.peer == 1 - group.rank
            assert 0 <= entry.round <= rounds
            # On CPUs, waits for credits count, too.
            counts_credits = KINDS[name].name == "lowlatency" and device == "threads"
            assert entry.skew.count <= rounds * (1 + counts_credits)
            assert entry.skew.count + entry.transfer.count > 0
            for times in (entry.skew, entry.transfer):
                assert (times.count > 0) == (times.total_seconds > 0)
                assert times.max_seconds <= times.total_seconds
                is_short = sum(times.counts[1:]) == 0
                assert is_short or times.max_seconds * 1e9 >= BOUNDS_NS[0]


@on_ranks(2, "cpu")
def test_counters_survive_sleep_and_are_read_meanwhile(group: weft.Group) -> None:
    with KINDS["pull"].open(group) as op:
        op.rounds(3)
        peers = op.operator.waits().peers
        group.sleep()
        assert op.operator.waits().peers == peers
        group.wake()
        assert op.operator.waits().peers == peers
        op.round()
        after = waits_of(op.operator, "dispatch")
        for entry in peers:
            if entry.phase == "dispatch":
                assert after[entry.peer].skew.count >= entry.skew.count
                assert after[entry.peer].seconds >= entry.seconds
        assert {times.rounds for times in op.operator.waits().phases} == {4}


@on_ranks(2, "cpu")
def test_a_recovery_after_the_copy_of_the_header_counts_no_round_twice(group: weft.Group) -> None:
    with KINDS["pull"].open(group) as op:
        op.rounds(3)
        operator, lock = op.operator, op.operator._access

        class ThenRecovers:
            def __enter__(self) -> None:
                lock.acquire()

            def __exit__(self, *error: object) -> None:
                lock.release()
                operator._access = lock
                group.sleep()
                group.wake()

        operator._access = ThenRecovers()
        assert {times.rounds for times in operator.waits().phases} == {3}
        assert {times.rounds for times in operator.waits().phases} == {3}


@pytest.mark.parametrize(("timeout", "is_polled"), [(2.0, False), (300.0, True)])
def test_later_rounds_on_gpus_are_polled_if_their_timeout_is_long(
    timeout: float, is_polled: bool
) -> None:
    header = header_structs(2).Header()
    header.ring[2] = Record(1, 100, 160, 1, 0)
    group = SimpleNamespace(device=torch.device("cuda"))
    operator: Any = SimpleNamespace(group=group, timeouts=(timeout, 300.0))
    operator.read_own_header = lambda: header
    assert waits._poll(operator, waits._PollState()) == is_polled


def test_records_that_are_written_during_a_copy_are_skipped() -> None:
    """They have an old start with a new end, or a new start with an old end."""
    header = header_structs(2).Header()
    for epoch in range(1, 101):
        header.ring[2 * epoch] = Record(epoch, 100 * epoch, 100 * epoch + 60, 1, 0)
    for start, end in ((100, 10060), (10000, 160)):
        header.ring[2] = Record(101, start, end, 1, 0)
        (times,) = read_waits(header, 0, (0, 1), ("dispatch",), {"dispatch": 7}).phases
        assert times == PhaseTimes("dispatch", 108, 60e-9, 40e-9)


@pytest.mark.parametrize("name", ["pull", "push"])
@on_ranks(2, "cpu", "cuda")
def test_a_rank_that_begins_late_is_told_from_one_that_sends_late(group, name):
    """Each cause lasts one round, so that the cause of the round before is another one."""
    causes = ("skew", "transfer")
    seconds = {cause: dict.fromkeys(causes, 0.0) for cause in causes}
    with KINDS[name].open(group, faults=True) as op:
        op.round()
        for i in range(10):
            cause, before = causes[i % 2], waits_of(op.operator)
            if group.rank == 1:
                argument = 20_000_000 if cause == "transfer" else 0
                plan_fault(op.operator, AFTER_PAYLOAD, DELAY, argument=argument)
            group.barrier()
            if group.rank == 1 and cause == "skew":
                time.sleep(0.02)
            op.round()
            after = waits_of(op.operator)
            for part in causes if group.rank == 0 else ():
                times = [getattr(waits[1], part).total_seconds for waits in (after, before)]
                seconds[cause][part] += times[0] - times[1]
    for cause, parts in seconds.items() if group.rank == 0 else ():
        assert max(parts, key=parts.__getitem__) == cause, seconds
        assert parts[cause] > 0.02, seconds  # of 0.1, less what delays this rank


@on_ranks(2, "threads")
def test_rows_of_a_rank_that_has_begun_are_transfer(group: weft.Group) -> None:
    """Rank 1 quantises 2 million values between its begin flag and its last token."""
    tokens, hidden = 512, 4096
    sizes: dict[str, Any] = {"max_tokens": tokens, "hidden": hidden, "num_experts": 2, "top_k": 1}
    with weft.LowLatencyAllToAll(group, reduce="receiver", **sizes) as a2a:
        count = tokens if group.rank else 1
        x = torch.ones((count, hidden), dtype=torch.bfloat16)
        ids, weights = torch.zeros((count, 1), dtype=torch.int64), torch.ones((count, 1))
        y = torch.zeros((1, 2 * tokens, hidden), dtype=torch.bfloat16)
        for _ in range(10):
            a2a.combine(y, ids, weights, a2a.dispatch(x, ids, None).handle)
        if group.rank == 0:
            assert waits_of(a2a, "dispatch")[1].transfer.count > 0
