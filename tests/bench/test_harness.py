# SPDX-License-Identifier: Apache-2.0
"""The harness: captures, timings, and the display of a row that differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.bench.harness import CALLS, WARM_UP, TimedCall, describe_first_difference, measure, poison
from weft.cli.bench import parse_sizes
from weft.errors import InvalidArgument

DISPATCH_MS, COMBINE_MS, SKEW_MS = 0.010, 0.020, 5.0


class _Gpu:
    """A device whose clock advances only by the two calls, and by skew at a synchronisation."""

    def __init__(self) -> None:
        self.now, self.skew = 0.0, SKEW_MS
        self.captured: list[Any] | None = None
        self.calls = {"dispatch": 0, "combine": 0}

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

    def install(self, monkeypatch) -> TimedCall:
        gpu = self

        class Event:
            time: float

            def __init__(self, *, enable_timing, external=False) -> None:
                self.external = external

            def record(self) -> None:
                assert gpu.captured is None or self.external, "an inner event has no time"
                gpu.do(lambda: setattr(self, "time", gpu.now))

            def elapsed_time(self, end: Event) -> float:
                return end.time - self.time

        class CUDAGraph:
            actions: list[Any]

            def replay(self) -> None:
                for action in self.actions:
                    action()

        @contextlib.contextmanager
        def capture(graph: CUDAGraph, capture_error_mode: str) -> Iterator[None]:
            gpu.captured = []
            yield
            graph.actions, gpu.captured = gpu.captured, None

        def stream() -> Any:
            return SimpleNamespace(wait_stream=lambda _: None)

        parts: dict[str, Any] = {
            **{"Event": Event, "CUDAGraph": CUDAGraph, "graph": capture, "Stream": stream},
            **{"stream": contextlib.nullcontext, "current_stream": stream},
            "synchronize": self.synchronize,
        }
        for name, value in parts.items():
            monkeypatch.setattr(torch.cuda, name, value)
        steps = {
            "dispatch": lambda: self.call("dispatch", DISPATCH_MS),
            "combine": lambda: self.call("combine", COMBINE_MS),
        }
        return TimedCall(steps, "pair")


def alone(device: str, barrier: Callable[[], None] = lambda: None) -> Any:
    """Return a group of one rank, with the parts that measuring needs."""
    gathered = {"all_gather": lambda value: [value]}
    return SimpleNamespace(device=torch.device(device), barrier=barrier, **gathered)


@pytest.mark.parametrize(
    ("graph", "method"),
    [
        (True, "CUDA graph of 50 calls, 11 replays"),
        (False, "eager, CUDA events, 11 rounds of 50 calls"),
    ],
)
def test_on_cuda(monkeypatch, graph, method):
    gpu = _Gpu()
    calls = gpu.install(monkeypatch)
    how, us = measure(alone("cuda"), calls, samples=11, graph=graph)
    assert how == method
    took = {"dispatch": DISPATCH_MS, "combine": COMBINE_MS, "pair": DISPATCH_MS + COMBINE_MS}
    assert us == {name: [pytest.approx([ms * 1e3] * 11)] for name, ms in took.items()}
    rounds = WARM_UP + CALLS * (1 + 11 + 11)  # one untimed round, pairs, split
    assert gpu.calls == {"dispatch": rounds, "combine": rounds}
    assert list(us) == ["dispatch", "combine", "pair"], "the whole comes last"
    call = TimedCall({"call": calls.steps["dispatch"]}, capturable=graph)
    how, us = measure(alone("cuda"), call, samples=11, graph=True)  # a single step is timed once
    assert how.startswith("CUDA graph" if graph else "eager")
    assert us == {"call": [pytest.approx([DISPATCH_MS * 1e3] * 11)]}
    assert gpu.calls["dispatch"] == rounds + WARM_UP + CALLS * 12


def test_on_cpu():
    order: list[str] = []
    group = alone("cpu", lambda: order.append("barrier"))
    steps = {name: lambda name=name: order.append(name) for name in ("dispatch", "combine")}
    _, us = measure(group, TimedCall(steps, "pair"), samples=4, graph=True)
    assert order == ["barrier", "dispatch", "combine"] * (WARM_UP + 4)
    dispatch, combine, pair = (samples for (samples,) in us.values())
    assert [len(each) for each in (dispatch, combine, pair)] == [4, 4, 4]
    assert pair == pytest.approx([a + b for a, b in zip(dispatch, combine, strict=True)])


def test_a_row_that_differs_is_shown_with_both_values():
    want = torch.arange(24, dtype=torch.bfloat16).view(3, 8)
    got = want.t().contiguous().t()  # other strides
    assert describe_first_difference("sum", 1, got, want) is None
    got[2, 5] = 7
    assert describe_first_difference("sum", 1, got, want) == (
        "rank 1: sum of token 2 of 3 is [7.0] in columns [5], but the reference is [21.0]"
    )
    poisoned = want.clone()
    poison(poisoned)
    assert bool(poisoned.isnan().all())
    assert "nan" in str(describe_first_difference("sum", 0, poisoned, want))


def test_parse_sizes():
    assert parse_sizes("1, 8,64") == (1, 8, 64)
    assert parse_sizes("1..4096") == tuple(2**i for i in range(13))
    assert parse_sizes("3..20,4,6") == (3, 6, 12, 4)
    for text in ("", "x", "8..4", "0..4"):
        with pytest.raises(InvalidArgument, match="write"):
            parse_sizes(text)
