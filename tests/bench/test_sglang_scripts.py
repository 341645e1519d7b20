# SPDX-License-Identifier: Apache-2.0
"""The scripts that measure inside SGLang, from a server to a table, by a stand-in of SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.stand_in_sglang import write_tree

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "sglang"
pytestmark = pytest.mark.slow


@pytest.fixture
def engine() -> str:
    return "sglang"


TINY = ("--model", "tiny", "--gpus", "2")


def test_a_run_of_decode_becomes_a_table(measure, script, tmp_path):
    sizes = ("--requests", "4", "8", "--input", "16", "--output", "8", "--waves", "2")
    code, said, lines = measure("decode", *TINY, *sizes, "--variants", "stock", "weft")
    assert code == 0, said
    found = [(each["variant"], each["requests"], each["result"]["completed"]) for each in lines]
    assert found == [("stock", 4, 16), ("stock", 8, 32), ("weft", 4, 16), ("weft", 8, 32)]
    assert lines[2]["environment"] == {"WEFT_SGLANG_FORM": "block"}
    assert "--enable-dp-attention" in lines[0]["flags"]
    assert "itls" not in lines[0]["result"]
    assert set(lines[0]["machine"]) >= {"weft", "gpus", "driver", "torch"}
    with tarfile.open(tmp_path / "out" / "sglang-decode.tar.gz") as archive:
        names = archive.getnames()
    assert {"./results.jsonl", "./decode-stock.log", "./decode-weft-4.log"} <= set(names)
    text = script("report").report(lines)
    assert "decode: tiny, 16 tokens in, 8 out; " in text
    assert "| 4 | stock | 8.00 | 24.00 | 4.00 | 80 | 125 | 1.00 |" in text
    assert "| 8 | weft | 8.00 | 24.00 | 4.00 | 80 | 125 | 2.00 |" in text


def test_the_newest_line_of_a_case_counts(script, tmp_path):
    report = script("report")
    line = {"bench": "decode", "variant": "stock", "model": "tiny", "gpus": 2, "requests": 4}
    line |= {"machine": {"gpus": []}, "result": {}}
    file = tmp_path / "results.jsonl"
    dates = ("2026-11-23T10", "2026-11-23T12", "2026-11-23T11")
    file.write_text("".join(json.dumps({**line, "date": date}) + "\n" for date in dates))
    assert [each["date"] for each in report.read([file])] == ["2026-11-23T12"]
    file.write_text("{}\n")
    with pytest.raises(SystemExit, match="results.jsonl:1 is no result"):
        report.read([file])


def test_tensor_parallel_runs_stand_side_by_side(measure, script):
    arguments = ("--batches", "1", "16", "--variants", "nccl", "flashinfer", "weft")
    code, said, lines = measure("glm", *TINY, *arguments)
    assert code == 0, said
    assert [each["batch"] for each in lines] == [1, 16] * 3
    assert "--flashinfer-allreduce-fusion-backend" in lines[2]["flags"]
    assert lines[4]["environment"] == {"WEFT_SGLANG_ALLREDUCE": "1"}
    text = script("report").report(lines)
    assert "| nccl | 4.00 | 64.00 | 1000.00 | 1000.00 |" in text
    assert "| weft | 2.00 | 32.00 | 1000.00 | 1000.00 |" in text


@pytest.mark.parametrize(
    ("how", "variant", "text"),
    [
        ("falls back", "flashinfer", "does not say 'FlashInfer AllReduce Fusion enabled'"),
        ("loses a rank", "stock", "stock: 1 of 2 batches"),
    ],
)
def test_a_sum_that_was_not_made_fails_the_command(measure, how, variant, text):
    arguments = ("--batches", "1", "16", "--variants", variant)
    code, said, lines = measure("glm", *TINY, *arguments, STAND_IN=how)
    assert code == 1
    assert text in said
    assert len(lines) == (how == "loses a rank")


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
    command = [sys.executable, str(FOLDER / "one_batch.py"), "--batch-size", "1"]
    environment = {**os.environ, "SGLANG_PLUGINS": "none", **places}
    assert not job_module.run(
        job, "stock", [*command, "--result-filename", "x"], 600.0, env=environment
    )
    assert job.failed == ["stock: late\n"]
    status = Path(f"/proc/{rank.read_text()}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_trace_becomes_a_step_by_kernel_and_a_picture(measure, script, tmp_path):
    pytest.importorskip("matplotlib")
    code, said, lines = measure("profile", *TINY, "--requests", "2", "--variants", "stock", "weft")
    assert code == 0, said
    assert [each["result"]["us"] for each in lines] == [100.0, 100.0]
    assert lines[0]["result"]["kernels"]["fused_moe_kernel"] == 50.0
    picture = script("profile_picture")
    kinds = {"experts": 50.0, "NCCL and other sums": 30.0, "dense GEMMs": 20.0, "other": 0.0}
    assert picture.by_kind(lines[0]["result"]) == kinds
    picture.draw(lines, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 5000
    assert "fused_moe_kernel 50, ncclDevKernel_AllGather 30" in script("report").report(lines)


def test_right_answers_and_equal_texts_are_counted(measure, script):
    options = ("--ranks", "1", "2", "--questions", "20", "--variants", "stock", "weft")
    code, said, lines = measure("arithmetic", "--gpus", "2", *options)
    assert code == 0, said
    found = [(one["variant"], one["gpus"], one["result"]["right"]) for one in lines]
    stock, weft = [("stock", 1, 1.0), ("stock", 2, 1.0)], [("weft", 1, 0.95), ("weft", 2, 0.95)]
    assert sorted(found) == stock + weft
    assert "| weft | 2 | 95.0 % | 95.0 % | 20 |" in script("report").report(lines)


def test_a_server_is_of_two_hosts(measure, tmp_path):
    """Each half is a command of its own, and both end."""
    options = ("--ranks", "2", "--hosts", "2", "--questions", "20", "--variants", "weft")
    code, said, lines = measure("arithmetic", "--gpus", "2", *options)
    assert code == 0, said
    assert "--nnodes 2 --dist-init-addr 127.0.0.1:" in said
    assert [(one["hosts"], one["result"]["questions"]) for one in lines] == [(2, 20)]
    with tarfile.open(tmp_path / "out" / "sglang-arithmetic.tar.gz") as archive:
        assert {"./arithmetic-weft-2.log", "./arithmetic-weft-2-host-1.log"} <= {
            *archive.getnames()
        }


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("eplb",), "eplb-2: its log does not say '[EPLBManager] rebalance end'"),
        (("weft", "--sums"), "weft-2: its log does not say 'tensor-parallel ranks by weft'"),
    ],
)
def test_an_answer_in_another_way_fails_the_command(measure, options, text):
    asked = ("--ranks", "1", "2", "--questions", "20", "--variants", *options)
    code, said, lines = measure("arithmetic", "--gpus", "2", *asked)
    assert code == 1
    assert f"FAILED {text}" in said
    assert [one["gpus"] for one in lines] == ([2] if "eplb" in options else [])


def test_an_adapter_of_attention_is_asked_for(measure, tmp_path):
    options = ("--ranks", "1", "--questions", "20", "--variants", "stock", "--adapter")
    code, said, lines = measure("arithmetic", "--gpus", "1", *options)
    assert code == 0, said
    flags = " ".join(lines[0]["flags"])
    assert "--lora-target-modules q_proj v_proj --lora-backend triton" in flags
    assert lines[0]["result"]["right"] == 0.0  # the stand-in's own answer to an adapter's name
    with tarfile.open(tmp_path / "out" / "sglang-arithmetic.tar.gz") as archive:
        assert "./adapter/adapter_model.safetensors" in archive.getnames()


def test_a_server_is_loaded_and_then_loses_a_rank(measure):
    sizes = ("--gpus", "2", "--loaded", "2", "--clients", "2")
    code, said, lines = measure("load", *sizes, STAND_IN="ranks")
    assert code == 0, said
    loaded, killed = (one["result"] for one in lines)
    assert 0 < loaded["asked"] >= loaded["dropped"]
    assert list(loaded["end"]["ranks"]) == ["sglang::scheduler_DP0", "sglang::scheduler_DP1"]
    assert killed["killed"] == "sglang::scheduler_DP1"
    assert killed["line"] == "PeerDied: rank 1 died"
    assert killed["named_s"] <= killed["gone_s"]


def test_what_ranks_keep_under_load_is_told(script):
    grown = script("under_load").grown
    warm = {"a": {"mib": 100.0, "files": 20}, "b": {"mib": 100.0, "files": 20}}
    assert grown(warm, warm) == []
    later = {"a": {"mib": 200.0, "files": 40}}
    assert grown(warm, later) == [
        "a: 100 MiB, then 200",
        "a: 20 open files, then 40",
        "b is gone",
    ]


@pytest.mark.parametrize(
    ("how", "text"),
    [("dies", "it did not come up"), ("forgets", "its log does not say ' ranks, form '")],
)
def test_a_server_that_is_not_what_was_asked_for_fails_the_command(measure, how, text):
    code, said, lines = measure("decode", *TINY, "--variants", "weft", STAND_IN=how)
    assert (code, lines) == (1, [])
    assert f"FAILED weft: {text}" in said
    assert how != "dies" or "CUDA out of memory" in said


@pytest.mark.parametrize("what", ["profile", "arithmetic"])
def test_a_server_that_breaks_fails_its_measurement_and_no_other(measure, what):
    sizes = TINY if what != "arithmetic" else ("--gpus", "2", "--ranks", "2")
    code, said, lines = measure(what, *sizes, "--variants", "stock", "weft", STAND_IN="breaks")
    assert (code, lines) == (1, [])
    assert said.count(": HTTPError: HTTP Error 500: CUDA error; end of") >= 2
    assert "Traceback" not in said


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
