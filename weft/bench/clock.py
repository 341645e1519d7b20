"""Time per call of one exchange.

CUDA: a graph of CALLS pairs is replayed back to back and events stand around each replay, so that
neither the host nor the skew between ranks is in the figure. How a pair splits into dispatch and
combine comes from a second graph with events between the phases; its extra nodes cost a little, so
the pair is the figure to quote and the split tells where it goes.
CPU: the host's clock around each call, with a barrier before every sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from weft.memory import Group

CALLS = 50  # pairs in one graph
WARM_UP = 3
PHASES = ("dispatch", "combine", "pair")
HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


@dataclass(frozen=True, slots=True)
class Samples:
    """Times per call in us of one rank, one entry per sample; `method` says how they were taken.

    halves: by the names of HALVES, or empty.
    """

    method: str
    dispatch: list[float] = field(default_factory=list)
    combine: list[float] = field(default_factory=list)
    pair: list[float] = field(default_factory=list)
    halves: dict[str, list[float]] = field(default_factory=dict)

    def by_phase(self) -> dict[str, list[float]]:
        """Every phase that was timed, by name."""
        whole = {"dispatch": self.dispatch, "combine": self.combine, "pair": self.pair}
        return whole | self.halves


@dataclass(frozen=True, slots=True)
class Phases:
    """The calls that are timed, bound to static inputs. Collective: all ranks make all of them.

    halves: the four of HALVES in their order, or none.
    """

    dispatch: Callable[[], object]
    combine: Callable[[], object]
    halves: tuple[Callable[[], object], ...] = ()

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
    _warm_up((phases.pair, *phases.halves))
    found = Samples(method=f"eager, CUDA events, {samples} rounds of {CALLS} calls")
    found.pair.extend(rounds_of(group, lambda: _pairs(phases), samples))
    _fill(found, phases, lambda steps: _split(group, steps, samples, graph=False))
    return found


def measure_call(
    group: Group, call: Callable[[], object], *, samples: int, graph: bool
) -> tuple[str, list[float]]:
    """Return how one call was timed, and this rank's us for each sample. Collective."""
    if group.device.type != "cuda":
        method = f"host clock, {samples} calls with a barrier before each"
        return method, _host_steps(group, (call,), samples)[0]
    _warm_up((call,))

    def calls() -> None:
        for _ in range(CALLS):
            call()

    times = rounds_of(group, capture(calls).replay if graph else calls, samples)
    if graph:
        return f"CUDA graph of {CALLS} calls, {samples} replays", times
    return f"eager, CUDA events, {samples} rounds of {CALLS} calls", times


def measure_steps(
    group: Group, steps: Sequence[Callable[[], object]], *, samples: int, graph: bool
) -> list[list[float]]:
    """Return this rank's us of each step of a round, one list a step. Collective.

    As the split of `measure`: events between the steps, inside of the graph where torch has such.
    """
    if group.device.type != "cuda":
        return _host_steps(group, steps, samples)

    def whole() -> None:
        for step in steps:
            step()

    _warm_up((whole,))
    return _split(group, steps, samples, graph=graph and external_events(1) is not None)


def replayed_pairs(group: Group, phases: Phases, count: int, *, graph: bool) -> None:
    """Run `count` pairs without a pause, after others that swallow the skew between the ranks.

    Collective; returns when they are done. Nothing is timed.
    """
    if group.device.type != "cuda":
        for _ in range(WARM_UP + count):
            phases.pair()
        return
    _warm_up((phases.pair, *phases.halves))

    def pairs() -> None:
        for _ in range(count):
            phases.pair()

    run = capture(pairs).replay if graph else pairs
    group.barrier()
    run()
    run()
    torch.cuda.synchronize()


def _fill(
    found: Samples,
    phases: Phases,
    times_of: Callable[[Sequence[Callable[[], object]]], list[list[float]]],
) -> None:
    """Fill in dispatch and combine, and the halves where there are any."""
    whole = times_of((phases.dispatch, phases.combine))
    found.dispatch.extend(whole[0])
    found.combine.extend(whole[1])
    if phases.halves:
        found.halves.update(zip(HALVES, times_of(phases.halves), strict=True))


def _host_clock(group: Group, phases: Phases, samples: int) -> Samples:
    found = Samples(method=f"host clock, {samples} calls with a barrier before each")
    _fill(found, phases, lambda steps: _host_steps(group, steps, samples))
    found.pair.extend(a + b for a, b in zip(found.dispatch, found.combine, strict=True))
    return found


def _host_steps(
    group: Group, steps: Sequence[Callable[[], object]], samples: int
) -> list[list[float]]:
    """us of each step of a round; the rounds that warm up are left out."""
    rounds = []
    for _ in range(WARM_UP + samples):
        group.barrier()
        marks = [time.perf_counter_ns()]
        for step in steps:
            step()
            marks.append(time.perf_counter_ns())
        rounds.append([(after - before) / 1e3 for before, after in pairwise(marks)])
    return [list(times) for times in zip(*rounds[WARM_UP:], strict=True)]


def _graph_clock(group: Group, phases: Phases, samples: int) -> Samples:
    _warm_up((phases.pair, *phases.halves))
    pairs = capture(lambda: _pairs(phases))
    times = rounds_of(group, pairs.replay, samples)
    method = f"CUDA graph of {CALLS} calls, {samples} replays"
    inner = external_events(1) is not None
    found = Samples(method if inner else f"{method}; split into phases from eager calls")
    _fill(found, phases, lambda steps: _split(group, steps, samples, graph=inner))
    found.pair.extend(times)
    return found


def _pairs(phases: Phases) -> None:
    for _ in range(CALLS):
        phases.pair()


def _marked(steps: Sequence[Callable[[], object]], marks: list[torch.cuda.Event]) -> None:
    """CALLS rounds of the steps, a mark before each step and one behind all."""
    for call, step in enumerate(list(steps) * CALLS):
        marks[call].record()
        step()
    marks[-1].record()


def _warm_up(calls: Sequence[Callable[[], object]]) -> None:
    """Eager calls on a side stream, as capture asks for: they load modules and start NCCL."""
    make: Callable[[], torch.cuda.Stream] = torch.cuda.Stream
    side = make()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def capture(
    body: Callable[[], None], stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """Return a graph of what `body` enqueues; its kernels keep the priority of `stream`."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: a watchdog thread of torch.distributed may ask the driver something meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    return graph


def events(count: int, **kind: bool) -> list[torch.cuda.Event]:
    """Return events that keep the time at which the stream reaches them."""
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return [make(enable_timing=True, **kind) for _ in range(count)]


def external_events(count: int) -> list[torch.cuda.Event] | None:
    """Events that a graph records at every replay, or None where torch does not offer them."""
    try:
        return events(count, external=True)
    except TypeError:
        return None


def rounds_of(group: Group, round_: Callable[[], None], samples: int) -> list[float]:
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
    group: Group, steps: Sequence[Callable[[], object]], samples: int, *, graph: bool
) -> list[list[float]]:
    """us of each step: the mean over a round's calls but the first, which holds the skew between
    ranks that a synchronised host brings about."""
    count = len(steps)
    size = count * CALLS + 1
    marks = (external_events(size) if graph else None) or events(size)

    def calls() -> None:
        _marked(steps, marks)

    round_ = capture(calls).replay if graph else calls
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(samples):
        group.barrier()
        round_()
        torch.cuda.synchronize()
        spans = [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]
        for step, found in enumerate(times):
            found.append(sum(spans[count + step :: count]) / (CALLS - 1))
    return times
