# SPDX-License-Identifier: Apache-2.0
"""The timeline of profiled kernels: every round in order, and nothing unless requested."""

import ctypes
import time
from statistics import median
from typing import Any

import pytest

import weft
from tests.headers import Header, Timeline
from tests.patience import hurry
from tests.ranks import on_ranks
from tests.rounds import Round, combine_options, synchronize
from weft.errors import PeerTimeout
from weft.heap.header import RING_TIMELINES
from weft.runtime.timeline import DEFINE, read_timeline

CASE = Round(tokens=(8, 3, 0))
ROUNDS = RING_TIMELINES // 2
LATE = 0.005  # seconds
PROFILED: dict[str, Any] = {"_defines": (DEFINE,)}


def run(a2a: weft.AllToAll, rounds: int, *, late: float = 0.0) -> None:
    x, ids, weights, _ = CASE.inputs_of(a2a.rank, a2a.group.device)
    for _ in range(rounds):
        a2a.group.barrier()
        time.sleep(late if a2a.rank == 0 else 0.0)
        a2a.dispatch(x, ids, weights)
        a2a.combine()
        synchronize(a2a.group.device)
    a2a.check()


@pytest.mark.parametrize(("way", "rounds"), [("pull", ROUNDS + 3), ("push", 5)])
@on_ranks(3, "cpu", "cuda")
def test_every_round_is_recorded_with_ordered_stamps(group, way, rounds):
    with CASE.open(group, 8, **PROFILED, **combine_options(way)) as a2a:
        run(a2a, rounds, late=LATE)
        group.barrier()  # the ranks read each other's
        spans, peer = read_timeline(a2a.heap), (a2a.rank + 1) % group.size
        assert spans == read_timeline(a2a.heap, a2a.rank)
        assert [span.rank for span in read_timeline(a2a.heap, peer)] == [peer] * len(spans)
        group.barrier()
    kept = range(max(1, rounds - ROUNDS + 1), rounds + 1)
    expected = [(epoch, phase) for epoch in kept for phase in ("dispatch", "combine")]
    assert [(span.epoch, span.phase) for span in spans] == expected
    for span in spans:
        assert (span.rank, span.finished, len(span.arrived_ns)) == (group.rank, True, 3)
        assert span.ctas >= 1
        stamps = [span.start_ns, span.sent_ns, span.published_ns, span.received_ns, span.end_ns]
        assert stamps == sorted(stamps), span
        if group.device.type == "cpu" or way == "pull":
            assert min(span.arrived_ns) >= span.published_ns
    for before, after in zip(spans, spans[1:], strict=False):
        assert before.end_ns <= after.start_ns
    waits = [span.wait_time_ns(0) for span in spans if span.phase == "dispatch"]
    assert group.rank == 0 or way == "push" or median(waits) > LATE * 1e9 / 2


@on_ranks(2, "cpu")
def test_split_calls_give_one_span(group):
    x, ids, weights, _ = CASE.inputs_of(group.rank, group.device)
    with CASE.open(group, 8, **PROFILED, split_phase=True) as a2a:
        for _ in range(3):
            a2a.dispatch_send(x, ids, weights)
            time.sleep(LATE)
            a2a.dispatch_recv()
            a2a.combine_send()
            time.sleep(LATE)
            a2a.combine_recv()
        spans = read_timeline(a2a.heap)
        group.barrier()
    assert [span.phase for span in spans] == ["dispatch", "combine"] * 3
    for span in spans:
        assert span.start_ns <= span.sent_ns <= span.published_ns
        assert span.published_ns + LATE * 1e9 <= min(span.arrived_ns) <= span.end_ns


@on_ranks(3, "cpu", "cuda")
def test_without_profile_the_ring_stays_untouched(group):
    with CASE.open(group, 8) as a2a:
        run(a2a, 3)
        ring = a2a.heap.header()[Header.timelines.offset :]
        assert read_timeline(a2a.heap) == []
        group.barrier()
    assert ring == bytes(RING_TIMELINES * ctypes.sizeof(Timeline))


@on_ranks(2, "cpu")
def test_a_broken_round_shows_who_was_missing(group):
    with CASE.open(group, 8, **PROFILED) as a2a:
        run(a2a, ROUNDS + 2)  # so that the broken round finds stamps in its place
        hurry(a2a, 0.3)
        if group.rank == 0:
            x, ids, weights, _ = CASE.inputs_of(group.rank, group.device)
            with pytest.raises(PeerTimeout):
                a2a.dispatch(x, ids, weights)
            *spans, last = read_timeline(a2a.heap)
            assert (last.epoch, last.phase, last.finished) == (ROUNDS + 3, "dispatch", False)
            assert last.arrived_ns[0] >= last.published_ns > 0
            assert last.arrived_ns[1] == 0
            assert all(span.finished for span in spans)
        group.barrier()
