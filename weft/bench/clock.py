"""Time per call of one exchange.

CUDA: a graph of CALLS pairs is replayed back to back and events stand around each replay, so that
neither the host nor the skew between ranks is in the figure. How a pair splits into dispatch and
combine comes from a second graph with events between the phases; its extra nodes cost a little, so
the pair is the figure to quote and the split tells where it goes.
CPU: the host's clock around each call, with a barrier before every sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from weft.memory import Group

CALLS = 50  # pairs in one graph
WARM_UP = 3
PHASES = ("dispatch", "combine", "pair")


@dataclass(frozen=True, slots=True)
class Samples:
    """Times per call in us of one rank, one entry per sample; `method` says how they were taken."""

    method: str
    dispatch: list[float] = field(default_factory=list)
    combine: list[float] = field(default_factory=list)
    pair: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Phases:
    """The two calls that are timed, bound to static inputs. Collective: all ranks call both."""

    dispatch: Callable[[], object]
    combine: Callable[[], object]

    def pair(self) -> None:
        """One dispatch and one combine."""
        self.dispatch()
        self.combine()


def measure(group: Group, phases: Phases, *, samples: int, graph: bool) -> Samples:
    """Return this rank's times. Collective; every rank makes the same number of calls.

    samples: replays of a graph (or rounds of CALLS eager calls) on CUDA, single pairs on CPU.
    graph: capture on CUDA; CPU ranks have no graphs and ignore it.
    """
    if group.device.type != "cuda":
        return _host_clock(group, phases, samples)
    if graph:
        return _graph_clock(group, phases, samples)
    marks = events(2 * CALLS + 1)
    _warm_up(phases)
    found = Samples(method=f"eager, CUDA events, {samples} rounds of {CALLS} calls")
    found.pair.extend(_rounds(group, lambda: _pairs(phases), samples))
    _split(group, lambda: _marked_pairs(phases, marks), marks, found, samples)
    return found


def replayed_pairs(group: Group, phases: Phases, count: int, *, graph: bool) -> None:
    """Run `count` pairs without a pause, after others that swallow the skew between the ranks.

    Collective; returns when they are done. Nothing is timed.
    """
    if group.device.type != "cuda":
        for _ in range(WARM_UP + count):
            phases.pair()
        return
    _warm_up(phases)

    def pairs() -> None:
        for _ in range(count):
            phases.pair()

    run = _capture(pairs).replay if graph else pairs
    group.barrier()
    run()
    run()
    torch.cuda.synchronize()


def _host_clock(group: Group, phases: Phases, samples: int) -> Samples:
    found = Samples(method=f"host clock, {samples} calls with a barrier before each")
    for sample in range(-WARM_UP, samples):
        group.barrier()
        start = time.perf_counter_ns()
        phases.dispatch()
        middle = time.perf_counter_ns()
        phases.combine()
        end = time.perf_counter_ns()
        if sample >= 0:
            found.dispatch.append((middle - start) / 1e3)
            found.combine.append((end - middle) / 1e3)
            found.pair.append((end - start) / 1e3)
    return found


def _graph_clock(group: Group, phases: Phases, samples: int) -> Samples:
    _warm_up(phases)
    pairs = _capture(lambda: _pairs(phases))
    times = _rounds(group, pairs.replay, samples)
    method = f"CUDA graph of {CALLS} calls, {samples} replays"
    external = _external_events(2 * CALLS + 1)
    marks = external or events(2 * CALLS + 1)

    def split() -> None:
        _marked_pairs(phases, marks)

    if external:
        found = Samples(method=method)
        split = _capture(split).replay
    else:
        found = Samples(method=f"{method}; split into phases from eager calls")
    _split(group, split, marks, found, samples)
    found.pair.extend(times)
    return found


def _pairs(phases: Phases) -> None:
    for _ in range(CALLS):
        phases.pair()


def _marked_pairs(phases: Phases, marks: list[torch.cuda.Event]) -> None:
    """CALLS pairs; marks 2i and 2i + 1 stand before the dispatch and the combine of pair i."""
    for call in range(CALLS):
        marks[2 * call].record()
        phases.dispatch()
        marks[2 * call + 1].record()
        phases.combine()
    marks[-1].record()


def _warm_up(phases: Phases) -> None:
    """Eager calls on a side stream, as capture asks for: they load modules and start NCCL."""
    make: Callable[[], torch.cuda.Stream] = torch.cuda.Stream
    side = make()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            phases.pair()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def _capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # thread_local: a watchdog thread of torch.distributed may ask the driver something meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    return graph


def events(count: int, **kind: bool) -> list[torch.cuda.Event]:
    """Return events that keep the time at which the stream reaches them."""
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return [make(enable_timing=True, **kind) for _ in range(count)]


def _external_events(count: int) -> list[torch.cuda.Event] | None:
    """Events that a graph records at every replay, or None where torch does not offer them."""
    try:
        return events(count, external=True)
    except TypeError:
        return None


def _rounds(group: Group, round_: Callable[[], None], samples: int) -> list[float]:
    """us per call of `samples` rounds that are queued without a pause; one more goes ahead of them
    and swallows the skew between the ranks."""
    marks = events(samples + 1)
    group.barrier()
    round_()
    marks[0].record()
    for mark in marks[1:]:
        round_()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e3 / CALLS for before, after in pairwise(marks)]


def _split(
    group: Group,
    round_: Callable[[], None],
    marks: list[torch.cuda.Event],
    found: Samples,
    samples: int,
) -> None:
    """Fill in dispatch and combine: the mean over a round's calls but the first, which holds the
    skew between ranks that a synchronised host brings about."""
    for _ in range(samples):
        group.barrier()
        round_()
        torch.cuda.synchronize()
        spans = [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]
        found.dispatch.append(sum(spans[2::2]) / (CALLS - 1))
        found.combine.append(sum(spans[3::2]) / (CALLS - 1))
