# SPDX-License-Identifier: Apache-2.0
"""From samples to rows, tables, files and pictures, with the code's version and floors."""

import io
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import weft
from tests.bench.test_cases import MOE, ON_8
from weft.bench import machine
from weft.bench.baselines import BaselineRun
from weft.bench.harness import Measurement, Report
from weft.bench.limits import (
    allreduce_floor_us,
    layer_floor_us,
    missing_floor_reason,
    pair_floor_us,
)
from weft.bench.machine import describe_code
from weft.bench.moe import MoECase
from weft.bench.plot import plot
from weft.bench.report import Spread, build_rows, print_report, to_json, write_json
from weft.bench.routing import generate_ids
from weft.errors import InvalidArgument
from weft.jit.source import header_digest

H200 = replace(
    MOE, **ON_8, tokens=(8, 128), hidden=7168, top_k=8, experts=256, routing="perfect",
    model="deepseek-v3",
)  # fmt: skip
BASELINES = [
    BaselineRun(
        "Loom", "0.8", "measured", "by hand", {128: {"pair": [[50.0, 50.0]] * 7 + [[52.0]]}}
    ),
    BaselineRun("DeepEP v1", "", "not installed"),
]


def _report(case: MoECase, gpu: str) -> Report:
    measured = []
    for tokens in case.tokens:
        ids = [generate_ids(case, tokens, rank) for rank in range(case.ranks)]
        samples = {
            phase: [[us + rank + i for i in range(3)] for rank in range(case.ranks)]
            for phase, us in (("dispatch", 10.0), ("combine", 20.0), ("pair", 30.0))
        }
        measured.append(
            Measurement("onesided", tokens, "by hand", samples, case.count_traffic(ids))
        )
    machine: dict[str, Any] = {
        "date": "2026-11-20T12:00:00+00:00",
        "gpus": [gpu] * case.ranks if gpu else [],
    }
    machine |= {"driver": "580", "cuda": "13.0", "torch": "2.11", "cpu": "some CPU", "cpus": 2}
    return Report(case, machine, measured)


def test_spread_is_of_the_slowest_rank():
    spread = Spread.from_samples([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])
    assert (spread.min, spread.median, spread.max) == (3.0, 4.0, 9.0)
    assert spread.p99 == pytest.approx(2 + 0.98 * 7)
    assert Spread.from_samples([[7.0]]) == Spread(7.0, 7.0, 7.0, 7.0)


def test_rows_know_floor_and_other_libraries():
    for gpu in ("", "NVIDIA B200"):
        assert all(row.floor is row.ratio is None for row in build_rows(_report(H200, gpu)))
    rows = build_rows(_report(H200, "NVIDIA H200"), BASELINES)
    phases = [(row.tokens, row.phase) for row in rows[:3]]
    assert phases == [(8, "dispatch"), (8, "combine"), (8, "pair")]
    pair = rows[5]
    moved = 128 * 7 * 7168 * 2  # every token to seven remote ranks
    assert pair.floor is not None
    assert pair.floor == pytest.approx(2 * moved / 340e3 + 3.96)
    assert pair.us.median == 30 + 7 + 1
    assert pair.ratio == pytest.approx(38 / pair.floor)
    assert pair.wire == pytest.approx(2 * moved / 38 / 1e3)
    assert pair.logical == pytest.approx(2 * 128 * 8 * 7168 * 2 / 38 / 1e3)
    assert rows[3].wire == pytest.approx(moved / 18 / 1e3)
    assert rows[3].floor is None
    assert [row.baselines for row in rows] == [{}] * 5 + [{"Loom 0.8": 52.0}]


def test_table_json_and_picture(tmp_path, capsys):
    case = replace(H200, quantize="fp8")
    report = replace(_report(case, "NVIDIA H200"), skipped=["onesided, 9 tokens: too odd"])
    text = io.StringIO()
    print_report(Console(file=text, width=180), report, BASELINES)
    shown = " ".join(text.getvalue().split())
    for piece in (
        *("deepseek-v3", "8x NVIDIA H200", "x floor", "340 GB/s", "Loom 0.8", "52.0"),
        "A row is 7392 bytes out and 14336 bytes back; other libraries' rows come back as bf16.",
        "Skipped: onesided, 9 tokens: too odd",
        "DeepEP v1: not installed.",
    ):
        assert piece in shown, piece
    path = tmp_path / "deep" / "all.json"
    write_json(path, to_json(report, BASELINES))
    data = json.loads(path.read_text())
    assert data["settings"]["hidden"] == 7168
    assert len(data["results"]) == 2
    assert len(data["results"][0]["samples_us"]["pair"]) == 8
    assert data["rows"][2]["us"]["median"] == 38
    assert [run["status"] for run in data["peers"]] == ["measured", "not installed"]
    rows = build_rows(report, BASELINES)
    picture = tmp_path / "pair.svg"
    plot(picture, rows, case.describe(), report.machine)
    assert "Loom 0.8" in picture.read_text()
    with pytest.raises(InvalidArgument, match="cannot write the plot"):
        plot(tmp_path / "pair.nope", rows, case.describe(), report.machine)
    with pytest.raises(InvalidArgument, match="cannot write"):
        write_json(tmp_path, {})
    write_json(Path("-"), {"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_the_commit_is_of_the_checkout_that_holds_the_package(tmp_path, monkeypatch):
    monkeypatch.delenv("WEFT_COMMIT", raising=False)
    monkeypatch.setattr(machine, "INCLUDE_ROOT", tmp_path)

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "file").write_text("one")
    for command in (("init", "-q"), ("add", "file"), ("commit", "-q", "-m", "Begin")):
        git(*command)
    commit = git("rev-parse", "HEAD")
    (tmp_path / "beside").write_text("untracked files change no code")
    expected = {"version": weft.__version__, "commit": commit, "headers": header_digest()}
    assert describe_code() == expected
    (tmp_path / "file").write_text("two")
    assert describe_code()["commit"] == f"{commit}-dirty"
    inside = tmp_path / "lib" / "site-packages"  # of another project's checkout
    inside.mkdir(parents=True)
    monkeypatch.setattr(machine, "INCLUDE_ROOT", inside)
    assert describe_code()["commit"] is None
    monkeypatch.setenv("PATH", "")  # without git
    assert describe_code()["commit"] is None
    monkeypatch.setenv("WEFT_COMMIT", "c0ffee-dirty")
    assert describe_code()["commit"] == "c0ffee-dirty"


RECORDS = Path(__file__).parents[2] / "benchmarks/results"


def test_only_h200s_have_a_floor():
    for name in ("NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3"):
        gpus = ["NVIDIA H200", name]
        assert pair_floor_us(1, 1, gpus) is None
        assert allreduce_floor_us(1, 2, gpus) is None
        assert layer_floor_us(1, 1, gpus) is None
        assert name in str(missing_floor_reason(gpus))
    gpus = ["NVIDIA H200"] * 4
    assert missing_floor_reason(gpus) is None
    assert (missing_floor_reason([]), pair_floor_us(0, 0, [])) == (None, None), "CPU ranks"
    assert pair_floor_us(340_000, 0, gpus) == pytest.approx(3.96 + 1.0)
    assert pair_floor_us(350_000, 0, gpus[:2]) == pytest.approx(3.96 + 1.0)


def _rows(data: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (settings of a run, one of its rows) from any place in a file."""
    if isinstance(data, list):
        for each in data:
            yield from _rows(each)
    elif isinstance(data, dict):
        for row in data.get("rows", ()) if "settings" in data else ():
            yield {**data["settings"], "loads": data.get("loads")}, row
        yield from _rows(data.get("runs", []))


def _floor(settings: dict[str, Any], row: dict[str, Any]) -> tuple[float, float] | None:
    """Return (floor, us) of a row that has a floor."""
    ranks: int = row.get("ranks") or settings.get("ranks") or 0
    gpus, us = ["NVIDIA H200"] * ranks, row.get("us", 0.0)
    median: float = us["median"] if isinstance(us, dict) else us
    floor: float | None
    if "epilogue" in settings:
        payload = row["tokens"] * settings["hidden"] * 2
        floor = allreduce_floor_us(payload, ranks, gpus)
    elif settings.get("loads"):
        load = settings["loads"][str(row["tokens"])]
        floor = layer_floor_us(load["hbm_bytes"], load["wire_bytes"], gpus)
    elif row.get("phase") == "pair" and row.get("moved"):
        floor = pair_floor_us(row["moved"], 0, gpus)
    else:
        return None
    assert floor is not None
    return floor, median


def test_no_recorded_figure_is_below_its_floor():
    seen = [
        (path.name, row["tokens"], *result)
        for path in sorted(RECORDS.glob("*/*.json"))
        for settings, row in _rows(json.loads(path.read_text()))
        if (result := _floor(settings, row)) is not None
    ]
    assert [each for each in seen if each[3] < each[2]] == []
    assert len(seen) > 400
