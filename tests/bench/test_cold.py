"""The cold clock: flush and meeting of the ranks come before each pair, outside of its time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bench.test_cases import SETTINGS
from tests.bench.test_clock import COMBINE_MS, DISPATCH_MS, _Gpu
from weft.bench import cold
from weft.bench.clock import PHASES
from weft.bench.cold import MIN_SAMPLES, WRITES, ColdClock, flush_buffer
from weft.bench.trial import Trial, make_exchange

FLUSH_MS = 0.035


def test_on_cuda(monkeypatch):
    gpu = _Gpu(external=True)
    phases = gpu.install(monkeypatch)
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
    with ColdClock(group) as clock:
        found = clock.measure(phases, samples=11)
    assert found.method == "cold: 30 eager calls, 100 MiB written before each"
    assert found.dispatch == pytest.approx([DISPATCH_MS * 1e3] * MIN_SAMPLES)
    assert found.combine == pytest.approx([COMBINE_MS * 1e3] * MIN_SAMPLES)
    assert found.pair == pytest.approx([(DISPATCH_MS + COMBINE_MS) * 1e3] * MIN_SAMPLES)
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
    with ColdClock(group) as clock:
        exchange = make_exchange(group, settings, "onesided", 5)
        trial = Trial(group, settings, exchange, 5)
        assert trial.check() is None
        found = clock.measure(trial.phases(), samples=31)
        assert trial.check_out() is None
        exchange.close()
    return found


def test_on_cpu_ranks(ranks, monkeypatch):
    monkeypatch.setattr(cold, "CPU_BYTES", 1 << 20)
    for found in ranks(2, "threads")(_cold, SETTINGS):
        assert found.method == "cold: 31 calls, 1 MiB written before each"
        assert [len(getattr(found, phase)) for phase in PHASES] == [31] * 3
        assert min(found.dispatch + found.combine) > 0
        parts = zip(found.dispatch, found.combine, strict=True)
        assert found.pair == pytest.approx([a + b for a, b in parts], abs=0.01)
