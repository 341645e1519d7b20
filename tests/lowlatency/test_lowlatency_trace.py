# SPDX-License-Identifier: Apache-2.0
"""Profiled low-latency rounds: the teams' records, and the files for Perfetto."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest
import torch

import weft
from tests.kinds import ANY
from tests.lowlatency_rounds import Mode, play
from tests.rounds import Round
from weft.errors import InvalidArgument, OutOfOrder
from weft.lowlatency.config import get_trace_record_type
from weft.lowlatency.trace import WorkRecord, build_chrome_trace, merge, read_work_records
from weft.runtime.skew import Skew

TraceRecord = get_trace_record_type(2)
MODE = Mode(more={"profile": True})
CASE = Round(tokens=(5, 9), hidden=128)


def traced(group: weft.Group, folder: str) -> list[WorkRecord]:
    case = CASE.next(tokens=CASE.tokens[: group.size])
    with MODE.make(group, case, 16) as a2a:
        with pytest.raises(OutOfOrder, match="run a round first"):
            a2a.dump_trace(Path(folder) / "early.json")
        for seed in range(40):  # more than are kept
            play(a2a, MODE, case.next(seed=seed), poison=False)
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
        assert {(w.phase, w.role) for w in result} >= {
            ("dispatch", "sender"),
            ("dispatch", "receiver"),
            ("combine", "sender"),
            ("combine", "receiver"),
        }
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
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1}
    assert min(event["ts"] for event in slices) == 0.0
    assert all(event["dur"] > 0 for event in slices)


def pages(*tracks: ctypes.Structure) -> torch.Tensor:
    """Return `[1, teams, bytes]`: the records of one operation, and an empty one."""
    result = [bytes(track) for track in tracks] + [bytes(ctypes.sizeof(TraceRecord))]
    return torch.tensor([list(page) for page in result], dtype=torch.uint8)[None]


SENT = TraceRecord(epoch=3, start_ns=1000, credited=500, ended=900, phase=1, role=1, team=1)
TAKEN = TraceRecord(epoch=3, start_ns=1100, end_ns=1600, ended=1000, phase=1, role=2, team=2)


def test_clock_ticks_come_from_teams_with_both_clocks():
    sent, taken = read_work_records(pages(SENT, TAKEN), 0, 2)
    assert (sent.credited_ns, sent.end_ns) == (1250, 1450)
    assert taken.end_ns == 1600


def test_slices_are_on_rank_0s_clock():
    work = WorkRecord(1, "dispatch", 3, "receiver", 7, 2, 1000, 0, 1500, 4000, (0, 800))
    document = build_chrome_trace([work], Skew((0.0, 500.0), 20.0, 32))
    result = [(e["name"], e["ts"], e["dur"]) for e in document["traceEvents"] if e["ph"] == "X"]
    assert result == [("receive metadata", 1.5, 0.5), ("receive rows", 2.0, 2.5)]
    waits = [e["args"]["waited_us"] for e in document["traceEvents"] if e["ph"] == "X"]
    assert waits == [{"rank 1": 0.8}] * 2
    assert document["metadata"]["uncertainty_ns"] == 20


def test_a_file_that_is_no_trace_is_named(tmp_path):
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]")
    with pytest.raises(InvalidArgument, match=r"wrong\.json is not a trace"):
        merge([wrong], tmp_path / "out.json")


def unprofiled(group: weft.Group) -> int:
    with Mode().make(group, CASE, 16) as a2a:
        with pytest.raises(InvalidArgument, match="without profile=True"):
            a2a.dump_trace("never.json")
        return int(a2a._tracks.numel())


def test_without_profile_nothing_is_kept(ranks):
    assert ranks(2, "threads")(unprofiled) == [0, 0]
    assert not Path("never.json").exists()
