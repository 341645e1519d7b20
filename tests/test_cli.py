# SPDX-License-Identifier: Apache-2.0
"""Every command runs on CPU ranks and exits with the right code."""

import json
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

import weft
from tests.operators import KINDS
from tests.ranks import run_ranks
from weft.cli import demo, demo_kill, report
from weft.jit.cache import Cache, build_key

SIZES = "--tokens 1,8 --hidden 256 --top-k 4 --experts 16"


@pytest.mark.parametrize(
    ("command", "options", "rows"),
    [
        ("moe", f"{SIZES} --combine-dtype fp8 --quantize mxfp8 --no-pdl --peers", 2),
        ("layer", "--model glm-4.5-air --tokens 3 --routing zipf:1.5 --overlap none", 1),
        ("lowlatency", f"{SIZES} --quantize none --routing uniform", 6),
        ("allreduce", "--hidden 64 --tokens 1,6 --backend twoshot,twoshot_bulk,auto", 6),
    ],
)
def test_bench(weft_command, threads, tmp_path, command, options, rows):
    path, small = tmp_path / "deep" / "out.json", "--device cpu --ranks 2 --iters 2 --quiet"
    files = ["--json", str(path)]
    if command == "moe":
        files += ["--plot", f"{tmp_path}/a.png", "--trace", f"{tmp_path}/trace.json"]
    code, _, err = weft_command("bench", command, *options.split(), *small.split(), *files)
    assert (code, err) == (0, "")
    data = json.loads(path.read_text())
    assert len(data["results" if command == "moe" else "rows"]) == rows
    if command == "moe":
        peers = {run["name"]: run["status"] for run in data["peers"]}
        assert peers["torch all-gather"] == "has no equivalent", "mxfp8"
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((tmp_path / "trace.json").read_text())["metadata"]["tokens_per_rank"] == 8


def test_top_shows_the_rank_that_others_wait_for(weft_command):
    printed: list[tuple[int, str, str]] = []

    def body(group):
        with KINDS["oneshot"].open(group) as op:
            for _ in range(5):
                group.barrier()
                if group.rank == 1:
                    time.sleep(0.02)
                op.round()
            group.barrier()
            if group.rank == 0:
                printed.extend(weft_command("top", option) for option in ("--once", "--json"))
            group.barrier()

    run_ranks(2, "threads", body)
    (code, table, _), (_, counters, _) = printed
    assert code == 0
    assert re.search(r" 0/2 .* all-reduce +5 .* rank 1 ", table), table
    waits = [g["waits"] for p in json.loads(counters)["processes"] for g in p["groups"]]
    assert any("control" in each and len(each) > 1 for each in waits)


def test_a_wrong_exchange_is_not_timed(weft_command, threads, tmp_path):
    combine, target = weft.AllToAll.combine, tmp_path / "all.json"

    def wrong(self, *args, **kwargs):
        out = combine(self, *args, **kwargs)
        out[:1, 0] += self.rank == 1
        return out

    threads.setattr(weft.AllToAll, "combine", wrong)
    small = f"{SIZES} --device cpu --ranks 2 --iters 2 --quiet --json {target}"
    code, out, err = weft_command("bench", "moe", *small.split())
    assert code == 1
    assert "check failed" in err
    assert "1 tokens: rank 1" in " ".join(err.split())
    assert "median" not in out
    assert not target.exists()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("bench moe --model gpt-9", "choose one of deepseek-v3"),
        ("bench lowlatency --quantize int4", "'int4': choose one of none, fp8"),
        ("bench allreduce --ranks 73", "all-reduce of 73 ranks; it supports 1 to 72"),
        ("bench layer --overlap none,later", "'later': choose some of none"),
        ("demo --ranks 3", "runs on 2 or 4 ranks; --ranks is 3"),
        ("demo --ranks 2 --kill 2", "kill is 2"),
    ],
)
def test_an_invalid_option_is_refused(weft_command, command, text):
    code, _, err = weft_command(*command.split(), "--device", "cpu")
    assert code == 2, err
    assert text in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_cache(weft_command, monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    meta = {"name": "dispatch", "kind": "cubin", "arch": "sm_90a", "compiler": "NVRTC 13.0"}
    Cache().fetch(build_key(name="x"), lambda: b"12345", meta)
    code, out, _ = weft_command("cache", "list")
    assert (code, "1 entry, 0.0 KiB" in out) == (0, True)
    code, out, _ = weft_command("cache", "clear")
    assert (code, "removed 1 entry" in out) == (0, True)
    assert Cache().entries() == []


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    root = Path(__file__).parents[1]
    return subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)


def test_the_version_needs_no_torch(weft_command):
    words = f"weft {weft.__version__}, torch {version('torch')}\n"
    result = _python("-X", "importtime", "-m", "weft", "--version")
    assert result.stdout == words
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert not loaded & {"torch", "numpy", "typer", "rich", "weft.cli.commands"}
    assert weft_command("--version", "bench")[:2] == (0, words)


def test_weft_is_imported_without_benchmarks_and_without_triton():
    code = "import sys, weft.gemm; from weft import *; weft.moe.MODELS; print(AllToAll.__name__); "
    unwanted = ("weft.bench", "matplotlib", "triton")
    listed = f"print(sorted(m for m in sys.modules if m.startswith({unwanted})))"
    assert _python("-c", code + listed).stdout == "AllToAll\n[]\n"


def test_doctor(weft_command, monkeypatch):
    code, out, _ = weft_command("doctor", "--json")
    result = json.loads(out)
    names = {finding["name"]: finding["status"] for finding in result["findings"]}
    assert code == (result["status"] == "fail")
    for name in ("python", "torch", "C++ compiler", "CPU ranks", "cache"):
        assert names[name] == "ok", name
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("weft.cli.doctor.launch", lambda *inputs, **options: None)
    _, out, _ = weft_command("doctor")
    assert "no-such-compiler" in out


@pytest.mark.parametrize("kind", ["text", "json"])
def test_the_doctors_report_has_no_private_names(weft_command, monkeypatch, tmp_path, kind):
    home, path = tmp_path / "homes" / "alice", tmp_path / f"report.{kind}"
    home.mkdir(parents=True)
    for name, value in (
        ("HOME", str(home)),
        ("USER", "alice"),
        ("LOGNAME", "alice"),
        ("MASTER_ADDR", "node17.example.org"),
        ("TMPDIR", str(home / "alice_scratch")),
        ("CXX", "/opt/Node17/alice/g++"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.example.org")
    monkeypatch.setattr("weft.cli.doctor.run_checks", list)
    monkeypatch.setattr(report, "query_nvidia_smi", lambda *arguments: None)
    assert weft_command("doctor", "--report", str(path))[:2] == (0, "")
    reported = path.read_text()
    assert "/opt/(host)/(user)/g++" in reported
    assert [word for word in ("alice", "node17") if word in reported.lower()] == []


ASKED = demo.read_questions(demo.CHECKPOINT / "questions.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_demo_ranks_answer_as_one_process(hosts):
    pytest.importorskip("transformers", minversion="5.23")
    verdict = demo.run(2, "cpu", 5, hosts=hosts)
    assert verdict.single_process.texts == [" " + each.answer + "\n" for each in ASKED[:5]]
    assert verdict.texts == verdict.single_process.texts
    assert [len(each.texts) for each in verdict.ranks] == [3, 2]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
def test_demo_survivors_answer_for_the_dead(victim):
    pytest.importorskip("transformers", minversion="5.23")
    outcome = demo_kill.run(4, "cpu", victim, 9)
    assert outcome.ranks[victim] is None
    assert outcome.texts == [" " + each.answer + "\n" for each in ASKED[:9]]
    assert {survivor.dead for survivor in outcome.living} == {(victim,)}


def test_demo_exits_as_the_verdict_says(weft_command, monkeypatch):
    texts = [" " + each.answer for each in ASKED[:3]]
    single = demo.Answers(texts, tokens=10, seconds=2.0)
    ranks = [replace(single, texts=texts[::2]), replace(single, texts=texts[1::2])]
    verdict = demo.DemoResult(ASKED[:3], single, ranks)
    monkeypatch.setattr(demo, "run", lambda ranks, device, hosts: verdict)
    result = demo_kill.SurvivorResult(dict(enumerate(texts)), 9, 4, texts[0][:5], (1,), 0.02, 0.1)
    outcome = demo_kill.KillDemoResult(ASKED[:3], single, [result, None])
    monkeypatch.setattr(demo_kill, "run", lambda ranks, device, victim: outcome)

    def assert_exit(expected: int, word: str, *options: str) -> None:
        code, out, err = weft_command("demo", "--ranks", "2", "--device", "cpu", *options)
        assert (code, err) == (expected, "")
        assert word in out

    assert_exit(0, "3 of 3")
    assert_exit(0, "3 of 3", "--kill", "1")
    verdict = replace(verdict, ranks=[ranks[0], replace(ranks[1], texts=["42 #### 42"])])
    assert_exit(1, "WRONG")
    for bad in (replace(result, dead=(0, 1)), replace(result, texts={0: texts[1]})):
        outcome = replace(outcome, ranks=[bad, None])
        assert_exit(1, "WRONG", "--kill", "1")
