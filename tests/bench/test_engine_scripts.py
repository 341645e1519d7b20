# SPDX-License-Identifier: Apache-2.0
"""The engine benchmarks, from a server to a table, on stand-ins of engines."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tarfile
from typing import Any

import pytest

from tests.bench.conftest import BENCHMARKS
from weft.plugins.settings import FORMS, Settings

ROOT = BENCHMARKS.parent
pytestmark = pytest.mark.slow
SGLANG, VLLM = (pytest.mark.parametrize("engine", [name]) for name in ("sglang", "vllm"))
BOTH = pytest.mark.parametrize("engine", ["sglang", "vllm"])


@BOTH
def test_a_wrong_command_is_refused(measure, engine, tmp_path):
    """The command is refused before anything has started."""
    code, out, _ = measure("sing")
    assert (code, "run.sh " in out) == (2, True)
    pack = BENCHMARKS / engine / "pack" / f"pack_{engine}.sh"
    usage = subprocess.run(["bash", pack], capture_output=True, text=True, check=False)
    assert (usage.returncode, f"pack_{engine}.sh OUT_DIR " in usage.stderr) == (2, True)
    code, out, _ = measure("decode", "--model", "tiny", "--variants", "stocks")
    assert (code, "no variant stocks; there are stock, " in out) == (1, True)
    code, out, _ = measure("decode", PACK_SITE="", PACK=str(tmp_path))
    assert (code, "run.sh: no " in out) == (2, True)


@BOTH
def test_commands_and_variants(engine, script):
    """Each command is an importable script; each variant's settings are valid for the plug-in."""
    text = (BENCHMARKS / engine / "run.sh").read_text()
    inside = text[text.index("scripts=(") : text.index(")\n", text.index("scripts=("))]
    names = {word.split("]=")[1] for word in inside.split() if "]=" in word}
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
ASKED = "--questions 20 --variants"
TINY = "--model tiny --gpus 2"
V_SIZES = "--model tiny --input 16 --output 24"


@dataclasses.dataclass
class Run:
    """A command with tiny sizes. `cases`: variant and size of each result; `table`: of the report.

    first: of the first result; files: in the archive.
    """

    engine: str
    command: str
    options: str
    cases: list[tuple[Any, ...]]
    table: tuple[str, ...] = ()
    first: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: tuple[str, ...] = ()
    code: int = 0
    how: str = ""
    said: str = ""


def each(variants: tuple[str, ...], *sizes: int) -> list[tuple[Any, ...]]:
    return [(variant, size) for variant in variants for size in sizes]


RUNS = [
    Run("sglang", "decode",
        f"{TINY} --requests 4 8 --input 16 --output 8 --waves 2 --variants stock weft",
        each(("stock", "weft"), 4, 8),
        ("decode: tiny, 16 tokens in, 8 out; ",
         "| 4 | stock | 8.00 | 24.00 | 4.00 | 80 | 125 | 1.00 |",
         "| 8 | weft | 8.00 | 24.00 | 4.00 | 80 | 125 | 2.00 |"),
        {"flags": "--enable-dp-attention", "result": "completed"},
        ("results.jsonl", "decode-stock.log", "decode-weft-4.log")),
    Run("sglang", "glm", f"{TINY} --batches 1 16 --variants nccl flashinfer weft",
        each(("nccl", "flashinfer", "weft"), 1, 16),
        ("| nccl | 4.00 | 64.00 | 1000.00 | 1000.00 |",
         "| weft | 2.00 | 32.00 | 1000.00 | 1000.00 |")),
    Run("sglang", "profile", f"{TINY} --requests 2 --variants stock weft",
        each(("stock", "weft"), 2), (KERNELS,), {"result": "kernels"}),
    Run("sglang", "arithmetic", f"--gpus 2 --ranks 1 2 {ASKED} stock weft",
        each(("stock", "weft"), 1, 2), ("| weft | 2 | 95.0 % | 95.0 % | 20 |",)),
    Run("sglang", "arithmetic", f"--gpus 2 --ranks 2 --hosts 2 {ASKED} weft", [("weft", 2)],
        files=("arithmetic-weft-2.log", "arithmetic-weft-2-host-1.log"),
        said="--nnodes 2 --dist-init-addr 127.0.0.1:"),
    Run("sglang", "load", "--gpus 2 --loaded 2 --clients 2", [("weft", 2)] * 2, how="ranks",
        first={"result": "dropped"}),
    Run("vllm", "decode",
        f"{V_SIZES} --waves 2 --requests 4 8 --more {{\"data_parallel_size\":2}}",
        each(("stock", "block"), 4, 8),
        ("decode: tiny, 16 tokens in, 24 out; ", "| 8 | block |"),
        {"flags": "cudagraph_capture_sizes=[1, 2, 4, 8]"},
        ("decode-stock.log", "decode-block-result.jsonl")),
    Run("vllm", "profile", f"{V_SIZES} --requests 4 --steps 3", each(("stock", "block"), 4),
        (KERNELS,)),
    Run("vllm", "arithmetic", "--ranks 1 2 --questions 20",
        each(("stock", "block", "exchange"), 1, 2),
        ("| exchange | 2 | 95.0 % | 95.0 % | 20 |",), code=1,
        said="FAILED exchange-1: 19 of 20 answers are right"),
    Run("vllm", "load", "--loaded 2 --clients 2", [("block", 1)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "case"), [(run.engine, run) for run in RUNS], ids=lambda x: getattr(x, "command", x)
)
def test_a_run_becomes_a_table(measure, script, engine, case, tmp_path):
    options = {"STAND_IN": case.how} if case.how else {}
    code, out, lines = measure(case.command, *case.options.split(), **options)
    assert code == case.code, out
    assert case.said in out
    sizes = ("requests", "batch", "gpus")
    result = [(one["variant"], next(one[size] for size in sizes if size in one)) for one in lines]
    assert sorted(result) == sorted(case.cases)
    assert set(lines[0]["machine"]) >= {"weft", "gpus", "driver", "torch"}
    for field, content in case.first.items():
        assert content in lines[0][field]
    if case.files:
        with tarfile.open(tmp_path / "out" / f"{engine}-{case.command}.tar.gz") as archive:
            assert {f"./{file}" for file in case.files} <= {*archive.getnames()}
    text = script("report").report(lines)
    assert [words for words in case.table if words not in text] == []
    for one in lines:
        assert bool(one["environment"]) == (one["variant"] in WEFTS)
    if case.command == "load":
        check_load(engine, [one["result"] for one in lines])
    if (engine, case.command) == ("sglang", "profile"):
        pytest.importorskip("matplotlib")
        picture = script("profile_picture")
        kinds = {"experts": 50.0, "NCCL and other sums": 30.0, "dense GEMMs": 20.0, "other": 0.0}
        assert picture.by_kind(lines[0]["result"]) == kinds
        picture.draw(lines, tmp_path / "step.png")
        assert (tmp_path / "step.png").stat().st_size > 5000


WEFTS = ("weft", "block", "exchange")


def check_load(engine: str, results: list[dict[str, Any]]) -> None:
    """Requests come and go; a rank of SGLang that is killed is named before it is gone."""
    loaded = results[0]
    assert 0 < loaded["asked"] >= loaded["dropped"]
    ranks = ["sglang::scheduler_DP0", "sglang::scheduler_DP1"]
    assert list(loaded["end"]["ranks"]) == (ranks if engine == "sglang" else ["VLLM::EngineCore"])
    for killed in results[1:]:
        assert (killed["killed"], killed["line"]) == (ranks[1], "PeerDied: rank 1 died")
        assert killed["named_s"] <= killed["gone_s"]


DECODE = f"decode {TINY} --variants weft"
BLOCK = f"decode {V_SIZES} --waves 1 --requests 4 --variants block"


@pytest.mark.parametrize(
    ("engine", "command", "how", "results", "text"),
    [
        ("sglang", DECODE, "dies", 0, "FAILED weft: it did not start"),
        ("sglang", DECODE, "forgets", 0, "FAILED weft: its log does not contain ' ranks, form '"),
        ("vllm", BLOCK, "dies", 0, "FAILED block: exit status 1\n    | CUDA out of memory"),
        ("vllm", BLOCK, "forgets", 0, "does not contain 'MoE layers of vLLM on'"),
        ("vllm", BLOCK, "stops", 1, "FAILED block-4: 3 of 4 requests"),
    ],
)  # fmt: skip
def test_an_engine_that_is_not_what_was_asked_for_fails_the_command(
    measure, engine, command, how, results, text
):
    code, out, lines = measure(*command.split(), **({"STAND_IN": how} if how else {}))
    assert (code, len(lines)) == (1, results), out
    assert text in out
    assert "Traceback" not in out


@SGLANG
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
