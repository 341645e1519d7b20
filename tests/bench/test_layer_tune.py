"""`weft tune layer`: what it measures is what "auto" chooses by; run for real on CPU ranks."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

import weft
from weft.bench import run as running
from weft.bench.layer import LayerCase, LayerTrial
from weft.bench.layer_tune import bands_text, print_table, table_of, tune
from weft.bench.report import as_json, print_report
from weft.bench.run import Measurement, Report, run
from weft.errors import InvalidArgument, RankFailed
from weft.moe import OVERLAPS, LayerTable, plan
from weft.moe.table import LayerCurve, LayerSizes

SETTINGS = LayerCase(ranks=2, device="cpu", tokens=(1, 6), dtype="fp8", samples=3, seed=1)
SHELL = ("--device", "cpu", "--ranks", "2", "--quiet", "--iters", "3", "--tokens", "1,6")


def by_hand(settings: LayerCase, gpus: tuple[str, ...] = ()) -> Report:
    """Two ranks' samples in which sharing takes least at 6 tokens, and none at 1."""
    times = {
        ("none", 1): 5.0,
        ("shared_expert", 1): 7.0,
        ("none", 6): 9.0,
        ("shared_expert", 6): 6.0,
    }
    measured = [
        Measurement(
            word,
            tokens,
            "by hand",
            {"call": [[us, us, 99.0], [us - 1, us - 1, 1.0]]},
            {"gemm": "grouped"},
        )
        for (word, tokens), us in times.items()
    ]
    machine = {"date": "2026-01-02T03:04:05", "gpus": list(gpus), "cpus": 2, "cpu": "CPU"}
    machine |= {"torch": "2.0", "driver": "1", "cuda": "13.0"}
    machine["weft"] = {"version": "1.2", "commit": "c0ffee", "headers": "0123456789abcdef"}
    return Report(settings, machine, measured)


def test_a_table_has_the_medians_of_the_slowest_rank():
    found = table_of([by_hand(SETTINGS), by_hand(replace(SETTINGS, mode="low_latency"))])
    us = {"none": (5.0, 9.0), "shared_expert": (7.0, 6.0)}
    assert found.curves == tuple(
        LayerCurve(mode, "grouped", (1, 6), us) for mode in ("throughput", "low_latency")
    )
    assert found.sizes == LayerSizes("", 2, 32, 8, 256, 128, 128, "fp8")
    assert (found.date, found.model) == ("2026-01-02", "deepseek-v3")
    assert found.machine.startswith("CPU ranks on 2 x CPU, torch 2.0")
    assert "headers 0123456789ab" in found.machine
    assert found.method == "by hand, median, slowest rank; routing uniform"
    # Behind by 2 us at 1 token, ahead by 3 at 6: the lines cross at 3.
    assert bands_text(found.curves[0]) == "none from 1, shared from 4"
    text = io.StringIO()
    print_table(Console(file=text, width=200), found, ["mode throughput, 1 tokens: why"])
    for words in ("rows by rank, tiled products", "auto: none from 1", "Refused: mode throughput"):
        assert words in text.getvalue()


def test_gpus_of_several_kinds_make_no_table():
    with pytest.raises(InvalidArgument, match="several kinds take part: H100, H200"):
        table_of([by_hand(SETTINGS, ("H200", "H100"))])
    assert table_of([by_hand(SETTINGS, ("H200", "H200"))]).sizes.gpu == "H200"


def test_what_is_tuned_is_what_a_layer_chooses_by(weft_command, tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    code, out, err = weft_command("tune", "layer", str(path), *SHELL, "--dtype", "fp8")
    assert (code, err) == (0, "")
    found = LayerTable.load(path)
    rank, expert = found.curves
    assert (rank.mode, set(rank.us), rank.tokens) == ("throughput", set(OVERLAPS), (1, 6))
    assert (expert.mode, set(expert.us)) == ("low_latency", {"none", "shared_expert", "gemm_push"})
    assert f"auto: {bands_text(rank)}" in out

    settings = replace(SETTINGS, table=str(path), tokens=(6, 9), overlaps=("none",))
    report = run(settings, quiet=True)
    assert report.problem is None
    small, large = (found.facts["auto"] for found in report.measurements)
    assert small["auto"] in rank.us
    assert small["us"]["throughput"] == pytest.approx(rank.times_at(6))
    assert [small["source"], large["source"]] == ["measured", "rule"]
    shown = io.StringIO()
    print_report(Console(file=shown, width=250), report, [])
    assert f"auto, 6 tokens: {small['auto']} for up to 6 tokens a rank" in shown.getvalue()
    assert "auto, 9 tokens: push by a rule of thumb: the table ends at 6" in shown.getvalue()
    written = json.loads(json.dumps(as_json(report)))
    assert written["results"][1]["facts"]["auto"]["source"] == "rule"

    code, _, err = weft_command("bench", "layer", *SHELL, "--table", str(path))
    assert code == 1
    assert "the layer table is of another layer" in err.replace("\n", " ")


def test_the_mode_that_auto_takes_is_marked():
    report = run(replace(SETTINGS, tokens=(1,)), quiet=True)
    shown = io.StringIO()
    print_report(Console(file=shown, width=250), report, [])
    marked = [line for line in shown.getvalue().splitlines() if line.endswith("auto ")][1:]
    assert len(marked) == 1
    assert " push " in marked[0]


def test_without_a_file_nothing_is_measured(weft_command, monkeypatch):
    monkeypatch.setattr("weft.bench.layer_tune.tune", None)
    code, out, err = weft_command("tune", "layer", *SHELL)
    assert (code, out) == (2, "")
    assert "output" in err.lower()
    code, _, err = weft_command("tune", "layer", f"{__file__}/table.json", *SHELL)
    assert code == 2
    assert "cannot write" in err


def on_threads(monkeypatch):
    """Ranks share this process, and what was patched in it."""
    launch = weft.launch

    def threads(*args, **options):
        return launch(*args, **{**options, "device": "threads"})

    monkeypatch.setattr(running, "launch", threads)


def test_an_exchange_that_the_layer_does_not_have_is_told(monkeypatch):
    def refuse(options):
        raise InvalidArgument("no rows by expert")

    on_threads(monkeypatch)
    monkeypatch.setattr(plan, "_check_low_latency", refuse)
    found = tune(SETTINGS, ("throughput", "low_latency"), quiet=True)
    assert found.problem is None
    assert found.table is not None
    assert [curve.mode for curve in found.table.curves] == ["throughput"]
    assert any("mode low_latency, none, 1, 6 tokens" in text for text in found.refused)
    nothing = tune(SETTINGS, ("low_latency",), quiet=True)
    assert nothing.table is None
    assert "no rows by expert" in (nothing.problem or "")


def test_a_wrong_layer_makes_no_table(monkeypatch):
    on_threads(monkeypatch)
    monkeypatch.setattr(LayerTrial, "compare", lambda *_: "rank 9: wrong")
    found = tune(SETTINGS, ("throughput",), quiet=True)
    assert (found.table, found.problem) == (
        None,
        "mode throughput, none, 1 tokens: rank 9: wrong",
    )


@pytest.mark.parametrize(
    ("changes", "modes", "words"),
    [
        ({}, ("token",), "mode is 'token'; choose one of throughput, low_latency"),
        ({}, (), "modes are none"),
        ({}, ("throughput", "throughput"), "name each once"),
        ({"combine_dtype": "fp8"}, ("throughput",), "combine_dtype is 'fp8'"),
        ({"quantize": "fp8"}, ("throughput",), "quantize is 'fp8'"),
        ({"max_rows": 99}, ("throughput",), "max_rows is 99"),
        (
            {"graph": False, "device": "cuda", "samples": 11},
            ("throughput",),
            "a table is of graphs",
        ),
    ],
)
def test_what_no_table_can_say_is_refused(changes, modes, words):
    with pytest.raises(InvalidArgument, match=words):
        tune(replace(SETTINGS, **changes), modes, quiet=True)


def test_a_bad_table_is_refused_before_anything_starts(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("{}")
    with pytest.raises(InvalidArgument, match="is no layer table"):
        replace(SETTINGS, table=str(path))


def test_a_mode_asked_for_by_name_must_be_there():
    with pytest.raises(RankFailed, match="nothing to overlap"):
        tune(
            replace(SETTINGS, shared=False, overlaps=("shared_expert",)),
            ("throughput",),
            quiet=True,
        )
