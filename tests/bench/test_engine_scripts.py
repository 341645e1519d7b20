# SPDX-License-Identifier: Apache-2.0
"""The scripts that measure inside engines, from a server to a table, on stand-ins of engines."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.conftest import BENCHMARKS
from tests.bench.stand_in_sglang import write_tree
from weft.plugins.settings import FORMS, Settings

ROOT = BENCHMARKS.parent
pytestmark = pytest.mark.slow
SGLANG, VLLM = (pytest.mark.parametrize("engine", [name]) for name in ("sglang", "vllm"))
BOTH = pytest.mark.parametrize("engine", ["sglang", "vllm"])


@BOTH
def test_a_wrong_command_is_refused(measure, engine, tmp_path):
    """Before anything has started."""
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
    """Each command is a script that imports; each variant's settings are some of the plug-in's."""
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
    """A command with tiny sizes. cases: variant and size of each result; table: of the report.

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
    Run("sglang", "arithmetic", f"--gpus 1 --ranks 1 {ASKED} stock --adapter", [("stock", 1)],
        first={"flags": "triton"}, files=("adapter/adapter_model.safetensors",)),
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
    Run("vllm", "arithmetic", "--cpu --ranks 2 --questions 4",
        [("stock", 1), ("block", 2), ("exchange", 2)], code=1),  # held to stock's texts
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
    found = [(one["variant"], next(one[size] for size in sizes if size in one)) for one in lines]
    assert sorted(found) == sorted(case.cases)
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
GLM = f"glm {TINY} --batches 1 16 --variants"


@pytest.mark.parametrize(
    ("engine", "command", "how", "results", "text"),
    [
        ("sglang", DECODE, "dies", 0, "FAILED weft: it did not start"),
        ("sglang", DECODE, "forgets", 0, "FAILED weft: its log does not contain ' ranks, form '"),
        ("sglang", f"{GLM} flashinfer", "falls back", 0, "does not contain 'FlashInfer AllReduce"),
        ("sglang", f"{GLM} stock", "loses a rank", 1, "stock: 1 of 2 batches"),
        ("sglang", f"profile {TINY} --variants stock weft", "breaks", 0, "HTTP Error 500: CUDA"),
        ("sglang", "arithmetic --gpus 2 --ranks 2 --variants stock weft", "breaks", 0,
         "HTTP Error 500: CUDA error; end of"),
        ("sglang", f"arithmetic --gpus 2 --ranks 1 2 {ASKED} eplb", "", 1,
         "FAILED eplb-2: its log does not contain '[EPLBManager] rebalance end'"),
        ("sglang", f"arithmetic --gpus 2 --ranks 1 2 {ASKED} weft --sums", "", 0,
         "FAILED weft-2: its log does not contain 'tensor-parallel ranks by weft'"),
        ("vllm", BLOCK, "dies", 0, "FAILED block: exit status 1\n    | CUDA out of memory"),
        ("vllm", BLOCK, "forgets", 0, "does not contain 'MoE layers of vLLM on'"),
        ("vllm", BLOCK, "stops", 1, "FAILED block-4: 3 of 4 requests"),
        ("vllm", f"profile {V_SIZES} --requests 4 --steps 3 --variants stock", "mixes", 0,
         "has other passes than decode"),
        ("vllm", "arithmetic --variants stock", "dies", 0, "ranks [0] returned no answers"),
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


@SGLANG
def test_a_late_command_ends_with_its_ranks(script, monkeypatch, tmp_path):
    job_module = script("job")
    rank = tmp_path / "rank"
    write_tree(tmp_path / "sgl")
    places = {"PYTHONPATH": f"{tmp_path / 'sgl'}:{ROOT}", "RANK": str(rank), "STAND_IN": "hangs"}
    job = job_module.Job("glm", tmp_path, 2, [], end=time.monotonic() + 1e6)
    waited = subprocess.Popen.wait

    def wait(process: Any, timeout: float | None = None) -> int:
        if timeout == 600.0:  # the command's own time: over as soon as its rank is there
            while not rank.exists() or not rank.read_text():
                assert process.poll() is None
                time.sleep(0.05)
            raise subprocess.TimeoutExpired(process.args, timeout)
        return waited(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    command = [sys.executable, str(BENCHMARKS / "sglang" / "one_batch.py"), "--batch-size", "1"]
    environment = {**os.environ, "SGLANG_PLUGINS": "none", **places}
    assert not job_module.run(
        job, "stock", [*command, "--result-filename", "x"], 600.0, env=environment
    )
    assert job.failed == ["stock: late\n"]
    status = Path(f"/proc/{rank.read_text()}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


@SGLANG
def test_what_ranks_keep_under_load_is_told(script):
    resource_growth = script("under_load").resource_growth
    warm = {"a": {"mib": 100.0, "files": 20}, "b": {"mib": 100.0, "files": 20}}
    assert resource_growth(warm, warm) == []
    later = {"a": {"mib": 200.0, "files": 40}}
    assert resource_growth(warm, later) == [
        "a: 100 MiB, then 200",
        "a: 20 open files, then 40",
        "b has exited",
    ]


class Layer(torch.nn.Module):
    """Experts of a rank, a dense FP8 matrix with its scales, and a norm."""

    experts: Any
    dense: Any
    norm: Any

    def __init__(self, ranks: int, rank: int) -> None:
        super().__init__()
        self.experts = torch.nn.Module()
        self.experts.moe_ep_rank, self.experts.moe_tp_rank = rank, 0
        self.experts.w13_weight = torch.nn.Parameter(torch.empty(8 // ranks, 16, 64))
        self.dense = torch.nn.Module()
        self.dense.tp_rank = rank
        matrix = torch.empty(256, 128).to(torch.float8_e4m3fn)
        self.dense.weight = torch.nn.Parameter(matrix, requires_grad=False)
        self.dense.weight_scale_inv = torch.nn.Parameter(torch.zeros(2, 1))
        self.norm = torch.nn.Module()
        self.norm.weight = torch.nn.Parameter(torch.empty(64))
        self.cache = torch.nn.Module()
        self.cache.k_scale = torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False)


@SGLANG
def test_dummy_weights_show_and_an_expert_is_the_same_on_any_number_of_ranks(script):
    fill = script("fill").fill
    whole, first, second = Layer(1, 0), Layer(2, 0), Layer(2, 1)
    for layer in (whole, first, second):
        fill(layer)
    halves = torch.cat((first.experts.w13_weight, second.experts.w13_weight))
    assert torch.equal(halves, whole.experts.w13_weight)
    assert len({each.sum().item() for each in whole.experts.w13_weight}) == 8
    assert torch.equal(whole.norm.weight, torch.ones(64))
    assert whole.cache.k_scale == -1.0
    dense = whole.dense.weight.float() * whole.dense.weight_scale_inv[0]
    torch.testing.assert_close(dense.std(), torch.tensor(128**-0.5), rtol=0.05, atol=0)
    assert not torch.equal(first.dense.weight.float(), second.dense.weight.float())


@SGLANG
def test_a_table_holds_the_fastest_choice_of_each_size(script):
    tune = script("tune_triton")
    fast, slow = {"BLOCK_SIZE_M": 16}, {"BLOCK_SIZE_M": 64}
    found = [
        {"tokens": tokens, "us": us, "config": config}
        for tokens, us, config in ((8, 2.0, slow), (8, 1.0, fast), (64, 1.0, slow), (64, 3.0, fast))
    ]
    assert tune.best_of(found) == {"8": fast, "64": slow}
    assert tune.file_name("qwen3-30b-a3b", 4, "NVIDIA H200") == (
        "E=32,N=768,device_name=NVIDIA_H200.json"
    )
    blocks = ",dtype=fp8_w8a8,block_shape=[128, 128].json"
    assert tune.file_name("deepseek-v3", 2, "NVIDIA H200") == (
        f"E=128,N=2048,device_name=NVIDIA_H200{blocks}"
    )
    assert all(each["BLOCK_SIZE_K"] == 128 for each in tune.configs([128, 128]))


def container(*entries: tuple[int, int, bytes]) -> bytes:
    """A fat binary of entries: kind, architecture, code."""
    body = b""
    for kind, arch, code in entries:
        body += struct.pack("<HHIQ12xI", kind, 0x101, 32, len(code), arch) + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


@VLLM
def test_other_gpus_code_is_cut_and_no_address_changes(script):
    trim = script("trim_kernels").trim
    own, other, ptx = (2, 90, b"hopper--"), (2, 80, b"ampere--" * 4), (1, 80, b"text----")
    first, second = container(other, own, ptx), container(other, ptx)
    data = bytearray(first + bytes(8) + second)
    assert trim(memoryview(data), 90) == (2, 1)
    kept, left = data[: len(first)], data[len(first) + 8 :]
    assert kept == container(own) + bytes(len(first) - len(container(own)))
    zeros = container((2, 80, bytes(32)))
    assert left == zeros + bytes(len(second) - len(zeros))
    for at, text in ((16 + 4, "no entry at 16 of"), (len(first) - 8 - 32 + 8, "the last entry of")):
        data = bytearray(first)
        data[at] = 24  # bytes of the first entry's header, and of the last one's code
        with pytest.raises(SystemExit, match=text):
            trim(memoryview(data), 90)
    with pytest.raises(SystemExit, match="no fat binary at 0"):
        trim(memoryview(bytearray(b"x" * 64)), 90)
