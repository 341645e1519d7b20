# SPDX-License-Identifier: Apache-2.0
"""The command line on CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import weft
from weft.bench import harness
from weft.bench.machine import describe_code
from weft.errors import RankFailed

SIZES = "--tokens 1,8 --hidden 256 --top-k 4 --experts 16"
SMALL = ["bench", "moe", "--device", "cpu", "--quiet", *SIZES.split()]


def test_bench_moe_with_every_option(weft_command, threads, tmp_path):
    full, picture, timeline = (tmp_path / "deep" / name for name in ("a.json", "a.png", "t.json"))
    code, out, err = weft_command(
        *SMALL,
        *("--ranks", "2", "--iters", "4", "--no-pdl"),
        *("--combine-dtype", "fp8", "--quantize", "mxfp8", "--peers"),
        *("--json", str(full), "--plot", str(picture), "--trace", str(timeline)),
    )
    assert (code, err) == (0, "")
    wire = "mxfp8 + scales out, quantized by dispatch, fp8 + scales back (pushed)"
    shown = " ".join(out.split())
    for text in (wire, "no programmatic launch", "bit by bit", "FlashInfer: not installed."):
        assert text in shown, text
    data = json.loads(full.read_text())
    assert data["operator"] == "moe"
    assert [result["tokens"] for result in data["results"]] == [1, 8]
    assert [result["facts"]["max_tokens"] for result in data["results"]] == [8, 8]
    assert data["machine"]["torch"] == torch.__version__
    assert data["machine"]["weft"] == describe_code(), "of what code these figures are"
    peers = {run["name"]: run["status"] for run in data["peers"]}
    assert peers["FlashInfer"] == "not installed"
    assert peers["torch all-gather"] == "has no equivalent", "mxfp8"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(timeline.read_text())["metadata"]["tokens_per_rank"] == 8


def test_json_alone_on_stdout_and_progress_in_plain_lines(weft_command, threads):
    command = [each for each in SMALL if each != "--quiet"]
    code, out, err = weft_command(*command, "--ranks", "2", "--iters", "2", "--json", "-")
    assert code == 0, err
    assert json.loads(out)["settings"]["ranks"] == 2
    assert err.startswith(
        "weft bench moe: onesided, 1 tokens\nweft bench moe: onesided, 8 tokens\n"
    )
    assert "deepseek-v3: 2 ranks" in err, "the table goes where it disturbs nothing"


@pytest.mark.parametrize(
    ("command", "options", "rows", "words"),
    [
        ("layer", "--model glm-4.5-air --tokens 3 --routing zipf:1.5 --overlap none", 1, "glm-4.5"),
        ("lowlatency", f"{SIZES} --quantize none --routing uniform", 6, "bf16 out, expert-major"),
        ("allreduce", "--hidden 64 --tokens 1,6 --backend twoshot,twoshot_bulk,auto", 6, "by bit"),
    ],
)
def test_bench_of_other_operators(weft_command, threads, tmp_path, command, options, rows, words):
    small = "--device cpu --ranks 2 --iters 2 --quiet --json"
    path = tmp_path / "out.json"
    code, out, err = weft_command("bench", command, *options.split(), *small.split(), str(path))
    assert code == 0, err
    assert words in " ".join(out.split())
    assert len(json.loads(path.read_text())["rows"]) == rows


def test_a_wrong_exchange_is_not_timed(weft_command, threads, tmp_path):
    combine, target = weft.AllToAll.combine, tmp_path / "all.json"

    def wrong(self, *args, **kwargs):
        out = combine(self, *args, **kwargs)
        out[:1, 0] += self.rank == 1
        return out

    threads.setattr(weft.AllToAll, "combine", wrong)
    code, out, err = weft_command(*SMALL, "--ranks", "2", "--iters", "2", "--json", str(target))
    assert code == 1
    assert "check failed" in err
    assert "1 tokens: rank 1" in " ".join(err.split())
    assert "median" not in out
    assert not target.exists()


MOE, LOW, REDUCE, LAYER = (["bench", name] for name in ("moe", "lowlatency", "allreduce", "layer"))


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("moe --model gpt-9", "choose one of deepseek-v3"),
        ("moe --device tpu", "'tpu': choose one of auto, cpu, cuda"),
        ("moe --tokens many", "'many' is not a size"),
        ("moe --ranks 99", "ranks is 99"),
        ("moe --ranks -1", "--ranks"),
        ("moe --dtype fp64", "'fp64': choose one of bf16, fp16, fp32"),
        ("moe --plot pair.txt", "its suffix selects the format"),
        ("moe --plot -", "only --json writes to stdout"),
        ("moe --trace -", "only --json writes to stdout"),
        (f"moe --json {__file__}/all.json", "cannot write"),
        ("moe --json /", "cannot write"),
        ("moe --case deepseek-v3", "No such option"),
        ("lowlatency --quantize int4", "'int4': choose one of none, fp8"),
        ("lowlatency --ranks 99", "ranks is 99"),
        ("lowlatency --scale bf16", "'bf16': choose one of"),
        ("allreduce --backend auto,nccl", "'nccl': choose some of oneshot, twoshot"),
        ("allreduce --epilogue fp4", "'fp4': choose one of none, norm"),
        ("allreduce --ranks 73", "all-reduce of 73 ranks; it supports 1 to 72"),
        ("layer --dtype fp4", "'fp4': choose one of bf16, fp8"),
        ("layer --overlap none,later", "'later': choose some of none"),
        ("layer --ranks 99", "ranks is 99"),
        ("layer --combine-dtype mail", "'mail': choose one of"),
        ("layer --gemm tile", "'tile': choose one of auto, grouped"),
        ("moe --plot p.png", "[plot]'"),
        ("moe --device cuda", "finds no GPU"),
    ],
)
def test_refusals_come_before_any_rank(weft_command, monkeypatch, command, text):
    monkeypatch.setattr(harness, "launch", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if command.endswith("png"):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    device = "" if "--device" in command else " --device cpu"
    code, out, err = weft_command("bench", *(command + device).split())
    assert code == 2, err
    assert out == ""
    assert text in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_a_failed_rank_shows_its_traceback(weft_command, monkeypatch):
    def fails(*_args, **_options):
        raise RankFailed("rank 1 of 2 raised ValueError\nTraceback ...") from ValueError("boom")

    monkeypatch.setattr(harness, "launch", fails)
    code, _, err = weft_command(*SMALL, "--ranks", "2")
    assert code == 1
    assert "RankFailed: rank 1 of 2 raised ValueError" in err


def test_cache(weft_command, monkeypatch, tmp_path):
    from weft.jit.cache import Cache, build_key

    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    meta = {"name": "dispatch", "kind": "cubin", "arch": "sm_90a", "compiler": "NVRTC 13.0"}
    Cache().fetch(build_key(name="x"), lambda: b"12345", meta)
    code, out, _ = weft_command("cache", "list")
    assert code == 0
    assert "dispatch" in out
    assert "sm_90a" in out
    assert "1 entry, 0.0 KiB" in out
    _, out, _ = weft_command("cache", "clear")
    assert "removed 1 entry" in out
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
    assert "weft" in loaded
    assert not loaded & {"torch", "numpy", "typer", "rich", "weft.cli.commands"}
    assert weft_command("--version", "bench")[:2] == (0, words)


def test_weft_is_imported_without_benchmarks_and_without_triton():
    code = "import sys, weft.gemm; from weft import *; weft.moe.MODELS; print(AllToAll.__name__); "
    unwanted = ("weft.bench", "matplotlib", "triton")
    listed = f"print(sorted(m for m in sys.modules if m.startswith({unwanted})))"
    assert _python("-c", code + listed).stdout == "AllToAll\n[]\n"
    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'Loom'"):
        _ = weft.Loom  # type: ignore[attr-defined]
    assert set(weft.__all__) <= set(dir(weft))


def test_help_names_options_and_choices(weft_command):
    _, out, _ = weft_command("--help")
    for command in ("bench", "doctor", "demo", "cache"):
        assert command in out
    _, out, _ = weft_command("bench", "moe", "--help")
    for option in ("--routing", "--model", "--payload", "--eager", "mxfp8", "zipf"):
        assert option in out


def test_choices_are_completed():
    from weft.cli.options import choice_option

    one = choice_option(("fp8", "fp16", "bf16"), "{}").autocompletion
    assert one("fp") == ["fp8", "fp16"]
    several = choice_option(("none", "norm"), "{}", several=True).autocompletion
    assert several("none,no") == ["none,none", "none,norm"]
