# SPDX-License-Identifier: Apache-2.0
"""Profiled low-latency rounds: the teams' records, and the files for Perfetto."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import refused
from tests.lowlatency.test_lowlatency import CASES
from tests.lowlatency_rounds import Mode, play
from tests.ranks import ANY, on_ranks
from tests.rounds import Round
from weft.errors import InvalidArgument, OutOfOrder
from weft.heap.header import PHASES
from weft.lowlatency.config import get_trace_record_type
from weft.lowlatency.trace import ROLES, WorkRecord, build_chrome_trace, merge, read_work_records
from weft.runtime.skew import Skew
from weft.runtime.timeline import read_timeline

TraceRecord = get_trace_record_type(2)
MODE = Mode(more={"profile": True})
CASE = Round(tokens=(5, 9), hidden=128)


def slices(document: Any) -> list[Any]:
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def traced(group: weft.Group, folder: str) -> list[WorkRecord]:
    with MODE.make(group, CASE, 16) as a2a:
        with pytest.raises(OutOfOrder, match="run a round first"):
            a2a.dump_trace(Path(folder) / "early.json")
        for seed in range(40):  # more than are kept
            play(a2a, MODE, CASE.next(seed=seed), poison=False)
        group.barrier()
        a2a.dump_trace(Path(folder) / f"{group.rank}.json")
        result = read_work_records(a2a._tracks, group.rank, group.size)
        group.barrier()
        return result


@pytest.mark.parametrize("kind", ANY)
def test_every_kept_round_is_there_with_its_steps(ranks, kind, tmp_path):
    works = ranks(2, kind)(traced, str(tmp_path))
    for rank, result in enumerate(works):
        assert {work.epoch for work in result} == set(range(9, 41))
        steps = set(itertools.product(("dispatch", "combine"), ("sender", "receiver")))
        assert {(w.phase, w.role) for w in result} >= steps
        for work in result:
            assert work.rank == rank
            assert 0 < work.start_ns <= work.end_ns
            if work.role == "sender":
                assert work.start_ns <= work.credited_ns <= work.end_ns
            if work.role == "receiver" and work.phase == "dispatch":
                assert work.start_ns <= work.learned_ns <= work.end_ns
    merged = tmp_path / "all.json"
    merge([tmp_path / "0.json", tmp_path / "1.json"], merged)
    document = json.loads(merged.read_text())
    events = slices(document)
    assert {event["pid"] for event in events} == {0, 1}
    assert min(event["ts"] for event in events) == 0.0
    assert all(event["dur"] > 0 for event in events)
    merged.write_text("[]")
    refused(InvalidArgument, lambda: merge([merged], merged), "all.json is not a trace")


def test_clock_ticks_come_from_teams_with_both_clocks():
    teams = [
        TraceRecord(epoch=3, start_ns=1000, credited=500, ended=900, phase=1, role=1, team=1),
        TraceRecord(epoch=3, start_ns=1100, end_ns=1600, ended=1000, phase=1, role=2, team=2),
        TraceRecord(),
    ]
    pages = torch.tensor([list(bytes(team)) for team in teams], dtype=torch.uint8)
    sent, taken = read_work_records(pages[None], 0, 2)
    assert (sent.credited_ns, sent.end_ns) == (1250, 1450)
    assert taken.end_ns == 1600


def test_slices_are_on_rank_0s_clock():
    work = WorkRecord(1, "dispatch", 3, "receiver", 7, 2, 1000, 0, 1500, 4000, (0, 800))
    document = build_chrome_trace([work], Skew((0.0, 500.0), 20.0, 32))
    result = [(e["name"], e["ts"], e["dur"]) for e in slices(document)]
    assert result == [("receive metadata", 1.5, 0.5), ("receive rows", 2.0, 2.5)]
    assert [e["args"]["waited_us"] for e in slices(document)] == [{"rank 1": 0.8}] * 2
    assert document["metadata"]["uncertainty_ns"] == 20


@on_ranks(2, "emulated")
def test_every_cta_of_a_profiled_kernel_leaves_its_page(group):
    mode, case = CASES["fp8"]
    # 56 tokens: three chunks, the last of them cut.
    mode, case = replace(mode, more={"profile": True}), case.next(tokens=(50, 26))
    with mode.make(group, case, 56) as a2a:
        entries: Any = a2a._local.kernels
        play(a2a, mode, case, poison=False)
        for phase in ("dispatch", "combine"):
            plan = entries.plans[phase]
            done = [w for w in read_work_records(a2a._tracks, group.rank, 2) if w.phase == phase]
            # A page from each CTA but the coordinator, whole.
            assert sorted(work.team for work in done) == list(range(1, plan.ctas))
            roles = [work.role for work in sorted(done, key=lambda work: work.team)]
            counts = (plan.metadata, plan.senders, plan.receivers)
            assert roles == [role for role, n in zip(ROLES, counts, strict=True) for _ in range(n)]
            assert all(0 < work.start_ns < work.end_ns for work in done)
            assert sum(work.units for work in done if work.role != "metadata") > 0
            assert all(work.credited_ns for work in done if work.role == "sender")
            assert {w.epoch for w in done} == {1}
            # The first that takes has read the rank's clock twice, once for all who want it.
            pages = [bytes(row.numpy()) for row in a2a._tracks.flatten(0, 1)]
            tracks = [t for t in map(TraceRecord.from_buffer_copy, pages) if t.epoch and t.end_ns]
            kept = [(t.start_ns, t.end_ns) for t in tracks if PHASES[t.phase] == phase]
            (record,) = [r for r in a2a.history() if PHASES[r.phase] == phase]
            spans = read_timeline(a2a.heap, group.rank)
            (span,) = [s for s in spans if s.phase == phase]
            assert kept == [(record.start_ns, record.end_ns)]
            assert span.end_ns == record.end_ns > record.start_ns
        group.barrier()
