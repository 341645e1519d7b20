# SPDX-License-Identifier: Apache-2.0
"""Other libraries as baselines: present or not, correct or not, and their adapters.

The adapters run with weft.compat's version of the libraries' calls. On a machine that has the
libraries, each is checked before it is timed.
"""

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.bench.test_cases import MOE, REDUCE
from tests.compat.calls import Backend
from weft import reference
from weft.bench.baselines import (
    ALLREDUCE_BASELINES,
    ALLTOALL_BASELINES,
    AllToAllBaseline,
    Baseline,
    measure_baselines,
    measure_on_rank,
)
from weft.compat.deep_ep import Buffer
from weft.compat.flashinfer import MoeAlltoAll
from weft.errors import DriverError

SIZES = replace(MOE, ranks=2, tokens=(3, 5), hidden=128, top_k=3, experts=4, samples=2)
NAMED = {each.name: each for each in (*ALLTOALL_BASELINES, *ALLREDUCE_BASELINES)}


class _Library(AllToAllBaseline):
    """weft itself as another library; `spoil` is added to the result of rank 1."""

    spoil = 0.0

    def __init__(self, group, case, max_tokens) -> None:
        super().__init__(group, case, max_tokens)
        self.exchange = weft.AllToAll(group, **case.sizes(max_tokens), timeout=30.0)

    def dispatch(self) -> None:
        inputs = self.inputs
        self.received = self.exchange.dispatch(inputs.payloads, inputs.ids, inputs.weights)

    def run_experts(self) -> None:
        answers = reference.identity_experts(self.received, self.case.out_dtype)
        self.exchange.output().copy_(answers)

    def combine(self):
        out = self.exchange.combine()
        if self.group.rank == 1:
            out[0, 0] += self.spoil
        return out


LOOM = Baseline(
    "Loom", "loom", "loom-python", _Library, lambda case: None, min_tokens=2, max_tokens=4
)


@pytest.fixture
def installed(threads):
    threads.setattr(
        importlib.util, "find_spec", lambda module: None if module == "absent" else True
    )
    threads.setattr(importlib.metadata, "version", lambda name: "2.1")
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        threads.setenv(name, "unset")
    return threads


def test_a_library_is_checked_before_it_is_timed(installed):
    (result,) = measure_baselines(SIZES, [LOOM])
    assert (result.library, result.status) == ("Loom 2.1", "measured")
    assert list(result.samples_us) == [3], "of its sizes"
    assert [len(rank) for rank in result.samples_us[3]["pair"]] == [2, 2]
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1", "multicast is off"
    for spoil in (1.0, float("nan")):
        installed.setattr(_Library, "spoil", spoil)
        (result,) = measure_baselines(SIZES, [LOOM])
        assert result.status.startswith("check failed, 3 tokens: rank 1: the largest error is")
        assert result.samples_us == {}


def test_unmeasurable_libraries_have_a_status(installed):
    def no_gpu(group, case, most):
        raise DriverError("no such GPU")

    def status(case, **changes):
        (result,) = measure_baselines(case, [replace(LOOM, **changes)])
        return result.status

    assert "no such GPU" in status(SIZES, create=no_gpu)
    assert status(replace(SIZES, tokens=(1, 9))) == "supports none of these sizes"
    ours = replace(SIZES, quantize="fp8", combine_dtype="fp8")
    like_ours = "fp8", None, None  # others are asked for what is like ours
    asks = lambda case: str((case.payload, case.quantize, case.combine_dtype))  # noqa: E731
    assert status(ours, unsupported_reason=asks) == str(like_ours)
    assert status(SIZES, module="absent") == "not installed"
    assert status(replace(SIZES, quantize="mxfp8")) == "has no equivalent"


ONE, TWO, GPU = "FlashInfer trtllm one-shot", "FlashInfer trtllm two-shot", {"device": "cuda"}
UNSUPPORTED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("FlashInfer", SIZES, {}, "needs GPUs"),
    ("FlashInfer", SIZES, GPU, ""),
    ("FlashInfer", SIZES, {**GPU, "dtype": "fp32"}, "16 bits"),
    ("DeepEP v1", SIZES, {}, "needs GPUs"),
    ("DeepEP v1", SIZES, GPU, ""),
    ("DeepEP v1", SIZES, {**GPU, "dtype": "fp16"}, "bf16"),
    ("DeepEP v1", SIZES, {**GPU, "experts": 5}, "5 on 2"),
    (ONE, REDUCE, {}, "needs GPUs"),
    (ONE, REDUCE, GPU, ""),
    (ONE, REDUCE, {**GPU, "ranks": 3}, "supports 2, 4, 8 ranks, not 3"),
    (ONE, REDUCE, {"epilogue": "fp8-token"}, "is not compared with epilogue fp8-token"),
    ("torch all_reduce", REDUCE, {}, ""),
    ("torch symm_mem one-shot", REDUCE, {**GPU, "ranks": 3}, ""),
]


def test_baselines_refuse_unsupported_cases():
    for name, case, changes, text in UNSUPPORTED:
        reason = NAMED[name].unsupported_reason(replace(case, samples=11, **changes))
        assert (reason is None, text in (reason or "")) == (not text, True), (name, changes)
    assert NAMED["DeepEP v1"].supported_sizes(replace(SIZES, tokens=(8, 1024))) == [8]
    sizes = replace(REDUCE, tokens=(1, 8, 512, 1024))
    assert NAMED[ONE].supported_sizes(sizes) == [1, 8, 512]
    assert NAMED[TWO].supported_sizes(sizes) == [512, 1024], "more than ranks"


def torch_baselines(group: weft.Group) -> list[dict[str, Any]]:
    gathers = [(replace(SIZES, payload=payload), "torch all-gather") for payload in ("bf16", "fp8")]
    sums = [(replace(REDUCE, epilogue=each), "torch all_reduce") for each in ("none", "norm")]
    return [measure_on_rank(group, case, NAMED[name]) for case, name in (*gathers, *sums)]


@pytest.mark.slow
def test_torchs_own_collectives_are_measured(ranks):
    for result in ranks(2, "cpu")(torch_baselines):
        assert [each["status"] for each in result] == ["measured"] * 4
        assert [list(each["samples_us"]) for each in result] == [[3, 5], [3, 5], [1, 5], [1, 5]]


@pytest.fixture
def stand_ins(monkeypatch):
    """Install the calls of both libraries from weft.compat, for ranks that are threads."""

    def mapping(**kwargs: int) -> SimpleNamespace:
        return SimpleNamespace(**kwargs, moe_ep_rank=kwargs["rank"])

    comm: dict[str, dict[str, Any]] = {
        "mnnvl": {"TorchDistBackend": Backend, "MnnvlConfig": SimpleNamespace},
        "mapping": {"Mapping": mapping},
        "trtllm_moe_alltoall": {"MoeAlltoAll": MoeAlltoAll},
    }
    for name, content in comm.items():
        module = ModuleType(f"flashinfer.comm.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("flashinfer", "flashinfer.comm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    deep_ep = ModuleType("deep_ep")
    vars(deep_ep)["Buffer"] = Buffer
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep)
    monkeypatch.setattr(weft.Group, "process_group", lambda group: group)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "1024")
    return monkeypatch


@pytest.mark.parametrize("payload", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["FlashInfer", "DeepEP v1"])
def test_adapters(ranks, stand_ins, name, payload):
    settings = replace(SIZES, payload=payload)
    first, second = ranks(2, "threads")(measure_on_rank, settings, NAMED[name])
    assert first == second
    assert first["status"] == "measured"
    assert list(first["samples_us"]) == [3, 5]
