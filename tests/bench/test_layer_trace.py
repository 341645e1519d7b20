"""`weft bench layer --trace`: the kernels of one call, on one clock, in tracks of their own."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.bench.test_skew import rounds_of
from weft.bench.layer import LayerCase
from weft.bench.layer_trace import (
    CALL,
    PROCESSES,
    TRACKS,
    Call,
    Work,
    align,
    device_work,
    host_work,
    last_call,
    short,
    to_chrome,
    trace_layers,
)
from weft.bench.trace import ROUNDS
from weft.errors import InvalidArgument
from weft.runtime.timeline import Span

SKEWS = [0, 5_000_000, -40_000]
PROFILER = 7_000_000_000  # its clock against a rank's own


def work_of(spans: list[Span], rank: int) -> list[Work]:
    """A dispatch just before its mark, a product in another stream, and one that ends late."""
    found = []
    for span in spans:
        if span.phase == "dispatch":
            begin = span.start_ns - PROFILER * (rank + 1) - 700.0
            found += [
                Work("dispatch", 7, begin, 900.0, (16, 1, 1)),
                Work("void ns::gemm<int, 3>(float*)", 13, begin + 100, 2000.0),
                Work("combine", 7, begin + 800, 600.0),
            ]
    return found


def calls_of(overlap: str) -> list[Call]:
    calls = []
    for rank, spans in enumerate(rounds_of(SKEWS)):
        work = work_of(spans, rank)
        shift, spread = align(work, spans)
        calls.append(Call(overlap, last_call(work), spans, shift, spread, 12.5))
    return calls


def document() -> dict[str, Any]:
    modes = [calls_of("none"), calls_of("gemm_push")]
    return dict(json.loads(json.dumps(to_chrome(modes, shared_clock=False))))


def test_kernels_lie_where_their_marks_are():
    found = document()
    slices = [e for e in found["traceEvents"] if e["ph"] == "X"]
    for mode in range(2):
        for rank in range(3):
            mine = [e for e in slices if e["pid"] == PROCESSES * mode + rank]
            kernels = [e for e in mine if e["tid"] >= TRACKS]
            assert [e["name"] for e in kernels] == ["dispatch", "ns::gemm", "combine"]
            sent = next(e for e in mine if e["name"] == "send" and e["cat"] == "dispatch")
            assert kernels[0]["ts"] == pytest.approx(sent["ts"], abs=1e-3)
            assert kernels[0]["args"]["grid"] == [16, 1, 1]
    assert min(e["ts"] for e in slices) == 0
    facts = found["metadata"]["modes"]
    assert [mode["overlap"] for mode in facts] == ["none", "gemm_push"]
    for mode in facts:
        assert mode["kernels_against_marks_ns"] == 0
        assert mode["profiled_us"] == 12.5
        for offset, skew in zip(mode["offsets_ns"], SKEWS, strict=True):
            assert abs(offset + skew) <= mode["uncertainty_ns"] + 1


def test_tracks_have_names_and_no_overlaps():
    events = document()["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[101, TRACKS] == "stream 7"
    assert names[101, TRACKS + 1] == "stream 7, beside"  # combine began while dispatch ended
    assert names[101, 2 * TRACKS] == "stream 13"
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {
        PROCESSES * mode + rank: f"{word}: rank {rank}"
        for mode, word in enumerate(("none", "gemm_push"))
        for rank in range(3)
    }
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            key = (event["pid"], event["tid"])
            assert key in names
            tracks.setdefault(key, []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        for before, after in pairwise(sorted(slices)):
            assert before[1] <= after[0] + 1e-3


def test_arrows_of_two_modes_are_not_mixed():
    events = document()["traceEvents"]
    starts = {e["id"]: e["pid"] // PROCESSES for e in events if e["ph"] == "s"}
    ends = {e["id"]: e["pid"] // PROCESSES for e in events if e["ph"] == "f"}
    assert starts == ends
    assert set(starts.values()) == {0, 1}


def event(cat: str, ts: float, dur: float, **args: object) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": cat, "ts": ts, "dur": dur, "tid": 3, "args": args}


def test_only_the_devices_work_is_taken():
    events = [
        event("kernel", 5.5, 2.0, stream=9, grid=[4, 1, 1]),
        event("cpu_op", 1.0, 9.0),
        event("gpu_memset", 2.0, 0.5, stream=7),
        event("cuda_runtime", 1.5, 0.5),
        {"ph": "M", "name": "process_name", "pid": 0},
    ]
    assert device_work(events) == [
        Work("gpu_memset", 7, 2000.0, 500.0),
        Work("kernel", 9, 5500.0, 2000.0, (4, 1, 1)),
    ]
    with pytest.raises(InvalidArgument, match="kept no kernels"):
        device_work(events[1:2])


def test_operations_within_others_are_left_out():
    events = [event("cpu_op", 1, 9), event("cpu_op", 2, 3), event("cpu_op", 10, 1)]
    events.append({**event("user_annotation", 0, 20), "name": CALL})
    assert [(w.start_ns, w.duration_ns) for w in host_work(events)] == [(1e3, 9e3), (1e4, 1e3)]


def test_what_was_lost_is_refused():
    spans = rounds_of(SKEWS)[1]
    work = work_of(spans, 1)
    assert len(last_call(work)) == 3
    with pytest.raises(InvalidArgument, match="some were lost"):
        last_call(work[:-1])
    with pytest.raises(InvalidArgument, match=f"kept {ROUNDS - 1} dispatches"):
        align(work[3:], spans)


def test_names_are_short():
    assert short("void at::native::add<float, 2>(int, float*)") == "at::native::add"
    assert short("grouped_kernel") == "grouped_kernel"
    assert short("<lambda>(x)") == "<lambda>(x)"
    assert len(short("x" * 100)) == 60


def test_an_exchange_without_such_marks_is_refused(tmp_path):
    settings = LayerCase(ranks=2, device="cpu", tokens=(6,), mode="low_latency")
    with pytest.raises(InvalidArgument, match="a trace shows layers of mode 'throughput'"):
        trace_layers(tmp_path / "trace.json", settings)


KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", KINDS)
def test_a_run_writes_every_mode(device, tmp_path):
    path = tmp_path / "trace.json"
    samples = 11 if device == "cuda" else 1
    modes = ("none", "shared_expert")
    settings = LayerCase(
        ranks=2, device=device, tokens=(1, 6), overlaps=modes, experts=16, samples=samples
    )
    assert trace_layers(path, settings) is None
    found = json.loads(path.read_text())
    assert [mode["overlap"] for mode in found["metadata"]["modes"]] == ["none", "shared_expert"]
    assert found["metadata"]["tokens_per_rank"] == 6
    slices = [e for e in found["traceEvents"] if e["ph"] == "X"]
    for pid in (0, 1, PROCESSES, PROCESSES + 1):
        marks = [e for e in slices if e["pid"] == pid and e["tid"] < TRACKS]
        kernels = [e for e in slices if e["pid"] == pid and e["tid"] >= TRACKS]
        assert {e["cat"] for e in marks} == {"dispatch", "combine"}
        # The shared expert's product comes after dispatch has sent, on the common clock.
        sent = next(e["ts"] for e in marks if e["name"] == "send" and e["cat"] == "dispatch")
        assert any(e["ts"] < sent for e in kernels)
        assert any(e["ts"] > sent for e in kernels)
