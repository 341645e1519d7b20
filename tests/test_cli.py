# SPDX-License-Identifier: Apache-2.0
"""The command line on CPU ranks."""

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


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("moe --model gpt-9", "choose one of deepseek-v3"),
        ("moe --device tpu", "'tpu': choose one of auto, cpu, cuda"),
        ("moe --ranks 99", "ranks is 99"),
        ("moe --plot pair.txt", "its suffix selects the format"),
        ("moe --trace -", "only --json writes to stdout"),
        (f"moe --json {__file__}/all.json", "cannot write"),
        ("lowlatency --quantize int4", "'int4': choose one of none, fp8"),
        ("allreduce --backend auto,nccl", "'nccl': choose some of oneshot, twoshot"),
        ("allreduce --ranks 73", "all-reduce of 73 ranks; it supports 1 to 72"),
        ("layer --overlap none,later", "'later': choose some of none"),
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
