# SPDX-License-Identifier: Apache-2.0
"""The engine benchmarks, from a server to a table, on stand-ins of engines."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tarfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.stand_ins import write_tree
from weft.plugins.settings import FORMS, Settings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.slow


@pytest.fixture
def measure(engine: str, tmp_path: Path) -> Callable[..., tuple[int, str, list[dict[str, Any]]]]:
    """Return `measure("decode", *options, STAND_IN="")` -> (exit status, output, results)."""
    write_tree(tmp_path / "pack")

    def run(*arguments: str, **environment: str) -> tuple[int, str, list[dict[str, Any]]]:
        places = {"PACK": "pack", "PACK_SITE": "pack", "OUT": "out", "PACK_HOME": "home"}
        set_ = {name: str(tmp_path / place) for name, place in places.items()}
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        ended = subprocess.run(
            [str(BENCHMARKS / engine / "run.sh"), *arguments],
            env=kept | set_ | {"PYTHON": sys.executable, **environment},
            capture_output=True, text=True, timeout=1200, check=False,
        )  # fmt: skip
        results = tmp_path / "out" / "results.jsonl"
        lines = results.read_text().splitlines() if results.exists() else []
        return ended.returncode, ended.stdout + ended.stderr, [json.loads(one) for one in lines]

    return run


@pytest.fixture
def script(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[str], types.ModuleType]]:
    """Return `script("report")`, which imports a script as its folder's modules do."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("PACK_SITE", str(tmp_path))
    for place in (engine, f"{engine}/plugins", f"{engine}/pack", "engines"):
        monkeypatch.syspath_prepend(str(BENCHMARKS / place))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_commands_and_variants(engine, script):
    """Each command is an importable script; each variant's settings are valid for the plug-in."""
    text = (
        (BENCHMARKS / engine / "run.sh").read_text().partition("scripts=(")[2].partition(")\n")[0]
    )
    names = {word.split("]=")[1] for word in text.split() if "]=" in word}
    assert len(names) >= 3
    for name in names:
        assert callable(script(name.removesuffix(".py")).main)
    prefix = engine.upper()
    known = {f"WEFT_{prefix}_{field.name.upper()}" for field in dataclasses.fields(Settings)}
    for group in vars(script("variants")).values():
        for variant in group.values() if isinstance(group, dict) else ():
            if hasattr(variant, "environment"):
                assert set(variant.environment) <= known | {FORMS[prefix][0]}, variant
                Settings.read(prefix, variant.environment)


KERNELS = "fused_moe_kernel 50, ncclDevKernel_AllGather 30"
TINY, V_SIZES = "--model tiny --gpus 2", "--model tiny --input 16 --output 24"
DECODE = f"decode {TINY} --requests 4 8 --input 16 --output 8 --waves 2 --variants stock weft"
# Engine, command, variants and sizes of the results, words of the table, and of the output, if the
# command fails.
RUNS: list[tuple[str, str, tuple[str, ...], tuple[int, ...], tuple[str, ...], str]] = [
    ("sglang", DECODE, ("stock", "weft"), (4, 8),
     ("decode: tiny, 16 tokens in, 8 out; ",
      "| 4 | stock | 8.00 | 24.00 | 4.00 | 80 | 125 | 1.00 |",
      "| 8 | weft | 8.00 | 24.00 | 4.00 | 80 | 125 | 2.00 |"), ""),
    ("sglang", f"glm {TINY} --batches 1 16 --variants nccl flashinfer weft",
     ("nccl", "flashinfer", "weft"), (1, 16),
     ("| nccl | 4.00 | 64.00 | 1000.00 | 1000.00 |", "| weft | 2.00 | 32.00 | 1000.00 | 1000.00 |"),
     ""),
    ("sglang", f"profile {TINY} --requests 2 --variants stock weft", ("stock", "weft"), (2,),
     (KERNELS,), ""),
    ("sglang", "arithmetic --gpus 2 --ranks 1 2 --questions 20 --variants stock weft",
     ("stock", "weft"), (1, 2), ("| weft | 2 | 95.0 % | 95.0 % | 20 |",), ""),
    ("vllm", f"decode {V_SIZES} --waves 2 --requests 4 8", ("stock", "block"), (4, 8),
     ("decode: tiny, 16 tokens in, 24 out; ", "| 8 | block |"), ""),
    ("vllm", f"profile {V_SIZES} --requests 4 --steps 3", ("stock", "block"), (4,), (KERNELS,), ""),
    ("vllm", "arithmetic --ranks 1 2 --questions 20", ("stock", "block", "exchange"), (1, 2),
     ("| exchange | 2 | 95.0 % | 95.0 % | 20 |",), "FAILED exchange-1: 19 of 20 answers are right"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "command", "variants", "sizes", "table", "failed"),
    RUNS, ids=[f"{engine}-{command.split()[0]}" for engine, command, *_ in RUNS],
)  # fmt: skip
def test_a_run_becomes_a_table(
    measure, script, engine, command, variants, sizes, table, failed, tmp_path
):
    what, *options = command.split()
    code, out, lines = measure(what, *options)
    assert (code, failed in out) == (bool(failed), True), out
    names = ("requests", "batch", "gpus")
    result = [(one["variant"], next(one[name] for name in names if name in one)) for one in lines]
    assert sorted(result) == sorted((variant, size) for variant in variants for size in sizes)
    assert set(lines[0]["machine"]) >= {"weft", "gpus", "driver", "torch"}
    with tarfile.open(tmp_path / "out" / f"{engine}-{what}.tar.gz") as archive:
        assert "./results.jsonl" in archive.getnames()
    text = script("report").report(lines)
    assert [words for words in table if words not in text] == []
    for one in lines:
        assert bool(one["environment"]) == (one["variant"] in ("weft", "block", "exchange"))
    if (engine, what) == ("sglang", "profile"):
        pytest.importorskip("matplotlib")
        kinds = {"experts": 50.0, "NCCL and other sums": 30.0, "dense GEMMs": 20.0, "other": 0.0}
        assert script("profile_picture").by_kind(lines[0]["result"]) == kinds


BLOCK = f"decode {V_SIZES} --waves 1 --requests 4 --variants block"


@pytest.mark.parametrize(
    ("engine", "command", "how", "results", "text"),
    [
        ("sglang", f"decode {TINY} --variants weft", "forgets", 0,
         "FAILED weft: its log does not contain ' ranks, form '"),
        ("vllm", BLOCK, "forgets", 0, "does not contain 'MoE layers of vLLM on'"),
        ("vllm", BLOCK, "stops", 1, "FAILED block-4: 3 of 4 requests"),
    ],
)  # fmt: skip
def test_an_engine_that_is_not_what_was_asked_for_fails_the_command(
    measure, engine, command, how, results, text
):
    code, out, lines = measure(*command.split(), STAND_IN=how)
    assert (code, len(lines)) == (1, results), out
    assert text in out
    assert "Traceback" not in out


@pytest.mark.parametrize("engine", ["sglang"])
def test_the_newest_line_of_a_case_counts(script, tmp_path):
    report = script("report")
    line = {"bench": "decode", "variant": "stock", "model": "tiny", "gpus": 2, "requests": 4}
    line |= {"machine": {"gpus": []}, "result": {}}
    file = tmp_path / "results.jsonl"
    dates = ("2026-11-23T10", "2026-11-23T12", "2026-11-23T11")
    file.write_text("".join(json.dumps({**line, "date": date}) + "\n" for date in dates))
    assert [each["date"] for each in report.read([file])] == ["2026-11-23T12"]
    file.write_text("{}\n")
    with pytest.raises(SystemExit, match="results.jsonl:1 is not a result"):
        report.read([file])
