"""benchmarks/layer_models.py: case after case on CPU ranks, within its budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from benchmarks import layer_models
from weft.bench.layer import rank_body as right
from weft.bench.layer_trial import LayerTrial
from weft.errors import CreationFailed
from weft.moe import LayerTable

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "layer_models.py"
SMALL = ("--device", "cpu", "--ranks", "2", "--tokens", "2", "5", "--samples", "2")
CASES = ("--cases", "gpt-oss-120b:bf16", "qwen3-30b-a3b:fp8", "gpt-oss-120b:fp8")


def test_cases_are_measured_shown_and_written(tmp_path):
    out, tables = tmp_path / "models.json", tmp_path / "tables"
    found = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, *CASES, "--out", str(out), "--tables", str(tables)],
        capture_output=True,
        text=True,
        check=False,
        cwd=SCRIPT.parents[1],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
    )
    assert found.returncode == 0, found.stderr
    runs = [
        (run["settings"]["model"], run["settings"]["routing"])
        for run in json.loads(out.read_text())
    ]
    models = ["gpt-oss-120b", "qwen3-30b-a3b"]
    assert runs == [(model, routing) for routing in ("uniform", "zipf") for model in models]
    assert "refused: gpt-oss-120b:fp8 zipf: dtype fp8 needs" in found.stdout
    assert found.stdout.count("push") >= 1
    table = LayerTable.load(tables / "qwen3-30b-a3b-fp8-2xcpu.json")
    assert table.curves[0].tokens == (2, 5)
    assert set(table.curves[0].us) == {"none", "push"}, "there is no shared expert"
    assert len(list(tables.iterdir())) == 2


@pytest.fixture
def script(monkeypatch, capsys):
    """`script(*arguments)` -> (exit code, stdout), on threads of this process."""

    def as_threads(*args, **options):
        return weft.launch(*args, **{**options, "device": "threads"})

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(layer_models, "launch", as_threads)
        monkeypatch.setattr(sys, "argv", ["layer_models", *SMALL, *arguments])
        with pytest.raises(SystemExit) as leaving:
            layer_models.main()
        return int(leaving.value.code or 0), capsys.readouterr().out

    return call


def test_what_the_budget_does_not_allow_is_said(script):
    code, out = script(*CASES[:3], "--budget", "-1")
    assert code == 0
    for case in ("gpt-oss-120b bf16 uniform", "qwen3-30b-a3b fp8 zipf"):
        assert f"not run, the budget of -1 s was spent: {case}" in out


def test_a_wrong_layer_fails_the_run_and_the_others_go_on(script, monkeypatch, tmp_path):
    wrong = LayerTrial.compare

    def compare(trial, layer):
        bad = trial.settings.model == "gpt-oss-120b"
        return "rank 9: wrong" if bad else wrong(trial, layer)

    monkeypatch.setattr(LayerTrial, "compare", compare)
    code, out = script(*CASES[:3], "--routings", "uniform", "--tables", str(tmp_path))
    assert code == 1
    assert "FAILED: gpt-oss-120b bf16 uniform: 2 tokens, overlap none: rank 9: wrong" in out
    assert [path.name for path in tmp_path.iterdir()] == ["qwen3-30b-a3b-fp8-2xcpu.json"]


def test_a_layer_that_cannot_be_made_is_told_and_the_others_go_on(script, monkeypatch):
    def rank_body(group, settings, quiet):
        if settings.model == "gpt-oss-120b":
            raise CreationFailed("no memory for it")
        return right(group, settings, quiet)

    monkeypatch.setattr(layer_models, "rank_body", rank_body)
    code, out = script(*CASES[:3], "--routings", "uniform", "--overlaps", "shared")
    assert code == 1
    assert "FAILED: gpt-oss-120b bf16 uniform: no memory for it" in out
    assert "qwen3-30b-a3b fp8 uniform: ok" in out
    assert "none, auto push" in out, "without a shared expert the mode is none"
