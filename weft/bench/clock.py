"""Time per call.

CUDA: a graph of CALLS calls is replayed back to back and events stand around each replay, so that
neither the host nor the skew between ranks is in the figure. How a call splits into its steps comes
from a second graph with events between them; its extra nodes cost a little, so the whole is the
figure to quote and the split shows where it goes.
CPU: the host's clock around each step, with a barrier before every sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from weft.memory import Group

CALLS = 50  # in one graph
WARM_UP = 3
Step: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Calls:
    """What is timed, bound to static inputs. Collective: all ranks make all of them.

    steps: by name, in their order; one after the other they are one call.  whole: its name.
    also: the same call cut into other steps.  graph: may it be captured?
    """

    steps: Mapping[str, Step]
    whole: str = "call"
    also: Mapping[str, Step] = field(default_factory=dict)
    graph: bool = True

    def __call__(self) -> None:
        """One call."""
        for step in self.steps.values():
            step()

    @classmethod
    def of(cls, call: Step, *, graph: bool = True) -> Calls:
        """A call that is not cut."""
        return cls({"call": call}, graph=graph)


@dataclass(frozen=True, slots=True)
class Samples:
    """us per call of one rank, a list of samples for each step and, last, for the whole.

    method: how they were taken.
    """

    method: str
    us: dict[str, list[float]]


def measure(group: Group, calls: Calls, *, samples: int, graph: bool) -> Samples:
    """Return this rank's times. Collective; every rank makes the same number of calls.

    samples: replays of a graph (or rounds of CALLS eager calls) on CUDA, single calls on CPU.
    graph: capture on CUDA; CPU ranks have no graphs and ignore it.
    """
    cuts = [cut for cut in (calls.steps, calls.also) if cut]
    us: dict[str, list[float]] = {}
    if group.device.type != "cuda":
        for cut in cuts:
            us |= zip(cut, _host_steps(group, list(cut.values()), samples), strict=True)
        parts = zip(*(us[name] for name in calls.steps), strict=True)
        us = {**us, calls.whole: us.pop(calls.whole, [sum(each) for each in parts])}
        return Samples(f"host clock, {samples} calls with a barrier before each", us)
    graph = graph and calls.graph
    _warm_up((calls, *calls.also.values()))

    def every() -> None:
        for _ in range(CALLS):
            calls()

    whole = rounds_of(group, capture(every).replay if graph else every, samples)
    inner = graph and external_events(1) is not None
    method = f"CUDA graph of {CALLS} calls, {samples} replays"
    if not graph:
        method = f"eager, CUDA events, {samples} rounds of {CALLS} calls"
    cuts = [cut for cut in cuts if len(cut) > 1]
    if cuts and graph and not inner:
        method += "; split into steps from eager calls"
    for cut in cuts:
        us |= zip(cut, _split(group, list(cut.values()), samples, graph=inner), strict=True)
    return Samples(method, {**us, calls.whole: whole})


def replayed(group: Group, calls: Calls, count: int, *, graph: bool) -> None:
    """Make `count` calls without a pause, after others that swallow the skew between the ranks.

    Collective; returns when they are done. Nothing is timed.
    """
    if group.device.type != "cuda":
        for _ in range(WARM_UP + count):
            calls()
        return
    _warm_up((calls,))

    def every() -> None:
        for _ in range(count):
            calls()

    run = capture(every).replay if graph else every
    group.barrier()
    run()
    run()
    torch.cuda.synchronize()


def host_us(steps: Sequence[Step]) -> list[float]:
    """Make one call; us of each of its steps by the host's clock."""
    marks = [time.perf_counter_ns()]
    for step in steps:
        step()
        marks.append(time.perf_counter_ns())
    return [(after - before) / 1e3 for before, after in pairwise(marks)]


def _host_steps(group: Group, steps: Sequence[Step], samples: int) -> list[list[float]]:
    """us of each step of a call; the calls that warm up are left out."""
    rounds = []
    for _ in range(WARM_UP + samples):
        group.barrier()
        rounds.append(host_us(steps))
    return [list(times) for times in zip(*rounds[WARM_UP:], strict=True)]


def _warm_up(calls: Sequence[Step]) -> None:
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


def _split(group: Group, steps: Sequence[Step], samples: int, *, graph: bool) -> list[list[float]]:
    """us of each step: the mean over a round's calls but the first, which holds the skew between
    ranks that a synchronised host brings about."""
    count = len(steps)
    size = count * CALLS + 1
    marks = (external_events(size) if graph else None) or events(size)

    def every() -> None:
        for mark, step in zip(marks, list(steps) * CALLS, strict=False):
            mark.record()
            step()
        marks[-1].record()

    round_ = capture(every).replay if graph else every
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(samples):
        group.barrier()
        round_()
        torch.cuda.synchronize()
        spans = [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]
        for step, found in enumerate(times):
            found.append(sum(spans[count + step :: count]) / (CALLS - 1))
    return times
