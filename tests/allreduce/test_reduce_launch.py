# SPDX-License-Identifier: Apache-2.0
"""The launches of the GPU entries, with a recording driver: no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.allreduce import kernels as reduce_kernels
from weft.allreduce.config import ReduceArgs, ReduceConfig
from weft.allreduce.kernels import MOE
from weft.errors import InvalidArgument
from weft.runtime import kernels as all_kernels
from weft.runtime.kernels import Build

REDUCTION = ReduceConfig.from_args(ranks=8, max_tokens=4096, hidden=7168, dtype=torch.bfloat16)
STREAM = 0x7F00


class Module:
    """A loaded module whose kernels fit four CTAs of 512 threads on each of 132 SMs."""

    def __init__(self, image: bytes, *, name: str) -> None:
        self.asked = 0

    def function(self, name: str) -> str:
        return name

    def get_max_active_clusters(self, name: str, threads: int, cluster: int) -> int:
        self.asked += 1
        return 132 * (2048 // threads) // cluster


class Launcher:
    """Record launches."""

    made: list[Launcher]

    def __init__(self, function: str, struct: object, *, use_pdl: bool, cluster: int) -> None:
        self.what = (function, use_pdl, cluster)
        Launcher.made.append(self)

    def __call__(self, args: ReduceArgs, grid: Any, block: int, stream: int) -> None:
        self.last = (grid, block, stream, args.pushers)


@pytest.fixture
def entries(monkeypatch):
    Launcher.made = []
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: gpu)
    for name, stand_in in (
        ("Launcher", Launcher),
        ("CudaModule", Module),
        ("current_arch", lambda: "sm_90a"),
        ("compile_cubin", lambda *_, **__: b""),
        ("current_stream", lambda device: STREAM + device),
    ):
        monkeypatch.setattr(all_kernels, name, stand_in)
    return reduce_kernels.CudaReduceKernels(REDUCTION, Build())


@pytest.mark.parametrize("end", ["", MOE])
def test_clusters_that_do_not_fit_use_a_resident_grid(entries, monkeypatch, end):
    """With one CTA per SM, a wave holds 66 rows of two CTAs, and a resident grid 132 of one."""
    monkeypatch.setattr(Module, "get_max_active_clusters", lambda *asked: 132 // asked[-1])
    for hidden in (4096, 7168):
        two = ReduceConfig.from_args(ranks=2, max_tokens=512, hidden=hidden, dtype=torch.bfloat16)
        kernels = reduce_kernels.CudaReduceKernels(two, Build())
        for tokens in (1, 2, 16, 17, 66, 67, 128, 132, 133, 512):
            launch: Any = kernels._build_launch("oneshot" + end, tokens)
            kernel, early, cluster = launch.launcher.what
            if hidden == 7168 and tokens > 66:
                assert kernel == "weft_allreduce_oneshot_resident" + end
                assert (early, cluster) == (False, 1)
                assert (launch.grid, launch.threads) == ((min(tokens, 132), 1, 1), 448)
            else:
                assert kernel == "weft_allreduce_oneshot" + end
                assert launch.grid == (tokens * cluster, 1, 1)
                assert cluster > 1 or hidden == 4096


def test_another_device_is_refused_also_after_a_launch(entries, monkeypatch):
    args = ReduceArgs(x=256, tokens=4)
    entries.run("twoshot", args, 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for _ in range(2):
        with pytest.raises(
            InvalidArgument, match=r"cuda:1, but this all-reduce was created on cuda:3"
        ):
            entries.run("twoshot", args, 4)
