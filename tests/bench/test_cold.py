"""The cold clock: flush and meeting of the ranks come before each pair, outside of its time."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bench.test_clock import COMBINE_MS, DISPATCH_MS, _Gpu
from tests.bench.test_moe import SETTINGS
from weft.bench import cold
from weft.bench.cold import MIN_SAMPLES, WRITES, ColdClock, flush_buffer
from weft.bench.moe import MoESession

FLUSH_MS = 0.035


def test_on_cuda(monkeypatch):
    gpu = _Gpu(external=True)
    calls = gpu.install(monkeypatch)
    order: list[str] = []

    class Buffer:
        def zero_(self) -> None:
            order.append("write")
            gpu.now += FLUSH_MS

        def numel(self) -> int:
            return 100 << 20

    class Gate:
        def __init__(self, group, **sizes) -> None:
            assert sizes["num_experts"] == group.size
            assert sizes["hidden"] * 2 % 16 == 0, "rows are whole vectors"

        def dispatch(self, x, ids) -> None:
            assert x.shape == (0, 8)
            assert ids.shape == (0, 1)

        def combine(self, *, out) -> None:
            order.append("meet")
            gpu.skew = 0.0  # whatever delay another rank had is over

        def close(self) -> None:
            order.append("close")

    monkeypatch.setattr(cold, "flush_buffer", lambda device: Buffer())
    monkeypatch.setattr(cold, "AllToAll", Gate)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **kind: empty(*size, **kind))
    group: Any = SimpleNamespace(
        device=torch.device("cuda"), size=4, barrier=lambda: order.append("barrier")
    )
    with closing(ColdClock(group)) as clock:
        found = clock.measure(calls, samples=11)
    assert found.method == "cold: 30 eager calls, 100 MiB written before each"
    assert found.us["dispatch"] == pytest.approx([DISPATCH_MS * 1e3] * MIN_SAMPLES)
    assert found.us["combine"] == pytest.approx([COMBINE_MS * 1e3] * MIN_SAMPLES)
    assert found.us["pair"] == pytest.approx([(DISPATCH_MS + COMBINE_MS) * 1e3] * MIN_SAMPLES)
    rounds = MIN_SAMPLES + 1  # the first is not counted
    assert order == ["barrier", *([*["write"] * WRITES, "meet"] * rounds), "close"]
    assert (gpu.calls["dispatch"], gpu.calls["combine"]) == (rounds, rounds)


def test_the_buffer_is_twice_the_l2(monkeypatch):
    sizes = []

    def empty(size, *, dtype, device):
        sizes.append((size, dtype, device))

    properties = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "empty", empty)
    flush_buffer(torch.device("cuda", 3))
    assert sizes == [(100 << 20, torch.uint8, torch.device("cuda", 3))]


def _cold(group, settings):
    with closing(ColdClock(group)) as clock, closing(MoESession(group, settings)) as session:
        with session.trial("onesided", 5) as trial:
            assert trial.check() is None
            found = clock.measure(trial.calls(), samples=31)
            assert trial.compare() is None
        group.barrier()
    return found


def test_on_cpu_ranks(ranks, monkeypatch):
    monkeypatch.setattr(cold, "CPU_BYTES", 1 << 20)
    for found in ranks(2, "threads")(_cold, SETTINGS):
        assert found.method == "cold: 31 calls, 1 MiB written before each"
        assert {name: len(us) for name, us in found.us.items()} == dict.fromkeys(
            ("dispatch", "combine", "pair"), 31
        )
        assert min(found.us["dispatch"] + found.us["combine"]) > 0
        parts = zip(found.us["dispatch"], found.us["combine"], strict=True)
        assert found.us["pair"] == pytest.approx([a + b for a, b in parts], abs=0.01)
