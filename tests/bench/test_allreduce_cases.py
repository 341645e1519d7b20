"""Settings, bytes, floors, recorded rivals, tables and pictures of the all-reduce bench."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from weft.bench.allreduce import ReduceMeasurement, ReduceReport
from weft.bench.allreduce_cases import ReduceSettings, wire_bytes
from weft.bench.allreduce_plot import plot_reduce
from weft.bench.allreduce_report import print_reduce, write_reduce_json
from weft.bench.allreduce_summary import reduce_rows
from weft.bench.limits import allreduce_floor_us
from weft.bench.peers import RECORDS, matching_reduces
from weft.bench.rivals import RivalRun, beside
from weft.errors import InvalidArgument

SMALL = ReduceSettings(
    ranks=2,
    device="cpu",
    tokens=(1, 5),
    hidden=256,
    dtype="bf16",
    epilogue="norm",
    backends=("oneshot", "twoshot"),
    graph=True,
    samples=3,
    seed=1,
)
H200 = replace(
    SMALL,
    ranks=8,
    device="cuda",
    tokens=(8, 128, 4096),
    hidden=7168,
    backends=("auto", "twoshot"),
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "fp64"}, "dtype is 'fp64'"),
        ({"epilogue": "fp4"}, "epilogue is 'fp4'"),
        ({"backends": ("nccl",)}, "backend is 'nccl'; choose one of oneshot, twoshot"),
        ({"backends": ()}, "nothing to measure"),
        ({"tokens": ()}, "nothing to measure"),
        ({"tokens": (0, 4)}, "0 tokens"),
        ({"max_tokens": 4}, "5 tokens do not fit max_tokens=4"),
        ({"ranks": 1}, "1 ranks; an all-reduce has 2 to 8"),
        ({"ranks": 9}, "9 ranks"),
        ({"hidden": 100}, "multiple of 8"),
        ({"hidden": 200, "epilogue": "fp8-group"}, "multiple of 128"),
        ({"samples": 0}, "0 samples"),
    ],
)
def test_settings_that_do_not_fit(change, text):
    with pytest.raises(InvalidArgument, match=text):
        replace(SMALL, **change)


def test_what_settings_mean():
    assert SMALL.capacity == 5
    assert replace(SMALL, max_tokens=9).capacity == 9
    assert SMALL.row_bytes == 512
    assert replace(SMALL, dtype="fp32").row_bytes == 1024
    texts = {
        replace(SMALL, epilogue=name).what
        for name in ("none", "norm", "fp8-static", "fp8-token", "fp8-group")
    }
    assert len(texts) == 5


def test_bytes_and_floor():
    payload = 64 * 7168 * 2
    assert wire_bytes("oneshot", payload, 8) == 7 * payload
    assert wire_bytes("twoshot", payload, 8) == wire_bytes("collective", payload, 8)
    assert wire_bytes("twoshot_bulk", payload, 8) == 14 / 8 * payload
    assert wire_bytes("twoshot", payload, 2) == wire_bytes("oneshot", payload, 2)
    gpus = ["NVIDIA H200"] * 8
    row = 7168 * 2
    assert allreduce_floor_us(row, 8, gpus) == pytest.approx(1.98 + 7 * row / 340e3)
    two_ways = pytest.approx(3.18 + 1.75 * 2048 * row / 340e3)
    assert allreduce_floor_us(2048 * row, 8, gpus) == two_ways
    assert allreduce_floor_us(row, 8, []) is None
    assert allreduce_floor_us(row, 8, ["NVIDIA H200"] * 7 + ["NVIDIA L4"]) is None


def test_records_of_the_same_sizes_stand_beside():
    found = {peer.library: peer for peer in matching_reduces(H200)}
    assert found["FlashInfer trtllm one-shot"].us[8] == 12.9
    assert found["FlashInfer trtllm two-shot"].us[128] == 40.5
    assert found["torch all_reduce"].us[2048] == 228.9
    reckoned = found["torch symm_mem two-shot"]
    assert reckoned.us[128] == 26.9, "its sum, and what the norm added to NCCL's"
    assert reckoned.label == "torch symm_mem two-shot, reckoned"
    plain = {peer.library for peer in matching_reduces(replace(H200, epilogue="none"))}
    assert {"torch symm_mem two-shot", "torch symm_mem one-shot"} < plain
    assert matching_reduces(replace(H200, epilogue="fp8-token")) == list(found.values())
    four = {peer.library: peer.us for peer in matching_reduces(replace(H200, ranks=4))}
    assert four["FlashInfer trtllm one-shot"][1] == 7.1
    for change in ({"hidden": 5120}, {"ranks": 2}, {"dtype": "fp16"}):
        assert matching_reduces(replace(H200, **change)) == []


def test_a_file_that_holds_none_is_refused(tmp_path):
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({"machine": "m", "date": "d", "records": []}))
    with pytest.raises(InvalidArgument, match=r"allreduce with library, us, ranks, hidden"):
        matching_reduces(H200, path)
    assert json.loads(RECORDS.read_text())["allreduce"]


def _report(settings: ReduceSettings, gpu: str) -> ReduceReport:
    measurements = [
        ReduceMeasurement(
            backend=backend,
            tokens=tokens,
            chosen="oneshot" if backend == "auto" and tokens < 16 else "twoshot",
            why="because" if backend == "auto" else "",
            method="by hand",
            samples=[[us + rank + i for i in range(3)] for rank in range(settings.ranks)],
        )
        for tokens in settings.tokens
        for backend, us in (("auto", 10.0), ("twoshot", 20.0))
    ]
    machine = {
        "date": "2026-11-20T12:00:00+00:00",
        "gpus": [gpu] * settings.ranks if gpu else [],
        "driver": "580.159",
        "cuda": "13.0",
        "torch": "2.11.0",
        "cpu": "some CPU",
        "cpus": 2,
    }
    return ReduceReport(settings, machine, measurements, ["oneshot, 4096 tokens: no"], 3 << 20)


def test_rows_know_floor_rivals_and_what_ran():
    report, peers = _report(H200, "NVIDIA H200"), matching_reduces(H200)
    rows = reduce_rows(report, peers)
    assert [(row.tokens, row.backend, row.chosen) for row in rows[:3]] == [
        (8, "auto", "oneshot"),
        (8, "twoshot", "twoshot"),
        (128, "auto", "twoshot"),
    ]
    first, second, payload = rows[0], rows[1], 8 * 7168 * 2
    assert first.us.median == 18.0, "10 + 7 for the slowest rank + 1 in the middle"
    assert first.wire == pytest.approx(7 * payload / 18.0 / 1e3)
    assert second.wire == pytest.approx(1.75 * payload / 28.0 / 1e3)
    assert first.logical == pytest.approx(payload / 18.0 / 1e3)
    assert first.floor == second.floor == allreduce_floor_us(payload, 8, ["NVIDIA H200"] * 8)
    assert first.ratio == pytest.approx(18.0 / (first.floor or 0))
    assert first.rivals["FlashInfer trtllm one-shot, recorded"] == 12.9
    assert rows[-1].rivals == {}
    cpu = reduce_rows(_report(replace(H200, device="cpu"), ""), peers)
    assert all(row.floor is None and row.rivals == {} for row in cpu)


def test_table_file_and_picture(tmp_path):
    report = _report(H200, "NVIDIA H200")
    measured = RivalRun(
        "FlashInfer trtllm one-shot",
        "9.9",
        "measured",
        "a graph",
        {8: {"call": [[7.0, 8.0, 9.0], [7.5, 8.5, 9.5]]}},
        phase="call",
    )
    absent = RivalRun("torch symm_mem two-shot", "", "not installed")
    runs = [measured, absent]
    peers = beside(matching_reduces(H200), runs, "2026-11-20")
    stream = io.StringIO()
    print_reduce(Console(file=stream, width=240), report, peers, runs)
    text = stream.getvalue()
    for words in (
        "weft bench allreduce  8 ranks, hidden 7168, bf16, sum + residual + RMSNorm",
        "auto: oneshot",
        "FlashInfer trtllm one-shot 9.9, this run",
        "8.5",
        "40.5",
        "FlashInfer trtllm two-shot",
        "3.0 MiB a rank",
        "Refused: oneshot, 4096 tokens: no",
        "torch symm_mem two-shot: not installed.",
        "bit by bit",
        "because",
        "8x NVIDIA H200",
    ):
        assert words in text, words
    assert "12.9" not in text, "the recorded figures of a library that was measured are left out"
    full, picture = tmp_path / "some" / "all.json", tmp_path / "all.svg"
    write_reduce_json(full, report, peers, runs)
    data = json.loads(full.read_text())
    assert data["results"][0]["samples_us"] == report.measurements[0].samples
    assert data["rows"][0]["rivals"]["FlashInfer trtllm one-shot 9.9, this run"] == 8.5
    assert data["peers"][1]["status"] == "not installed"
    assert (data["memory_bytes"], data["settings"]["hidden"]) == (3 << 20, 7168)
    plot_reduce(picture, report, peers)
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    plot_reduce(picture, _report(SMALL, ""), [])
    assert picture.read_text() != drawn
