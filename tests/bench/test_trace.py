# SPDX-License-Identifier: Apache-2.0
"""Clocks of ranks: skews from causality, and traces that Perfetto loads, on one clock."""

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.test_cases import LOW
from weft.bench import trace as tracing
from weft.bench.moe import MoECase
from weft.bench.trace import COMBINE, DISPATCH, PEERS, REDUCE, ROUNDS, convert_spans
from weft.errors import InvalidArgument
from weft.runtime.skew import estimate_skew
from weft.runtime.timeline import Span


def rounds_of(
    skews: list[int], *, seed: int = 0, rounds: int = 32, least: int = 800, tick: int = 1
) -> list[list[Span]]:
    """Return spans of ranks whose clocks show true time plus `skews`, in steps of `tick` ns.

    Flags take `least` ns, and sometimes much more.
    """
    chance = random.Random(seed)
    ranks: list[list[Span]] = [[] for _ in skews]
    now = 10_000_000_000

    def shown(rank: int, true: int) -> int:
        return (true + skews[rank]) // tick * tick

    for epoch in range(1, rounds + 1):
        for phase in ("dispatch", "combine"):
            sent = [now + chance.randrange(4000) for _ in skews]
            published = [left + 300 for left in sent]
            for me in range(len(skews)):
                arrived = [
                    max(published[me], left + least + int(chance.expovariate(1 / 500)))
                    for left in sent
                ]
                ranks[me].append(
                    Span(
                        *(me, phase, epoch, 4),
                        start_ns=shown(me, now - 5000),
                        sent_ns=shown(me, sent[me]),
                        published_ns=shown(me, published[me]),
                        end_ns=shown(me, max(arrived) + 2000),
                        arrived_ns=tuple(shown(me, at) for at in arrived),
                    )
                )
            now += 30_000
    return ranks


@settings(deadline=None)
@given(
    skews=st.lists(st.integers(-(10**9), 10**9), min_size=2, max_size=5),
    seed=st.integers(0, 1 << 20),
    tick=st.sampled_from([1, 32, 1000]),
)
def test_known_skews_are_found_within_the_stated_uncertainty(skews, seed, tick):
    result = estimate_skew(rounds_of(skews, seed=seed, tick=tick))
    assert result.offsets_ns[0] == 0
    for p, offset in enumerate(result.offsets_ns):
        for q, other in enumerate(result.offsets_ns):
            error = (offset - other) - (skews[q] - skews[p])
            assert abs(error) <= result.uncertainty_ns, (p, q)


def test_no_flag_is_seen_before_it_was_sent():
    ranks = rounds_of([0, 10**9, -(10**6), 5])
    offsets = estimate_skew(ranks).offsets_ns
    sent = {(s.rank, s.phase, s.epoch): s.sent_ns for spans in ranks for s in spans}
    for q, spans in enumerate(ranks):
        for span in spans:
            for p, seen in enumerate(span.arrived_ns):
                left = sent[p, span.phase, span.epoch] + offsets[p]
                assert left <= seen + offsets[q] + 1


def test_clocks_that_no_skew_explains_are_refused():
    ranks = rounds_of([0, 0])
    late = [
        replace(s, sent_ns=s.sent_ns + 9000, arrived_ns=tuple(t + 9000 for t in s.arrived_ns))
        for s in ranks[1][32:]
    ]
    apart, none = "clocks of ranks 0 and 1 drifted apart by", "no finished round in common"
    for first, second, text in (
        (ranks[0], [*ranks[1][:32], *late], apart),
        (ranks[0][:10], ranks[1][10:], f"ranks 0 and 1 have {none}"),
        (ranks[0], [replace(span, end_ns=0) for span in ranks[1]], none),
    ):
        with pytest.raises(InvalidArgument, match=text):
            estimate_skew([first, second])


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
