"""From samples to rows, tables, files and pictures; and back from files, also recorded ones."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench.test_moe import ON_GPUS
from tests.rounds import combining
from weft.bench.baselines import BaselineRun, merge_peers
from weft.bench.compare import compare
from weft.bench.limits import pair_floor_us
from weft.bench.moe import MoECase
from weft.bench.peers import RECORDS, matching
from weft.bench.plot import plot
from weft.bench.report import (
    Spread,
    as_json,
    print_report,
    read_rows,
    rows_of,
    write_json,
)
from weft.bench.routing import busiest, chosen, make_ids, token_rows
from weft.bench.run import Measurement, Report
from weft.errors import InvalidArgument
from weft.moe import MODELS

SIZES = MODELS["deepseek-v3"]
SPLIT = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
H200 = replace(
    ON_GPUS,
    ranks=8,
    tokens=(8, 128),
    hidden=SIZES.hidden,
    top_k=SIZES.routing.top_k,
    experts=SIZES.routing.num_experts,
    routing="perfect",
    model="deepseek-v3",
)


def _report(case: MoECase, gpu: str) -> Report:
    measurements = []
    for backend in case.backends:
        for tokens in case.tokens:
            ids = [make_ids(case, tokens, rank) for rank in range(case.ranks)]
            samples = {
                phase: [[us + rank + i for i in range(3)] for rank in range(case.ranks)]
                for phase, us in (("dispatch", 10.0), ("combine", 20.0), ("pair", 30.0))
            }
            facts = {"chosen": chosen(ids), "wire": busiest(token_rows(ids, case.experts))}
            cold = {name: [[2 * us for us in rank] for rank in samples[name]] for name in samples}
            found = Measurement(backend, tokens, "by hand", samples, facts)
            if case.cold:
                found = replace(found, cold_us=cold, cold_method="cold, by hand")
            measurements.append(found)
    machine = {
        "date": "2026-11-20T12:00:00+00:00",
        "gpus": [gpu] * case.ranks if gpu else [],
        "driver": "580.159",
        "cuda": "13.0",
        "torch": "2.11.0",
        "cpu": "some CPU",
        "cpus": 2,
    }
    return Report(case, machine, measurements)


def test_spread_is_of_the_slowest_rank():
    spread = Spread.of([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])
    assert (spread.min, spread.median, spread.max) == (3.0, 4.0, 9.0)
    assert spread.p99 == pytest.approx(2 + 0.98 * 7)
    assert Spread.of([[7.0]]) == Spread(7.0, 7.0, 7.0, 7.0)


def test_rows_know_floor_and_baselines():
    peers = matching(H200)
    assert [peer.library for peer in peers] == ["FlashInfer 0.7.2", "DeepEP v1 low-latency"]
    rows = rows_of(_report(H200, "NVIDIA H200"), peers)
    assert [(row.tokens, row.phase) for row in rows[:3]] == [
        (8, "dispatch"),
        (8, "combine"),
        (8, "pair"),
    ]
    pair = rows[5]
    moved = 128 * 7 * 7168 * 2  # every token to seven remote ranks
    assert pair.floor is not None
    assert pair.floor == pytest.approx(2 * moved / 340e3 + 3.96)
    assert pair.us.median == 30 + 7 + 1
    assert pair.ratio == pytest.approx(38 / pair.floor)
    assert pair.baselines == {
        "FlashInfer 0.7.2, recorded": 104.3,
        "DeepEP v1 low-latency, recorded": 127.6,
    }
    assert pair.wire == pytest.approx(2 * moved / 38 / 1e3)
    assert pair.logical == pytest.approx(2 * 128 * 8 * 7168 * 2 / 38 / 1e3)
    assert rows[3].wire == pytest.approx(moved / 18 / 1e3)
    assert rows[3].floor is None


def test_records_stand_beside_their_like():
    fp8 = {peer.library: peer.us[128] for peer in matching(replace(H200, payload="fp8"))}
    assert fp8 == {"FlashInfer 0.7.2": 85.4, "DeepEP v1 low-latency": 104.7}
    quantised = replace(H200, quantize="fp8")
    for settings in (quantised, replace(quantised, combine_dtype="fp8")):
        found = matching(settings)
        assert {peer.library: peer.us[128] for peer in found} == fp8
    assert matching(replace(H200, quantize="mxfp8")) == []
    pushed = matching(replace(H200, combine="push"))
    assert [peer.us[128] for peer in pushed] == [104.3, 127.6]


def test_rows_count_the_bytes_of_the_wire():
    backends = ("onesided", "collective")
    case = replace(H200, quantize="fp8", combine_dtype="fp8", backends=backends)
    report = _report(case, "NVIDIA H200")
    row = 7168 + 4 * 7168 // 128
    peers = matching(case)
    pairs = [each for each in rows_of(report, peers) if each.phase == "pair" and each.tokens == 128]
    for pair, size in zip(pairs, (row, 14336), strict=True):
        assert pair.moved == 2 * 128 * 7 * size
        assert pair.floor == pytest.approx(pair.moved / 340e3 + 3.96)
    text = io.StringIO()
    print_report(Console(file=text, width=220), report, peers)
    shown = " ".join(text.getvalue().split())
    for piece in (
        "fp8 + scales out, quantised by dispatch, fp8 + scales back (pushed)",
        "A row is 7392 bytes out and 7392 bytes back.",
        "The collective backend runs without these options: bf16 out, bf16 back.",
        "Other libraries' rows come back as bf16 unless they say otherwise, 14336 bytes each",
    ):
        assert piece in shown, piece


@pytest.mark.parametrize(("way", "carrier"), [("pull", "recv"), ("push", "send"), ("fp8", "send")])
def test_split_phases_stand_between_the_whole_and_the_pair(way, carrier):
    report = _report(
        replace(H200, tokens=(128,), split_phase=True, **combining(way)), "NVIDIA H200"
    )
    (found,) = report.measurements
    split_phase = {name: [[4.0]] * 8 for name in SPLIT}
    samples = {**found.samples_us, **split_phase, "pair": found.samples_us["pair"]}
    report = replace(report, measurements=[replace(found, samples_us=samples)])
    rows = {row.phase: row for row in rows_of(report, [])}
    assert set(rows) == {"dispatch", "combine", *SPLIT, "pair"}
    moving = {name for name in SPLIT if rows[name].moved}
    assert moving == {"dispatch_send", f"combine_{carrier}"}
    assert rows[f"combine_{carrier}"].moved == rows["combine"].moved
    text = io.StringIO()
    print_report(Console(file=text, width=140), report, [])
    assert "also split-phase" in text.getvalue()
    assert "combine_recv" in text.getvalue()


def test_a_co_run_is_shown(tmp_path):
    settings = replace(H200, tokens=(128,), num_sms=16, corun="matmul")
    report = _report(settings, "NVIDIA H200")
    times = {
        "call": [[40.0, 44.0, 90.0]] * 7 + [[50.0]],
        "matmul": [[1800.0]] * 7 + [[1900.0]],
        "matmul_limited": [[1700.0]] * 8,
        "matmul_alone": [[1500.0]] * 8,
    }
    found = replace(report.measurements[0], corun_us=times, corun_method="co-run, by hand")
    report = replace(report, measurements=[found])
    together = rows_of(report, [])[-1].corun
    assert together is not None
    assert (together.call, together.matmul) == (50.0, 1900.0)
    assert together.slower == pytest.approx(1900 / 1500)
    assert together.slower_limited == pytest.approx(1900 / 1700)
    text = io.StringIO()
    print_report(Console(file=text, width=160), report, [])
    shown = " ".join(text.getvalue().split())
    for piece in (
        "co-run with matmul 8192^3",
        "50.0 1.27 1.12",
        "co-run, by hand.",
        "the matmul takes 1900 us, alone 1500 us, alone on the SMs left to it 1700 us",
    ):
        assert piece in shown, piece
    data = json.loads(json.dumps(as_json(report)))
    assert data["results"][0]["corun_us"] == times
    assert data["rows"][-1]["corun"]["call"] == 50.0
    plot(tmp_path / "pair.svg", rows_of(report), settings.title(), report.machine)
    assert "co-run with matmul" in (tmp_path / "pair.svg").read_text()
    silent = replace(report, measurements=[replace(found, corun_us={}, corun_method="no figure")])
    assert rows_of(silent, [])[-1].corun is None
    print_report(Console(file=text, width=160), silent, [])


def test_no_floor_and_no_baselines_without_that_gpu():
    peers = matching(H200)
    cpu = rows_of(_report(H200, ""), peers)
    assert all(row.floor is None and row.baselines == {} for row in cpu)
    other = rows_of(_report(H200, "NVIDIA B200"), peers)
    assert all(row.floor is None for row in other)
    assert pair_floor_us(0, 0, []) is None
    assert pair_floor_us(0, 0, ["NVIDIA H200", "NVIDIA H100"]) is None


@pytest.mark.parametrize(
    "change", [{"ranks": 2}, {"hidden": 4096}, {"top_k": 4}, {"routing": "zipf"}, {"dtype": "fp16"}]
)
def test_baselines_need_the_same_sizes(change):
    assert matching(replace(H200, **change)) == []


def test_peer_files(tmp_path):
    assert json.loads(RECORDS.read_text())["date"] == "2026-11-20"
    for text in ("{", "[]", '{"records": [{}]}'):
        (tmp_path / "peers.json").write_text(text)
        with pytest.raises(InvalidArgument, match="is no file of peer records"):
            matching(H200, tmp_path / "peers.json")


def test_table_json_and_picture(tmp_path, capsys):
    case = replace(H200, backends=("onesided", "collective"))
    report, peers = _report(case, "NVIDIA H200"), matching(H200)
    text = io.StringIO()
    print_report(Console(file=text, width=160), report, peers)
    for piece in ("deepseek-v3", "8x NVIDIA H200", "FlashInfer", "104.3", "x floor", "340 GB/s"):
        assert piece in text.getvalue()
    path = tmp_path / "deep" / "all.json"
    write_json(path, as_json(report, peers))
    data = json.loads(path.read_text())
    assert data["settings"]["hidden"] == 7168
    assert len(data["results"]) == 4
    assert len(data["results"][0]["samples_us"]["pair"]) == 8
    assert data["rows"][2]["us"]["median"] == 38
    write_json(Path("-"), {"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    rows = rows_of(report, peers)
    plot(tmp_path / "pair.png", rows, case.title(), report.machine)
    assert (tmp_path / "pair.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidArgument, match="cannot write the picture"):
        plot(tmp_path / "pair.nope", rows, case.title(), report.machine)
    with pytest.raises(InvalidArgument, match="cannot write"):
        write_json(tmp_path, {})


def test_cold_columns_and_what_became_of_peers():
    report = _report(replace(H200, cold=True, num_sms=24), "NVIDIA H200")
    samples = {128: {"pair": [[50.0]] * 8}}
    runs = [
        BaselineRun("FlashInfer", "0.8.0", "measured", "by hand", samples),
        BaselineRun("DeepEP v1", "", "not installed"),
    ]
    peers = merge_peers(matching(H200), runs, "2026-11-20")
    rows = rows_of(report, peers)
    assert [row.cold for row in rows[3:]] == [36.0, 56.0, 76.0]
    assert rows[5].baselines == {
        "FlashInfer 0.8.0, this run": 50.0,
        "DeepEP v1 low-latency, recorded": 127.6,
    }
    text = io.StringIO()
    print_report(Console(file=text, width=160), report, peers, runs)
    for piece in (
        "cold",
        "76.0",
        "24 SMs",
        "cold, by hand.",
        "Recorded figures: 2026-11-20 on 8x NVIDIA H200",
        "FlashInfer 0.8.0: measured in this run, by hand;",
        "DeepEP v1: not installed.",
    ):
        assert piece in text.getvalue(), piece
    data = json.loads(json.dumps(as_json(report, peers, runs)))
    assert data["settings"]["num_sms"] == 24
    assert data["results"][1]["cold_us"]["pair"][7][1] == 2 * 38
    assert [run["status"] for run in data["peers"]] == ["measured", "not installed"]
    assert data["rows"][5]["cold"] == 76.0


def test_what_was_written_is_read_back():
    report = _report(H200, "NVIDIA H200")
    rows = rows_of(report, matching(H200))
    assert read_rows(json.loads(json.dumps(as_json(report, matching(H200))))) == rows


@pytest.mark.parametrize(
    ("name", "variant", "tokens", "phase", "median"),
    [
        ("moe-deepseek-v3-perfect-8xH200-2026-11-20", "onesided", 128, "pair", 88.80),
        ("layer-exchanges-4xH200-2026-11-22", "push", 8, "call", None),
        ("lowlatency-4xH200-2026-11-21", "default", 128, "pair", None),
        ("allreduce-4xH200-2026-11-21", "auto", 128, "call", None),
    ],
)
def test_recorded_runs_are_still_read(name, variant, tokens, phase, median):
    data = json.loads((RECORDS.parent / f"{name}.json").read_text())
    found = [
        row
        for row in read_rows(data)
        if (row.variant, row.tokens, row.phase) == (variant, tokens, phase)
    ]
    assert found
    assert all(0 < row.us.min <= row.us.median <= row.us.max for row in found)
    if median is not None:
        assert found[0].us.median == pytest.approx(median, abs=0.05)


@pytest.mark.parametrize(
    "data", [{}, [], {"settings": {}, "rows": []}, {"settings": {}, "rows": [{"us": {"min": 1}}]}]
)
def test_what_is_no_run_is_refused(data):
    with pytest.raises(InvalidArgument, match="no rows of a benchmark|none of a benchmark's"):
        read_rows(data)


def _written(path: Path, times: dict[tuple[str, int], float]) -> Path:
    us = {"min": 1.0, "p99": 1.0, "max": 1.0}
    rows = [
        {"variant": variant, "tokens": tokens, "phase": phase, "us": {**us, "median": median}}
        for (variant, tokens), median in times.items()
        for phase in ("dispatch", "pair")
    ]
    path.write_text(json.dumps({"settings": {}, "rows": rows}))
    return path


def test_two_runs_are_compared(weft_command, tmp_path):
    first = _written(tmp_path / "a.json", {("a", 1): 10.0, ("a", 8): 20.0, ("b", 1): 5.0})
    second = _written(tmp_path / "b.json", {("a", 1): 10.4, ("a", 8): 21.2, ("c", 1): 5.0})
    assert [(each.tokens, round(each.ratio, 3)) for each in compare(first, second)] == [
        (1, 1.04),
        (8, 1.06),
    ]
    command = ("bench", "compare", str(first), str(second))
    code, out, err = weft_command(*command)
    assert (code, err) == (0, "")
    assert "1.040" in out
    assert "1.060" in out
    code, out, _ = weft_command(*command, "--limit", "5")
    assert code == 1
    assert "a, 8 tokens: 6.0 % slower, the limit is 5 %" in out
    assert "a, 1 tokens" not in out
    assert weft_command(*command, "--limit", "7")[0] == 0


def test_runs_that_cannot_be_compared_are_refused(weft_command, tmp_path):
    first = _written(tmp_path / "a.json", {("a", 1): 10.0})
    other = _written(tmp_path / "b.json", {("b", 1): 10.0})
    code, _, err = weft_command("bench", "compare", str(first), str(other))
    assert code == 2
    assert "no variant and size in common: a at 1, and b at 1" in " ".join(err.split())
    (tmp_path / "c.json").write_text("{")
    assert weft_command("bench", "compare", str(first), str(tmp_path / "c.json"))[0] == 2
    assert weft_command("bench", "compare", str(first), str(tmp_path / "none.json"))[0] == 2
    several = tmp_path / "several.json"
    several.write_text(json.dumps([json.loads(first.read_text())] * 2))
    code, _, err = weft_command("bench", "compare", str(first), str(several))
    assert code == 2
    assert "several runs with a, 1 tokens" in " ".join(err.split())
