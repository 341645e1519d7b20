# SPDX-License-Identifier: Apache-2.0
"""Shares that exceed the available memory are refused on all ranks before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft.errors import InvalidArgument
from weft.heap import host_memory

GIB = 1 << 30
Host = Callable[..., None]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Set the memory, and of control groups the limit, used and reclaimable bytes."""
    proc, tree = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    monkeypatch.setattr(host_memory, "PROC", proc)
    monkeypatch.setattr(host_memory, "CGROUPS", tree)

    def set_up(available=64 * GIB, *, swap=0, own="0::/", groups=None):
        (proc / "self/cgroup").write_text(own + "\n")
        lines = f"MemTotal: 9 kB\nMemAvailable: {available >> 10} kB\nSwapFree: {swap >> 10} kB\n"
        (proc / "meminfo").write_text(lines)
        for path, (limit, used, files) in (groups or {}).items():
            folder = tree / path
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "memory.max").write_text(f"{limit}\n")
            (folder / "memory.current").write_text(f"{used}\n")
            stat = f"anon 7\ninactive_file {files}\nactive_file 0\n"
            (folder / "memory.stat").write_text(stat)

    return set_up


def refusal(group: weft.Group, size: int) -> str:
    try:
        host_memory.check_host_memory(group, size, label="a heap")
    except InvalidArgument as error:
        return str(error)
    return ""


def common_refusal(ranks: Callable[..., Callable[..., list[str]]], size: int) -> str:
    first, second = ranks(2, "threads")(refusal, size)
    assert first == second
    return first


def test_all_ranks_of_the_host_count(ranks, host):
    host(8 * GIB)
    assert common_refusal(ranks, 4 * GIB) == ""
    text = common_refusal(ranks, 4 * GIB + 1)
    assert f"({4 * GIB + 1} bytes) on each of 2 ranks" in text
    assert f"({8 * GIB + 2} bytes) in total" in text
    assert f"rank 0 sees 8.59 GB ({8 * GIB} bytes) available" in text
    host(4 * GIB, swap=4 * GIB, groups={"": ("max", 0, 0)})
    assert (common_refusal(ranks, 4 * GIB), common_refusal(ranks, 4 * GIB + 1) != "") == ("", True)


@pytest.mark.parametrize(
    ("own", "path"),
    [
        ("0::/a/b", "a/b"),
        ("0::/a/b", "a"),  # of the group around it
        ("0::/not/shown/here", ""),  # a container sees its own group at the root
    ],
)
def test_the_tightest_control_group_counts(ranks, host, own, path):
    above = {"": ("max", 0, 0)} if path[-1:] == "b" else {}
    host(own=own, groups={**above, path: (6 * GIB, 3 * GIB, 1 * GIB)})
    # 6 GiB, of which 3 are taken, and 1 of these is pages of files that can go.
    assert common_refusal(ranks, 2 * GIB) == ""
    text = common_refusal(ranks, 2 * GIB + 1)
    assert f"({4 * GIB + 2} bytes) in total for the 2 in the control group of rank 0" in text
    assert f"({4 * GIB} bytes) left" in text
    assert str(host_memory.CGROUPS / path) in text


def test_groups_without_a_limit_and_gpu_ranks_are_unlimited(ranks, host):
    host(own="0::/a", groups={"a": ("max", 3 * GIB, 0)})
    assert common_refusal(ranks, 30 * GIB) == ""
    host(GIB)

    def body(group: weft.Group) -> str:
        group.device = torch.device("cuda", 0)
        return refusal(group, 100 * GIB)

    assert ranks(2, "threads")(body) == ["", ""]


SIZES: dict[str, Any] = {"max_tokens": 8192, "top_k": 8, "num_experts": 64, "hidden": 32768}
LARGE: dict[str, Callable[[weft.Group], object]] = {
    "alltoall": lambda group: weft.AllToAll(group, **{**SIZES, "max_tokens": 1 << 20}),
    "lowlatency": lambda group: weft.LowLatencyAllToAll(group, **SIZES),
    # The share would fit; what its dispatches return would not.
    "results": lambda group: weft.LowLatencyAllToAll(
        group, **{**SIZES, "max_tokens": 512, "num_experts": 256, "hidden": 16384}
    ),
    "allreduce": lambda group: weft.AllReduce(group, max_tokens=1 << 19, hidden=32768),
    "heap": lambda group: weft.Heap.create(group, 60_000_000_000),
}


@pytest.mark.parametrize("kind", LARGE)
def test_oversized_heaps_are_refused_at_creation(ranks, host, kind):
    host(5 * GIB)

    def build(group: weft.Group) -> str:
        with pytest.raises(InvalidArgument) as caught:
            LARGE[kind](group)
        group.barrier()  # it is unharmed
        return str(caught.value)

    first, second = ranks(2, "threads")(build)
    assert first == second
    assert f"({5 * GIB} bytes) available" in first
