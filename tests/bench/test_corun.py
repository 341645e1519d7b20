"""A matmul during the pairs: what counts, what is refused, on two streams of a made-up clock."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bench.test_moe import SETTINGS
from weft.bench import corun
from weft.bench.clock import CALLS, Calls
from weft.bench.corun import ALONE, ATTEMPTS, measure_corun
from weft.errors import InvalidArgument

SMS, SPARE = 132, 12
PAIR_US, CORUN_PAIR_US = 40.0, 100.0
ALONE_US, LIMITED_US, CORUN_US = 1500.0, 1600.0, 1700.0
ON_GPUS = replace(SETTINGS, device="cuda", samples=11, num_sms=SPARE, corun="matmul:128")


class Stream:
    """Has a time of its own, in us."""

    def __init__(self, priority: int = 0) -> None:
        self.now, self.priority = 0.0, priority

    def wait_stream(self, other: Stream) -> None:
        self.now = max(self.now, other.now)


class TwoStreams:
    """A device on which matmuls and pairs are slower while both are queued."""

    def __init__(self, *, external: bool = True, pair_us: float = CORUN_PAIR_US) -> None:
        self.current = self.main = Stream()
        self.streams = [self.main]
        self.captured: list[Any] | None = None
        self.spare, self.library = 0, "default"
        self.external, self.corun_us = external, pair_us
        self.graphs: list[Any] = []
        self.limits: list[int | None] = []
        self.together = False
        self.matmuls: list[int] = []  # of each graph that holds any

    def do(self, action) -> None:
        if self.captured is None:
            action()
        else:
            self.captured.append(action)

    def spend(self, us: float) -> None:
        self.current.now += us

    def pair(self) -> None:
        self.do(lambda: self.spend(self.corun_us if self.together else PAIR_US))

    def multiply(self, a, b, *, out) -> None:
        assert self.library == "cublaslt"
        alone = LIMITED_US if self.spare else ALONE_US
        self.do(lambda: self.spend(CORUN_US if self.together else alone))

    def synchronize(self) -> None:
        last = max(stream.now for stream in self.streams)
        for stream in self.streams:
            stream.now = last

    def limit(self, spare: int | None) -> None:
        self.limits.append(spare)
        self.spare = spare or 0

    def prefer(self, library: str | None = None) -> str:
        before, self.library = self.library, library or self.library
        return before if library is None else self.library

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def capture(self, graph, stream, capture_error_mode):
        assert stream is not None
        self.captured = []
        with self.on(stream):
            yield
        graph.actions, self.captured = self.captured, None
        graph.spare = self.spare

    def new_stream(self, **kind) -> Stream:
        self.streams.append(Stream(**kind))
        return self.streams[-1]

    def install(self, monkeypatch) -> Calls:
        gpu = self

        class Event:
            def __init__(self, *, enable_timing, **kind) -> None:
                if kind and not gpu.external:
                    raise TypeError("no keyword 'external'")

            def record(self) -> None:
                gpu.do(lambda: setattr(self, "time", gpu.current.now))

            def elapsed_time(self, end) -> float:
                found: float = end.time - self.time  # type: ignore[attr-defined]
                assert found >= 0, "drivers promise nothing for events the other way round"
                return found / 1e3

        class CUDAGraph:
            actions: list[Any]

            def replay(self) -> None:
                for action in self.actions:
                    action()

        for name, value in (
            ("Event", Event),
            ("CUDAGraph", CUDAGraph),
            ("graph", self.capture),
            ("Stream", self.new_stream),
            ("stream", self.on),
            ("current_stream", lambda: self.main),
            ("synchronize", self.synchronize),
            ("get_device_properties", lambda _: SimpleNamespace(multi_processor_count=SMS)),
        ):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "mm", self.multiply)
        monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", self.limit)
        monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", self.prefer)
        together = corun._together

        def watched(group, pairs, matmuls, rounds):
            assert pairs.stream.priority == -1
            assert pairs.stream is not matmuls.stream
            self.together = True
            self.matmuls.append(len(matmuls.marks) - 1)
            found = together(group, pairs, matmuls, rounds)
            self.together = False
            return found

        monkeypatch.setattr(corun, "_together", watched)
        return Calls.of(self.pair)


def group_of(peer: bool = True) -> Any:
    """A rank with a peer whose matmuls lasted, or did not."""
    return SimpleNamespace(
        device=torch.device("cpu"), barrier=lambda: None, all_gather=lambda mine: [mine, peer]
    )


def run(monkeypatch, gpu: TwoStreams, group: Any, settings=ON_GPUS, pair_us=PAIR_US):
    calls = gpu.install(monkeypatch)
    return measure_corun(group, calls, settings, samples=11, call_us=pair_us)


def test_both_are_timed_together_and_alone(monkeypatch):
    gpu = TwoStreams()
    found = run(monkeypatch, gpu, group_of())
    assert found.us["matmul_alone"] == pytest.approx([ALONE_US] * ALONE)
    assert found.us["matmul_limited"] == pytest.approx([LIMITED_US] * ALONE)
    rounds = 30  # 60 ms of pairs, more than 11 replays
    assert found.us["call"] == pytest.approx([CORUN_PAIR_US] * rounds)
    matmuls = found.us["matmul"]
    assert matmuls == pytest.approx([CORUN_US] * len(matmuls))
    # Those that ran before the first timed round or past the last one are left out.
    assert len(matmuls) == pytest.approx(rounds * CALLS * CORUN_PAIR_US / CORUN_US, abs=2)
    assert gpu.matmuls == [117]
    assert found.method.startswith(
        f"co-run with matmul 128^3 bf16: {rounds} replays of 50 calls while matmuls run on 120 "
        "of 132"
    )
    assert gpu.limits == [None, None, SPARE, None, SPARE, None]
    assert gpu.library == "default", "what others multiply is as before"


def test_matmuls_that_end_early_are_doubled(monkeypatch):
    gpu = TwoStreams(pair_us=6 * PAIR_US)
    found = run(monkeypatch, gpu, group_of())
    assert all(after == 2 * before for before, after in pairwise(gpu.matmuls))
    assert len(gpu.matmuls) == 2
    assert min(found.us["call"]) == pytest.approx(6 * PAIR_US)


@pytest.mark.parametrize(("peer", "slow"), [(False, 1), (True, 1000)])
def test_no_figure_where_matmuls_do_not_last(monkeypatch, peer, slow):
    """Also where they lasted here and not on a peer: all ranks try again together."""
    gpu = TwoStreams(pair_us=slow * PAIR_US)
    found = run(monkeypatch, gpu, group_of(peer))
    assert found.us == {}
    assert len(gpu.matmuls) == ATTEMPTS
    assert f"no figure, {gpu.matmuls[-1]} matmuls ended before 30 replays" in found.method


def test_long_pairs_are_replayed_as_often_as_asked(monkeypatch):
    found = run(monkeypatch, TwoStreams(pair_us=800.0), group_of(), pair_us=800.0)
    assert len(found.us["call"]) == 11


def test_refusals(monkeypatch):
    with pytest.raises(InvalidArgument, match=r"num_sms is 132 and this GPU has 132.*1\.\.131"):
        run(monkeypatch, TwoStreams(), group_of(), replace(ON_GPUS, num_sms=SMS))
    with pytest.raises(InvalidArgument, match=r"Event\(external=True\)"):
        run(monkeypatch, TwoStreams(external=False), group_of())
    calls = TwoStreams().install(monkeypatch)
    monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    with pytest.raises(InvalidArgument, match="cannot limit the SMs of a matmul"):
        measure_corun(group_of(), calls, ON_GPUS, samples=11, call_us=PAIR_US)
