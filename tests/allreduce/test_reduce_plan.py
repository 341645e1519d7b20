# SPDX-License-Identifier: Apache-2.0
"""Backends, launch plans, and launches of the fused all-reduce with a recording driver."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import weft
from tests.compat.calls import refused
from tests.ranks import on_ranks
from weft.allreduce import kernels as reduce_kernels
from weft.allreduce.choice import choose_backend
from weft.allreduce.config import ReduceArgs, ReduceConfig
from weft.allreduce.kernels import MOE, plan_oneshot, plan_resident, plan_twoshot
from weft.errors import InvalidArgument, TokenOverflow
from weft.runtime import kernels as all_kernels
from weft.runtime.kernels import Build

HIDDEN = 128
RECORDED = Path(__file__).resolve().parents[2] / "benchmarks/results"


def config(ranks: int, hidden: int = 7168, tokens: int = 4096) -> ReduceConfig:
    sizes: dict[str, Any] = {"ranks": ranks, "max_tokens": tokens, "hidden": hidden}
    return ReduceConfig.from_args(**sizes, dtype=torch.bfloat16)


@pytest.mark.parametrize(("ranks", "loss"), [(2, 0.085), (4, 0.018), (8, 0.018)])
def test_the_rule_is_near_the_fastest_of_what_was_measured(ranks, loss):
    (path,) = RECORDED.glob(f"*-{ranks}xH200/allreduce-choices.json")
    measured = json.loads(path.read_text())
    for curve in measured["curves"]:
        sizes, epilogue = config(ranks, curve["hidden"]), curve["epilogue"] != "none"
        for place, tokens in enumerate(curve["tokens"]):
            us = {name: each[place] for name, each in curve["us"].items() if each[place]}
            chosen = choose_backend(sizes, tuple(us), tokens, epilogue=epilogue).backend
            assert us[chosen] <= (1 + loss) * min(us.values()), (curve, tokens)


def test_the_nearest_built_backend_is_selected():
    for built, tokens, expected in (
        (("oneshot", "twoshot_bulk"), 32, "twoshot_bulk"),
        (("twoshot", "twoshot_bulk"), 1, "twoshot"),
        (("oneshot", "twoshot"), 2048, "twoshot"),
    ):
        assert choose_backend(config(8), built, tokens, epilogue=True).backend == expected


@on_ranks(2, "threads")
def test_an_all_reduce_explains_its_choice(group):
    """One shot has no slots for some rows; storing them would overwrite other slots."""
    rows = torch.ones((550, HIDDEN), dtype=torch.bfloat16)
    sizes: dict[str, Any] = {"max_tokens": 550, "hidden": HIDDEN}
    slots, alone = "550 tokens", "add 'twoshot' to backends, or use torch.distributed"
    with weft.AllReduce(group, **sizes, backends=("oneshot",)) as reduce:
        assert reduce.config.direct == 512
        assert reduce.explain(512).backend == "oneshot"
        for call in (lambda: reduce.fused(rows), lambda: reduce.explain(550)):
            refused(InvalidArgument, call, slots, alone)
        refused(TokenOverflow, lambda: reduce.explain(551), "551 tokens in one call")
        assert torch.equal(reduce.fused(rows[:512]).out, rows[:512] * 2)  # type: ignore[arg-type]
        reduce.check()
    with weft.AllReduce(group, **sizes, backends=("oneshot", "twoshot_bulk")) as reduce:
        assert [reduce.explain(n).backend for n in (512, 513)] == ["oneshot", "twoshot_bulk"]
        text = "550 tokens exceed the 512 slots of backend 'oneshot': use 'auto' or 'twoshot_bulk'"
        refused(InvalidArgument, lambda: reduce.fused(rows, backend="oneshot"), text)
        assert torch.equal(reduce.fused(rows).out, rows * 2)  # type: ignore[arg-type]
    with weft.AllReduce(group, **sizes, backends=("twoshot",)) as reduce:
        assert reduce.explain(1).text == "twoshot is the only backend that supports 1 tokens"


SMS = 132
VECTORS = st.sampled_from([1, 16, 31, 33, 360, 512, 640, 896, 1024, 1792, 4096])
RANKS = st.sampled_from([2, 3, 8, 33, 34, 65, 66, 72])


def resident(threads: int, cluster: int) -> int:
    """Return how many CTAs with 104 registers an H200 holds."""
    return SMS * min(2048 // threads, 65536 // (threads * 104)) // cluster * cluster


@settings(max_examples=500)
@given(vectors=VECTORS, tokens=st.integers(1, 128), ranks=RANKS)
def test_one_shot_has_a_thread_for_every_vector_and_every_peer(vectors, tokens, ranks):
    p = plan_oneshot(tokens, vectors, ranks, sms=SMS, max_resident_ctas=resident)
    assert p.ctas == tokens * p.cluster
    assert p.threads % 32 == 0
    assert ranks - 1 <= p.threads <= 512
    assert 1 <= p.cluster <= 8
    assert vectors <= p.threads * p.cluster
    if ranks <= 32:
        assert p.threads * p.cluster < vectors + 32 * p.cluster + p.threads
        assert p.cluster == 8 or vectors > 32 * p.cluster * (p.threads // 32 - 1)


@settings(max_examples=500)
@given(vectors=VECTORS, tokens=st.integers(1, 2048), ranks=RANKS, pieces=st.integers(1, 2))
def test_twoshot_fits_on_the_gpu_at_once(vectors, tokens, ranks, pieces):
    p = plan_twoshot(tokens, vectors, ranks, pieces=pieces, max_resident_ctas=resident)
    assert vectors <= p.threads * p.cluster * pieces
    assert ranks - 1 <= p.threads <= 512
    assert p.ctas <= resident(p.threads, p.cluster)
    assert p.pushers % p.cluster == p.ctas % p.cluster == 0
    assert p.cluster <= p.pushers <= p.ctas - p.cluster


@settings(max_examples=500)
@given(vectors=VECTORS, tokens=st.integers(67, 512), ranks=RANKS)
@example(vectors=4096, tokens=67, ranks=8)
def test_a_resident_oneshot_fits_on_the_gpu_at_once(vectors, tokens, ranks):
    p = plan_resident(tokens, vectors, ranks, pieces=2, max_resident_ctas=resident)
    assert vectors <= 2 * p.threads * p.cluster
    assert ranks - 1 <= p.threads <= 512
    assert p.ctas % p.cluster == 0
    assert p.cluster <= p.ctas <= min(tokens * p.cluster, resident(p.threads, p.cluster))
    assert p.cluster == (1 if vectors <= 1024 else -(-vectors // 1024))


def test_a_gpu_with_power_of_two_clusters_only():
    def picky(threads: int, cluster: int) -> int:
        return resident(threads, cluster) if cluster in (1, 2, 4, 8) else 0

    assert plan_oneshot(1, 896, 8, sms=SMS, max_resident_ctas=picky).cluster == 8
    for pieces in (1, 2):
        p = plan_twoshot(64, 896, 8, pieces=pieces, max_resident_ctas=picky)
        assert p.cluster == (8 if pieces == 1 else 1)
        assert p.threads * p.cluster * pieces >= 896


def test_a_gpu_without_such_clusters_is_named():
    none: dict[str, Any] = {"max_resident_ctas": lambda threads, cluster: 0}
    with pytest.raises(InvalidArgument, match="a row of 14336 bytes does not fit a cluster"):
        plan_oneshot(1, 896, 8, sms=SMS, **none)
    for plan, tokens, pieces in ((plan_resident, 67, 2), (plan_twoshot, 1, 1)):
        with pytest.raises(InvalidArgument, match="does not fit a cluster of this GPU"):
            plan(tokens, 896, 8, pieces=pieces, **none)


class Module:
    """A loaded module whose kernels fit four CTAs of 512 threads on each of 132 SMs."""

    def __init__(self, image: bytes, *, name: str) -> None:
        pass

    def function(self, name: str) -> str:
        return name

    def get_max_active_clusters(self, name: str, threads: int, cluster: int) -> int:
        return SMS * (2048 // threads) // cluster


class Launcher:
    """Record what is launched."""

    def __init__(self, function: str, struct: object, *, use_pdl: bool, cluster: int) -> None:
        self.what = (function, use_pdl, cluster)

    def __call__(self, args: ReduceArgs, grid: Any, block: int, stream: int) -> None:
        pass


@pytest.fixture(autouse=True)
def _driver(monkeypatch):
    gpu = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: gpu)
    for name, stand_in in (
        *(("Launcher", Launcher), ("CudaModule", Module), ("current_arch", lambda: "sm_90a")),
        *(("compile_cubin", lambda *_, **__: b""), ("current_stream", lambda device: device)),
    ):
        monkeypatch.setattr(all_kernels, name, stand_in)


@pytest.mark.parametrize("end", ["", MOE])
def test_clusters_that_do_not_fit_use_a_resident_grid(monkeypatch, end):
    """With one CTA per SM, a wave holds 66 rows of two CTAs, and a resident grid 132 of one."""
    monkeypatch.setattr(Module, "get_max_active_clusters", lambda *asked: SMS // asked[-1])
    for hidden in (4096, 7168):
        kernels = reduce_kernels.CudaReduceKernels(config(2, hidden, 512), Build())
        for tokens in (1, 2, 16, 17, 66, 67, 128, 132, 133, 512):
            launch: Any = kernels._build_launch("oneshot" + end, tokens)
            kernel, early, cluster = launch.launcher.what
            if hidden == 7168 and tokens > 66:
                assert kernel == "weft_allreduce_oneshot_resident" + end
                assert (early, cluster) == (False, 1)
                assert (launch.grid, launch.threads) == ((min(tokens, SMS), 1, 1), 448)
            else:
                assert kernel == "weft_allreduce_oneshot" + end
                assert launch.grid == (tokens * cluster, 1, 1)
                assert cluster > 1 or hidden == 4096


def test_another_device_is_refused_also_after_a_launch(monkeypatch):
    entries = reduce_kernels.CudaReduceKernels(config(8), Build())
    args = ReduceArgs(x=256, tokens=4)
    entries.run("twoshot", args, 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"cuda:1, but this .* was created on cuda:3"):
            entries.run("twoshot", args, 4)
