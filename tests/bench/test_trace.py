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


def test_events_are_those_of_the_rounds_in_order():
    """They have names and times; slices of a track do not overlap; arrows end the waits."""
    ranks = rounds_of(SKEWS)
    events = json.loads(json.dumps(convert_spans(ranks, estimate_skew(ranks))))["traceEvents"]
    assert {event["ph"] for event in events} == set("XMsf")
    assert {event["pid"] for event in events} == set(range(3))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    known = {DISPATCH: "dispatch send", COMBINE: "combine wait", REDUCE: "reduce"}
    known[PEERS + 2] = "wait for rank 2"
    assert {track: names[1, track] for track in known} == known
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            slices = tracks.setdefault((event["pid"], event["tid"]), [])
            slices.append((event["ts"], event["ts"] + event["dur"]))
    assert tracks.keys() <= names.keys()
    for slices in tracks.values():
        for before, after in pairwise(sorted(slices)):
            assert 0 <= before[0] < before[1] <= after[0] + 1e-3
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) > 3 * ROUNDS
    for key, end in ends.items():
        assert starts[key]["ts"] <= end["ts"]
        assert end["tid"] == PEERS + starts[key]["pid"]
        assert any(a <= end["ts"] <= b for a, b in tracks[end["pid"], end["tid"]])


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
