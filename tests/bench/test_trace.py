# SPDX-License-Identifier: Apache-2.0
"""`weft bench moe --trace` writes JSON that Perfetto loads, complete and on one clock."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from tests.bench.test_cases import LOW
from tests.bench.test_skew import rounds_of
from weft.bench import trace as tracing
from weft.bench.moe import MoECase
from weft.bench.trace import COMBINE, DISPATCH, PEERS, REDUCE, ROUNDS, convert_spans
from weft.runtime.skew import estimate_skew

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SKEWS = [0, 5_000_000, -40_000]


def case_of(device: str) -> MoECase:
    sizes: dict[str, Any] = {"tokens": (1, 6), "hidden": 64, "top_k": 4, "experts": 12}
    return MoECase(ranks=3, device=device, samples=11 if device == "cuda" else 1, **sizes)


@pytest.fixture
def document() -> dict[str, Any]:
    ranks = rounds_of(SKEWS)
    return dict(json.loads(json.dumps(convert_spans(ranks, estimate_skew(ranks)))))


def test_every_event_is_one_that_the_format_knows(document):
    events = document["traceEvents"]
    for event in events:
        assert set(event) >= {"ph", "name", "pid", "tid"}, event
        assert event["pid"] in range(3)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] > 0
        else:
            assert event["ph"] in "Msf"
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[1, DISPATCH] == "dispatch send"
    assert names[1, COMBINE] == "combine wait"
    assert names[1, REDUCE] == "reduce"
    assert names[1, PEERS + 2] == "wait for rank 2"
    assert all((e["pid"], e["tid"]) in names for e in events if e["ph"] == "X")


def test_slices_of_a_track_do_not_overlap(document):
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            slices = tracks.setdefault((event["pid"], event["tid"]), [])
            slices.append((event["ts"], event["ts"] + event["dur"]))
    assert tracks
    for slices in tracks.values():
        for before, after in pairwise(sorted(slices)):
            assert before[1] <= after[0] + 1e-3


def test_arrows_lead_from_a_flag_to_the_wait_that_it_ended(document):
    events = document["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) > 3 * ROUNDS
    waits = [e for e in events if e["ph"] == "X" and e["tid"] >= PEERS]
    for key, end in ends.items():
        assert starts[key]["ts"] <= end["ts"]
        assert end["tid"] == PEERS + starts[key]["pid"]
        assert any(
            w["pid"] == end["pid"] and w["tid"] == end["tid"] and w["ts"] <= end["ts"]
            and end["ts"] <= w["ts"] + w["dur"]
            for w in waits
        )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_holds_the_last_rounds_of_every_rank(tmp_path, kind):
    path = tmp_path / "trace.json"
    assert tracing.write_trace(path, case_of(kind)) is None
    document = json.loads(path.read_text())
    slices = [e for e in document["traceEvents"] if e["ph"] == "X"]
    counts = Counter((e["pid"], e["name"]) for e in slices)
    for rank in range(3):
        assert ROUNDS - 2 <= counts[rank, "reduce"] <= ROUNDS  # one may take less than a tick
        assert counts[rank, "send"] >= ROUNDS - 2
    result = document["metadata"]
    assert (result["tokens_per_rank"], result["ranks"]) == (6, 3)
    assert result["profiled_pair_us"] > 0
    assert result["tick_ns"] >= 1 if kind == "cuda" else result["uncertainty_ns"] == 0


def test_a_trace_of_low_latency(tmp_path, threads):
    assert tracing.write_trace(tmp_path / "trace.json", LOW) is None
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1}
    assert {event["name"] for event in slices} >= {"receive rows", "copy"}


def test_a_wrong_result_is_reported_and_nothing_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "run_on_ranks", lambda *_: [("rank 0: wrong", [], 0.0)])
    assert tracing.write_trace(tmp_path / "t.json", case_of("cpu")) == "rank 0: wrong"
    assert list(tmp_path.iterdir()) == []
