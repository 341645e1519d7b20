# SPDX-License-Identifier: Apache-2.0
"""The timeline that profiled kernels keep: every round, in order, and nothing when not asked."""

from __future__ import annotations

import ctypes
import time
from statistics import median

import pytest

import weft
from tests.headers import HEADER_BYTES, Header, Timeline
from tests.patience import hurry
from tests.rounds import Round, combining, settle
from weft.errors import PeerTimeout
from weft.memory.header import RING_TIMELINES
from weft.runtime.timeline import DEFINE, Span, read_timeline

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASE = Round(tokens=(8, 3, 0))
ROUNDS = RING_TIMELINES // 2
LATE = 0.005  # seconds


def make(group: weft.Group, *defines: str, **options: object) -> weft.AllToAll:
    return weft.AllToAll(
        group,
        **CASE.sizes(8),
        _defines=defines,
        **options,  # type: ignore[arg-type]
    )


def run(a2a: weft.AllToAll, rounds: int, *, late_rank: int | None = None) -> None:
    x, ids, weights, _ = CASE.of(a2a.rank, a2a.group.device)
    for _ in range(rounds):
        a2a.group.barrier()
        if a2a.rank == late_rank:
            time.sleep(LATE)
        a2a.dispatch(x, ids, weights)
        a2a.combine()
        settle(a2a.group.device)
    a2a.check()


def spans_of(group: weft.Group, rounds: int, way: str) -> list[Span]:
    with make(group, DEFINE, **combining(way)) as a2a:
        run(a2a, rounds)
        group.barrier()  # the ranks read each other's
        own = read_timeline(a2a.heap)
        assert own == read_timeline(a2a.heap, a2a.rank)
        peer = (a2a.rank + 1) % group.size
        assert [span.rank for span in read_timeline(a2a.heap, peer)] == [peer] * len(own)
        group.barrier()
    return own


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize("rounds", [5, ROUNDS + 3])
def test_every_round_is_there_and_its_stamps_are_in_order(ranks, kind, way, rounds):
    for rank, spans in enumerate(ranks(3, kind)(spans_of, rounds, way)):
        kept = range(max(1, rounds - ROUNDS + 1), rounds + 1)
        assert [(s.epoch, s.phase) for s in spans] == [
            (epoch, phase) for epoch in kept for phase in ("dispatch", "combine")
        ]
        for span in spans:
            assert span.rank == rank
            assert span.finished
            assert span.ctas >= 1
            assert len(span.arrived_ns) == 3
            stamps = [span.start_ns, span.sent_ns, span.published_ns, span.received_ns, span.end_ns]
            assert stamps == sorted(stamps), span
            if kind == "cpu" or way == "pull":
                assert min(span.arrived_ns) >= span.published_ns
        for before, after in zip(spans, spans[1:], strict=False):
            assert before.end_ns <= after.start_ns


def test_halves_make_one_span(ranks):
    for spans in ranks(2, "cpu")(split_phase):
        assert [span.phase for span in spans] == ["dispatch", "combine"] * 3
        for span in spans:
            assert span.start_ns <= span.sent_ns <= span.published_ns
            assert span.published_ns + LATE * 1e9 <= min(span.arrived_ns) <= span.end_ns


def split_phase(group: weft.Group) -> list[Span]:
    case = Round(tokens=(8, 3))
    x, ids, weights, _ = case.of(group.rank, group.device)
    with make(group, DEFINE, split_phase=True) as a2a:
        for _ in range(3):
            a2a.dispatch_send(x, ids, weights)
            time.sleep(LATE)
            a2a.dispatch_recv()
            a2a.combine_send()
            time.sleep(LATE)
            a2a.combine_recv()
        spans = read_timeline(a2a.heap)
        group.barrier()
    return spans


def late(group: weft.Group) -> list[Span]:
    with make(group, DEFINE) as a2a:
        run(a2a, 6, late_rank=0)
        spans = read_timeline(a2a.heap)
        group.barrier()
    return spans


@pytest.mark.parametrize("kind", KINDS)
def test_waits_name_the_rank_that_was_late(ranks, kind):
    for rank, spans in enumerate(ranks(3, kind)(late)):
        waits = [span.waited_ns(0) for span in spans if span.phase == "dispatch"]
        assert len(waits) == 6
        if rank != 0:
            assert median(waits) > LATE * 1e9 / 2


def unprofiled(group: weft.Group) -> bytes:
    with make(group) as a2a:
        run(a2a, 3)
        ring = a2a.heap.header()[Header.timelines.offset :]
        assert read_timeline(a2a.heap) == []
        group.barrier()
    return ring


@pytest.mark.parametrize("kind", KINDS)
def test_without_profile_the_ring_stays_untouched(ranks, kind):
    ring = bytes(RING_TIMELINES * ctypes.sizeof(Timeline))
    assert ranks(3, kind)(unprofiled) == [ring] * 3


def left_alone(group: weft.Group) -> list[Span]:
    with make(group, DEFINE) as a2a:
        run(a2a, ROUNDS + 2)  # so that the broken round finds stamps in its place
        hurry(a2a, 0.3)
        if group.rank == 1:
            group.barrier()
            return []
        x, ids, weights, _ = CASE.of(group.rank, group.device)
        with pytest.raises(PeerTimeout):
            a2a.dispatch(x, ids, weights)
        group.barrier()
        return read_timeline(a2a.heap)


def test_a_broken_round_shows_who_was_missing(ranks):
    spans = ranks(2, "cpu")(left_alone)[0]
    last = spans[-1]
    assert (last.epoch, last.phase, last.finished) == (ROUNDS + 3, "dispatch", False)
    assert last.published_ns > 0
    assert last.arrived_ns[0] >= last.published_ns
    assert last.arrived_ns[1] == 0
    assert all(span.finished for span in spans[:-1])


def test_the_header_stays_whole_lines():
    assert HEADER_BYTES % 128 == 0
    assert Header.timelines.offset % 128 == 0
    assert ctypes.sizeof(Timeline) == 304
