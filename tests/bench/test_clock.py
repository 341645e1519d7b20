"""The clock: what is captured, what is timed, and that all ranks make the same number of calls."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.bench import clock
from weft.bench.clock import CALLS, WARM_UP, Calls, measure

SPLIT = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")

DISPATCH_MS, COMBINE_MS, SKEW_MS = 0.010, 0.020, 5.0
SPLIT_MS = (0.004, 0.006, 0.001, 0.019)


class _Gpu:
    """A device whose clock moves only by the two calls, and by skew when the host synchronises."""

    def __init__(self, *, external: bool) -> None:
        self.now, self.skew = 0.0, SKEW_MS
        self.captured: list[Any] | None = None
        self.calls = dict.fromkeys(("dispatch", "combine", *SPLIT), 0)
        self.external = external

    def do(self, action) -> None:
        if self.captured is None:
            action()
        else:
            self.captured.append(action)

    def call(self, name: str, took: float) -> None:
        def action() -> None:
            self.calls[name] += 1
            self.now += took + self.skew
            self.skew = 0.0

        self.do(action)

    def synchronize(self, _=None) -> None:
        self.skew = SKEW_MS

    def install(self, monkeypatch) -> Calls:
        gpu = self

        class Event:
            time: float

            def __init__(self, *, enable_timing, **kind) -> None:
                if kind and not gpu.external:
                    raise TypeError("no keyword 'external'")
                self.kind = kind

            def record(self) -> None:
                assert gpu.captured is None or self.kind, "an inner event in a graph has no time"
                gpu.do(lambda: setattr(self, "time", gpu.now))

            def elapsed_time(self, end: Event) -> float:
                return end.time - self.time

        class CUDAGraph:
            actions: list[Any]

            def replay(self) -> None:
                for action in self.actions:
                    action()

        class Capture:
            def __init__(self, graph, stream, capture_error_mode) -> None:
                assert stream is None
                self.graph = graph

            def __enter__(self) -> None:
                gpu.captured = []

            def __exit__(self, *_) -> None:
                self.graph.actions, gpu.captured = gpu.captured, None

        class Stream:
            def wait_stream(self, _) -> None:
                pass

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_) -> None:
                pass

        for name, value in (
            ("Event", Event),
            ("CUDAGraph", CUDAGraph),
            ("graph", Capture),
            ("Stream", Stream),
            ("stream", lambda stream: stream),
            ("current_stream", Stream),
            ("synchronize", self.synchronize),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        steps = {
            "dispatch": lambda: self.call("dispatch", DISPATCH_MS),
            "combine": lambda: self.call("combine", COMBINE_MS),
        }
        return Calls(steps, "pair")


@pytest.mark.parametrize(
    ("graph", "external", "method"),
    [
        (True, True, "CUDA graph of 50 calls, 11 replays"),
        (True, False, "CUDA graph of 50 calls, 11 replays; split into steps from eager calls"),
        (False, True, "eager, CUDA events, 11 rounds of 50 calls"),
    ],
)
def test_on_cuda(monkeypatch, graph, external, method):
    gpu = _Gpu(external=external)
    calls = gpu.install(monkeypatch)
    group: Any = SimpleNamespace(device=torch.device("cuda"), barrier=lambda: None)
    found = measure(group, calls, samples=11, graph=graph)
    assert found.method == method
    assert found.us["pair"] == pytest.approx([(DISPATCH_MS + COMBINE_MS) * 1e3] * 11)
    assert found.us["dispatch"] == pytest.approx([DISPATCH_MS * 1e3] * 11)
    assert found.us["combine"] == pytest.approx([COMBINE_MS * 1e3] * 11)
    rounds = WARM_UP + CALLS * (1 + 11 + 11)  # one untimed round, pairs, split
    assert gpu.calls == {"dispatch": rounds, "combine": rounds} | dict.fromkeys(SPLIT, 0)
    assert list(found.us) == ["dispatch", "combine", "pair"], "the whole comes last"


@pytest.mark.parametrize(("graph", "external"), [(True, True), (True, False), (False, True)])
def test_split_phases_on_cuda(monkeypatch, graph, external):
    gpu = _Gpu(external=external)
    whole = gpu.install(monkeypatch)
    split_phase = {
        name: lambda name=name, took=took: gpu.call(name, took)
        for name, took in zip(SPLIT, SPLIT_MS, strict=True)
    }
    group: Any = SimpleNamespace(device=torch.device("cuda"), barrier=lambda: None)
    calls = replace(whole, also=split_phase)
    found = measure(group, calls, samples=11, graph=graph)
    assert found.us["pair"] == pytest.approx([(DISPATCH_MS + COMBINE_MS) * 1e3] * 11)
    assert found.us["combine"] == pytest.approx([COMBINE_MS * 1e3] * 11)
    assert tuple(found.us) == ("dispatch", "combine", *SPLIT, "pair")
    for name, took in zip(SPLIT, SPLIT_MS, strict=True):
        assert found.us[name] == pytest.approx([took * 1e3] * 11)
        assert gpu.calls[name] == WARM_UP + CALLS * 11


def test_on_cpu():
    order: list[str] = []
    group: Any = SimpleNamespace(
        device=torch.device("cpu"), barrier=lambda: order.append("barrier")
    )
    steps = {name: lambda name=name: order.append(name) for name in ("dispatch", "combine")}
    calls = Calls(steps, "pair")
    found = measure(group, calls, samples=4, graph=True)
    assert order == ["barrier", "dispatch", "combine"] * (clock.WARM_UP + 4)
    assert [len(us) for us in found.us.values()] == [4, 4, 4]
    parts = zip(found.us["dispatch"], found.us["combine"], strict=True)
    assert found.us["pair"] == pytest.approx([a + b for a, b in parts])
    order.clear()
    split_phase = {name: lambda name=name: order.append(name) for name in SPLIT}
    found = measure(group, replace(calls, also=split_phase), samples=4, graph=True)
    rounds = clock.WARM_UP + 4
    whole = ["barrier", "dispatch", "combine"] * rounds
    assert order == whole + ["barrier", *SPLIT] * rounds
    assert [len(found.us[name]) for name in SPLIT] == [4] * 4


def test_a_call_that_is_not_cut(monkeypatch):
    gpu = _Gpu(external=True)
    gpu.install(monkeypatch)
    call = Calls.of(lambda: gpu.call("dispatch", DISPATCH_MS))
    group: Any = SimpleNamespace(device=torch.device("cuda"), barrier=lambda: None)
    found = measure(group, call, samples=11, graph=True)
    assert found.us == {"call": pytest.approx([DISPATCH_MS * 1e3] * 11)}
    assert gpu.calls["dispatch"] == WARM_UP + CALLS * 12, "nothing is timed a second time"
    found = measure(group, replace(call, graph=False), samples=11, graph=True)
    assert found.method.startswith("eager"), "what waits for the host is not captured"
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"), barrier=lambda: None)
    assert [len(us) for us in measure(on_cpu, call, samples=4, graph=True).us.values()] == [4]
