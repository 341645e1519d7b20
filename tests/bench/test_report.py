"""From samples to rows, tables, files and pictures."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from tests.bench.test_cases import SETTINGS
from weft.bench.cases import CASES, Settings
from weft.bench.clock import HALVES
from weft.bench.limits import pair_floor_us
from weft.bench.moe import Measurement, Report
from weft.bench.peers import RECORDS, matching_peers
from weft.bench.plot import plot
from weft.bench.report import print_report, trtllm_report, write_json, write_trtllm_json
from weft.bench.rivals import RivalRun, beside
from weft.bench.routing import make_ids, traffic_of
from weft.bench.summary import Spread, rows_of
from weft.errors import InvalidArgument

SIZES = CASES["deepseek-v3"]
H200 = replace(
    SETTINGS,
    ranks=8,
    device="cuda",
    tokens=(8, 128),
    hidden=SIZES.hidden,
    top_k=SIZES.top_k,
    experts=SIZES.experts,
    router="perfect",
    case="deepseek-v3",
)


def _report(settings: Settings, gpu: str) -> Report:
    measurements = []
    for backend in settings.backends:
        for tokens in settings.tokens:
            ids = [make_ids(settings, tokens, rank) for rank in range(settings.ranks)]
            samples = {
                phase: [[us + rank + i for i in range(3)] for rank in range(settings.ranks)]
                for phase, us in (("dispatch", 10.0), ("combine", 20.0), ("pair", 30.0))
            }
            traffic = traffic_of(ids, settings.experts)
            cold, method = None, None
            if settings.cold:
                cold = {
                    phase: [[2 * us for us in rank] for rank in samples[phase]] for phase in samples
                }
                method = "cold, by hand"
            measurements.append(
                Measurement(backend, tokens, 128, "by hand", traffic, samples, cold, method)
            )
    machine = {
        "date": "2026-11-20T12:00:00+00:00",
        "gpus": [gpu] * settings.ranks if gpu else [],
        "driver": "580.159",
        "cuda": "13.0",
        "torch": "2.11.0",
        "cpu": "some CPU",
        "cpus": 2,
    }
    return Report(settings, machine, measurements)


def test_spread_is_of_the_slowest_rank():
    spread = Spread.of([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])
    assert (spread.min, spread.median, spread.max) == (3.0, 4.0, 9.0)
    assert spread.p99 == pytest.approx(2 + 0.98 * 7)
    assert Spread.of([[7.0]]) == Spread(7.0, 7.0, 7.0, 7.0)


def test_rows_know_floor_and_rivals():
    peers = matching_peers(H200)
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
    assert pair.rivals == {
        "FlashInfer 0.7.2, recorded": 104.3,
        "DeepEP v1 low-latency, recorded": 127.6,
    }
    assert pair.wire == pytest.approx(2 * moved / 38 / 1e3)
    assert pair.logical == pytest.approx(2 * 128 * 8 * 7168 * 2 / 38 / 1e3)
    assert rows[3].wire == pytest.approx(moved / 18 / 1e3)
    assert rows[3].floor is None


def test_records_stand_beside_their_like():
    fp8 = {peer.library: peer.us[128] for peer in matching_peers(replace(H200, payload="fp8"))}
    assert fp8 == {"FlashInfer 0.7.2": 85.4, "DeepEP v1 low-latency": 104.7}
    quantised = replace(H200, quantize="fp8")
    for settings in (quantised, replace(quantised, combine_by="fp8")):
        found = matching_peers(settings)
        assert {peer.library: peer.us[128] for peer in found} == fp8
    assert matching_peers(replace(H200, quantize="mxfp8")) == []
    pushed = matching_peers(replace(H200, combine_by="push"))
    assert [peer.us[128] for peer in pushed] == [104.3, 127.6]


def test_rows_count_the_bytes_of_the_wire(tmp_path):
    backends = ("onesided", "collective")
    settings = replace(H200, quantize="fp8", combine_by="fp8", backends=backends)
    report = _report(settings, "NVIDIA H200")
    row = 7168 + 4 * 7168 // 128
    peers = matching_peers(settings)
    pairs = [each for each in rows_of(report, peers) if each.phase == "pair" and each.tokens == 128]
    for pair, size in zip(pairs, (row, 14336), strict=True):
        assert pair.moved == 2 * 128 * 7 * size
        assert pair.floor == pytest.approx(pair.moved / 340e3 + 3.96)
    text = io.StringIO()
    print_report(Console(file=text, width=190), report, peers)
    shown = " ".join(text.getvalue().split())
    for piece in (
        "fp8 + scales out, quantised by dispatch, fp8 + scales back (pushed)",
        "A row is 7392 bytes out and 7392 bytes back.",
        "The collective backend runs without these options: bf16 out, bf16 back.",
        "FlashInfer 0.7.2, recorded *",
        "* Their rows come back as bf16, 14336 bytes each",
    ):
        assert piece in shown, piece
    write_json(tmp_path / "all.json", report, peers)
    data = json.loads((tmp_path / "all.json").read_text())
    assert data["wire"]["returned_bytes"] == row
    assert (data["settings"]["combine_by"], data["settings"]["quantize"]) == ("fp8", "fp8")
    assert trtllm_report(report)["benchmark_metadata"]["quant_algo"] == "FP8_BLOCK_SCALES"
    plot(tmp_path / "pair.svg", report, peers)
    svg = (tmp_path / "pair.svg").read_text()
    assert "fp8 + scales back (pushed)" in svg
    assert "(bf16 back)" in svg


@pytest.mark.parametrize(("way", "carrier"), [("pull", "recv"), ("push", "send"), ("fp8", "send")])
def test_halves_stand_between_the_whole_and_the_pair(way, carrier):
    report = _report(replace(H200, tokens=(128,), halves=True, combine_by=way), "NVIDIA H200")
    (found,) = report.measurements
    samples = found.samples | {name: [[4.0]] * 8 for name in HALVES}
    report = replace(report, measurements=[replace(found, samples=samples)])
    rows = {row.phase: row for row in rows_of(report, [])}
    assert tuple(rows) == ("dispatch", "combine", *HALVES, "pair")
    moving = {name for name in HALVES if rows[name].moved}
    assert moving == {"dispatch_send", f"combine_{carrier}"}
    assert rows[f"combine_{carrier}"].moved == rows["combine"].moved
    text = io.StringIO()
    print_report(Console(file=text, width=140), report, [])
    assert "also in halves" in text.getvalue()
    assert "combine_recv" in text.getvalue()


def test_company_is_shown(tmp_path):
    settings = replace(H200, tokens=(128,), num_sms=16, beside="matmul")
    report = _report(settings, "NVIDIA H200")
    times = {
        "pair": [[40.0, 44.0, 90.0]] * 7 + [[50.0]],
        "product": [[1800.0]] * 7 + [[1900.0]],
        "product_limited": [[1700.0]] * 8,
        "product_alone": [[1500.0]] * 8,
    }
    found = replace(report.measurements[0], beside=times, beside_method="beside, by hand")
    report = replace(report, measurements=[found])
    company = rows_of(report, [])[-1].beside
    assert company is not None
    assert (company.pair, company.product) == (50.0, 1900.0)
    assert company.slower == pytest.approx(1900 / 1500)
    assert company.slower_limited == pytest.approx(1900 / 1700)
    text = io.StringIO()
    print_report(Console(file=text, width=160), report, [])
    shown = " ".join(text.getvalue().split())
    for piece in (
        "beside matmul 8192^3",
        "50.0 1.27 1.12",
        "beside, by hand.",
        "it takes 1900 us, alone 1500 us, alone on the SMs left to it 1700 us",
    ):
        assert piece in shown, piece
    write_json(tmp_path / "all.json", report, [])
    data = json.loads((tmp_path / "all.json").read_text())
    assert data["results"][0]["beside_samples_us"] == times
    assert data["rows"][-1]["beside"]["pair"] == 50.0
    plot(tmp_path / "pair.svg", report, [])
    assert "beside matmul 8192³" in (tmp_path / "pair.svg").read_text()
    silent = replace(report, measurements=[replace(found, beside={}, beside_method="no figure")])
    assert rows_of(silent, [])[-1].beside is None
    print_report(Console(file=text, width=160), silent, [])


def test_no_floor_and_no_rivals_without_that_gpu():
    peers = matching_peers(H200)
    cpu = rows_of(_report(H200, ""), peers)
    assert all(row.floor is None and row.rivals == {} for row in cpu)
    other = rows_of(_report(H200, "NVIDIA B200"), peers)
    assert all(row.floor is None for row in other)
    assert pair_floor_us(0, 0, []) is None
    assert pair_floor_us(0, 0, ["NVIDIA H200", "NVIDIA H100"]) is None


@pytest.mark.parametrize(
    "change", [{"ranks": 2}, {"hidden": 4096}, {"top_k": 4}, {"router": "zipf"}, {"dtype": "fp16"}]
)
def test_rivals_need_the_same_sizes(change):
    assert matching_peers(replace(H200, **change)) == []


def test_peer_files(tmp_path):
    assert json.loads(RECORDS.read_text())["date"] == "2026-11-20"
    for text in ("{", "[]", '{"records": [{}]}'):
        (tmp_path / "peers.json").write_text(text)
        with pytest.raises(InvalidArgument, match="is no file of peer records"):
            matching_peers(H200, tmp_path / "peers.json")


def test_table_json_and_picture(tmp_path):
    report = _report(replace(H200, backends=("onesided", "collective")), "NVIDIA H200")
    peers = matching_peers(H200)
    text = io.StringIO()
    print_report(Console(file=text, width=140), report, peers)
    for piece in ("deepseek-v3", "8x NVIDIA H200", "FlashInfer", "104.3", "x floor", "340 GB/s"):
        assert piece in text.getvalue()
    write_json(tmp_path / "deep" / "all.json", report, peers)
    data = json.loads((tmp_path / "deep" / "all.json").read_text())
    assert data["settings"]["hidden"] == 7168
    assert len(data["results"]) == 4
    assert len(data["results"][0]["samples_us"]["pair"]) == 8
    assert data["rows"][2]["us"]["median"] == 38
    plot(tmp_path / "pair.png", report, peers)
    assert (tmp_path / "pair.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidArgument, match="cannot write the picture"):
        plot(tmp_path / "pair.nope", report, peers)
    with pytest.raises(InvalidArgument, match="cannot write"):
        write_json(tmp_path, report, peers)


def test_cold_columns_and_what_became_of_peers(tmp_path):
    report = _report(replace(H200, cold=True, num_sms=24), "NVIDIA H200")
    runs = [
        RivalRun("FlashInfer", "0.8.0", "measured", "by hand", {128: {"pair": [[50.0]] * 8}}),
        RivalRun("DeepEP v1", "", "not installed"),
    ]
    peers = beside(matching_peers(H200), runs, "2026-11-20")
    rows = rows_of(report, peers)
    assert [row.cold for row in rows[3:]] == [36.0, 56.0, 76.0]
    assert rows[5].moved == 2 * 128 * 7 * 7168 * 2
    assert rows[5].rivals == {
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
        assert piece in text.getvalue()
    write_json(tmp_path / "all.json", report, peers, runs)
    data = json.loads((tmp_path / "all.json").read_text())
    assert data["settings"]["num_sms"] == 24
    assert data["results"][1]["cold_samples_us"]["pair"][7][1] == 2 * 38
    assert [run["status"] for run in data["peers"]] == ["measured", "not installed"]
    assert data["rows"][5]["cold"] == 76.0


def test_the_roofline_is_in_the_picture(tmp_path):
    report = _report(replace(H200, tokens=(1, 8, 128), cold=True), "NVIDIA H200")
    plot(tmp_path / "pair.svg", report, matching_peers(H200))
    svg = (tmp_path / "pair.svg").read_text()
    for piece in ("roof: 340 GB/s", "latency: 3.96 µs a pair", "cold L2", "roofline"):
        assert f"<!-- {piece} -->" in svg or f"{piece} -->" in svg
    plot(tmp_path / "cpu.svg", _report(replace(H200, cold=False), ""), [])
    assert "roof:" not in (tmp_path / "cpu.svg").read_text()


def test_trtllm_schema(tmp_path):
    report = _report(H200, "NVIDIA H200")
    found = trtllm_report(report)
    assert set(found) == {"benchmark_metadata", "results"}
    metadata = found["benchmark_metadata"]
    assert metadata["bench"] == "bench_moe_comm"
    assert metadata["profile"] == "deepseek_v3"
    assert metadata["backend"] == "NVLINK_ONE_SIDED"
    assert metadata["experts_per_rank"] == 32
    assert metadata["perfect_router"] is True
    assert "CUPTI" in metadata["warning"]
    first = found["results"][0]
    assert first["local_batch_size"] == 8
    assert first["dispatch_us"] == {f"rank{rank}": 11.0 + rank for rank in range(8)}
    assert first["combine_us"]["rank7"] == 28.0
    write_trtllm_json(tmp_path / "trt.json", report)
    assert json.loads((tmp_path / "trt.json").read_text()) == found
