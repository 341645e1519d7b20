"""`weft bench moe` from options to files: cold columns, cases, peers, kernel options."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench.test_cases import SETTINGS
from weft import cli
from weft.bench import cold, session
from weft.bench.cases import CASES, plans_of
from weft.bench.machine import describe_code
from weft.bench.moe import Report
from weft.bench.session import Outputs, run_cases
from weft.errors import InvalidArgument

SMALL = ["--device", "cpu", "--quiet", "--ranks", "2", "--iters", "2", "--tokens", "3"]
SIZES = ["--hidden", "256", "--top-k", "2", "--experts", "8"]


@pytest.fixture
def bench(monkeypatch, capsys):
    """`bench(*arguments)` -> (exit code, stdout, stderr) of `weft bench moe`, in this process."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", "bench", "moe", *SMALL, *arguments])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        out, err = capsys.readouterr()
        return int(leaving.value.code or 0), out, err

    return run


def test_cold_figures_and_options_are_written(bench, tmp_path):
    target, picture = tmp_path / "all.json", tmp_path / "pair.svg"
    options = ["--cold", "--no-pdl", "--json", str(target), "--plot", str(picture)]
    code, out, err = bench(*SIZES, *options)
    assert code == 0, err
    for text in ("cold", "no programmatic launch", "written before each"):
        assert text in out
    data = json.loads(target.read_text())
    assert data["settings"]["cold"] is True
    assert data["settings"]["programmatic_launch"] is False
    assert data["settings"]["num_sms"] is None
    (result,) = data["results"]
    for phase in ("dispatch", "combine", "pair"):
        assert [len(rank) for rank in result["cold_samples_us"][phase]] == [30, 30]
    assert result["cold_method"].startswith("cold: 30 calls, 64 MiB")
    assert all(row["cold"] > 0 for row in data["rows"])
    assert data["peers"] == []
    assert "<svg" in picture.read_text()


def test_ways_and_halves_are_written(bench, tmp_path):
    target = tmp_path / "all.json"
    options = ["--combine-by", "fp8", "--quantize", "mxfp8", "--halves", "--json", str(target)]
    code, out, err = bench(*SIZES, *options)
    assert code == 0, err
    title = "mxfp8 + scales out, quantised by dispatch, fp8 + scales back (pushed)"
    for text in (title, "dispatch_send", "also in halves"):
        assert text in " ".join(out.split()), text
    data = json.loads(target.read_text())
    assert data["wire"]["sent_bytes"] == data["wire"]["returned_bytes"] == 264
    (result,) = data["results"]
    for half in ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv"):
        assert [len(rank) for rank in result["samples_us"][half]] == [2, 2]


def test_every_case_writes_files_of_its_own(bench, tmp_path):
    code, out, err = bench("--case", "all", *SIZES, "--json", str(tmp_path / "all.json"))
    assert code == 0, err
    for name in CASES:
        assert f"{name}: 2 ranks" in out
        data = json.loads((tmp_path / f"all-{name}.json").read_text())
        assert data["settings"]["case"] == name
    assert len(list(tmp_path.iterdir())) == len(CASES)


def test_peers_on_cpu_ranks(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    target = tmp_path / "all.json"
    code, out, err = bench(*SIZES, "--peers", "--json", str(target))
    assert code == 0, err
    assert "FlashInfer: not installed." in out
    data = json.loads(target.read_text())
    assert [found["backend"] for found in data["results"]] == ["onesided", "collective"]
    assert {(run["name"], run["status"]) for run in data["peers"]} == {
        ("FlashInfer", "not installed"),
        ("DeepEP v1", "not installed"),
    }
    assert data["machine"]["weft"] == describe_code(), "of what code these figures are"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--num-sms", "8"], "num_sms is 8 on cpu ranks"),
        (["--beside", "matmul"], "CPU ranks have none: leave it out"),
        (["--quantize", "fp8", "--backend", "collective"], "only onesided has it"),
        (["--case", "most"], "choose one of deepseek-v3"),
        (["--recorded", "no-such-file.json"], "no file of peer records"),
    ],
)
def test_refusals(bench, arguments, text):
    code, out, err = bench(*SIZES, *arguments)
    assert code == 1
    assert out == ""
    assert text in " ".join(err.split())


def test_plans():
    taken = ("hidden", "top_k", "experts", "case")
    names = [name for name in SETTINGS.__slots__ if name not in taken]
    common = {name: getattr(SETTINGS, name) for name in names}
    (plan,) = plans_of(None, hidden=None, top_k=None, experts=None, **common)
    assert (plan.case, plan.hidden, plan.experts) == (None, 7168, 256)
    plans = plans_of("all", hidden=None, top_k=1, experts=None, **common)
    assert [(p.case, p.hidden, p.top_k) for p in plans] == [
        (name, sizes.hidden, 1) for name, sizes in CASES.items()
    ]
    with pytest.raises(InvalidArgument, match="case is 'half'"):
        plans_of("half", hidden=None, top_k=None, experts=None, **common)


def test_outputs_of_a_case():
    outputs = Outputs(json=Path("a/all.json"), recorded=Path("r.json")).of_case("kimi-k2")
    assert outputs == Outputs(json=Path("a/all-kimi-k2.json"), recorded=Path("r.json"))


def test_a_wrong_case_ends_the_run(monkeypatch):
    ran = []

    def wrong(settings, *, quiet):
        ran.append(settings.case)
        return Report(settings, {}, [], problem="3 tokens: rank 1: nonsense")

    monkeypatch.setattr(session, "run", wrong)
    plans = [replace(SETTINGS, case=name) for name in CASES]
    console = Console(file=io.StringIO())
    problem = run_cases(console, plans, Outputs(), peers=True, quiet=True)
    assert problem == "deepseek-v3: 3 tokens: rank 1: nonsense"
    assert ran == ["deepseek-v3"]
    assert cold.MIN_SAMPLES == 30
