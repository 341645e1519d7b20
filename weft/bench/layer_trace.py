"""One call of a layer in every overlap mode, for Perfetto: each kernel in its stream, all ranks.

torch.profiler says what ran when, by a clock of its own on every rank; the marks of profiled
dispatches (runtime/timeline.py) bring all ranks to one clock, as in trace.py. A rank's kernels are
brought to its marks by its dispatches, which are in both.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from weft.alltoall.operator import AllToAll
from weft.bench.case import Refused
from weft.bench.clock import Calls, capture, measure
from weft.bench.layer import LayerCase, LayerSession, LayerTrial
from weft.bench.report import write_text
from weft.bench.run import LIMIT_SECONDS, first_problem
from weft.bench.trace import ROUNDS, Event
from weft.bench.trace import to_chrome as marks_to_chrome
from weft.errors import InvalidArgument
from weft.memory import Group, launch
from weft.runtime.skew import Skew, estimate_skew
from weft.runtime.timeline import Span

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")  # what the profiler calls a GPU's work
CALL = "weft layer call"
PROCESSES = 100  # between the process numbers of two modes; ranks are fewer
TRACKS = 100  # from one stream to the next; marks have tracks below, a stream's overlaps above


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel, a copy, or on CPU ranks an operation of torch; ns of the profiler's clock."""

    name: str
    stream: int
    start_ns: float
    duration_ns: float
    grid: tuple[int, ...] = ()

    @property
    def end_ns(self) -> float:
        """When it was over."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Call:
    """The last of ROUNDS calls of one rank, and how its clocks lie.

    work: in the order of their starts.   spans: the marks of all the rounds.
    shift_ns: to be added to the work's times for the clock of the marks.
    spread_ns: by how much the rounds differ in that.   us: of a profiled call, median.
    """

    overlap: str
    work: list[Work]
    spans: list[Span]
    shift_ns: float
    spread_ns: float
    us: float


def trace_layers(path: Path, case: LayerCase) -> str | None:
    """Run the largest size once more, profiled, in every mode, and write one call of each.

    Returns what a check found wrong, or None. Raises InvalidArgument for another mode than
    "throughput", and where the profiler kept no kernels or clocks cannot be aligned; and what
    `weft.launch` raises.
    """
    check_traced(case)
    results = launch(rank_calls, case, ranks=case.ranks, device=case.device, timeout=LIMIT_SECONDS)
    problem = next((found for found, _ in results if found), None)
    if problem is None:
        modes = list(zip(*(calls for _, calls in results), strict=True))
        document = to_chrome(modes, shared_clock=case.device != "cuda")
        document["metadata"] |= {
            "model": case.model,
            "ranks": case.ranks,
            "device": case.device,
            "tokens_per_rank": max(case.tokens),
            "graph": case.graph and case.device == "cuda",
        }
        write_text(path, json.dumps(document) + "\n")
    return problem


def check_traced(case: LayerCase) -> None:
    """Raises InvalidArgument for a layer whose kernels keep no such marks."""
    if case.mode != "throughput":
        raise InvalidArgument(
            f"a trace shows layers of mode 'throughput'; this one is {case.mode!r}: its "
            "kernels are those of weft bench lowlatency --trace"
        )


def rank_calls(group: Group, case: LayerCase) -> tuple[str | None, list[Call]]:
    """What every rank does: check each mode, run it, keep its last call. Collective."""
    tokens, calls = max(case.tokens), []
    session = LayerSession(group, case)
    for overlap in case.variants:
        try:
            with session.trial(overlap, tokens, profile=True) as trial:
                if problem := first_problem(group, trial.check()):
                    return f"overlap {overlap}: {problem}", []
                calls.append(_one_mode(group, case, trial, overlap))
        except Refused:
            continue
    return None, calls


def _one_mode(group: Group, case: LayerCase, trial: LayerTrial, overlap: str) -> Call:
    """ROUNDS calls under the profiler. Collective."""
    cuda, layer = group.device.type == "cuda", trial.layer
    graph = case.graph and trial.graph
    times = measure(group, Calls.of(trial.call), samples=3, graph=graph).us["call"]
    run = capture(trial.call).replay if graph and cuda else trial.call
    work, marks = record(group, run)
    layer.check()
    assert isinstance(layer.exchange, AllToAll)  # check_traced has refused the other
    spans = layer.exchange.timeline()
    shift, spread = align(work, spans) if cuda else (marks[-1], 0.0)
    return Call(overlap, last_call(work), spans, shift, spread, median(times))


def record(group: Group, run: Callable[[], None]) -> tuple[list[Work], list[float]]:
    """What ROUNDS calls did, and on CPU ranks from the profiler's clock to the host's, per call.

    All ranks start together once the profiler is up. Collective.
    """
    cuda = group.device.type == "cuda"
    kind = torch.profiler.ProfilerActivity
    begins = []
    watched = [kind.CUDA if cuda else kind.CPU]
    with torch.profiler.profile(activities=watched, acc_events=True) as profiler:
        group.barrier()
        for _ in range(ROUNDS):
            begins.append(time.monotonic_ns())
            with torch.profiler.record_function(CALL):
                run()
        if cuda:
            torch.cuda.synchronize()
        group.barrier()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    if cuda:
        return device_work(events), []
    calls = sorted(e["ts"] for e in events if e.get("name") == CALL and e["ph"] == "X")
    marks = [begin - start * 1e3 for begin, start in zip(begins, calls, strict=True)]
    return host_work(events), marks


def device_work(events: Sequence[Event]) -> list[Work]:
    """The kernels and copies in a trace of torch.profiler, in the order of their starts.

    Raises InvalidArgument when there is none.
    """
    found = [
        Work(
            name=event["name"],
            stream=int(event["args"].get("stream", event["tid"])),
            start_ns=event["ts"] * 1e3,
            duration_ns=event["dur"] * 1e3,
            grid=tuple(event["args"].get("grid", ())),
        )
        for event in events
        if event.get("cat") in KINDS and event["ph"] == "X"
    ]
    if not found:
        raise InvalidArgument(
            "torch.profiler kept no kernels: CUPTI is missing, or another profiler holds it"
        )
    return sorted(found, key=lambda work: work.start_ns)


def host_work(events: Sequence[Event]) -> list[Work]:
    """The operations in it that are not part of another one; one stream, a CPU rank has no more."""
    found: list[Work] = []
    kept = (e for e in events if e.get("cat") == "cpu_op" and e["ph"] == "X")
    for event in sorted(kept, key=lambda e: (e["ts"], -e["dur"])):
        work = Work(event["name"], 0, event["ts"] * 1e3, event["dur"] * 1e3)
        if not found or work.start_ns >= found[-1].end_ns:
            found.append(work)
    return found


def last_call(work: Sequence[Work]) -> list[Work]:
    """Of ROUNDS equal calls, what the last one did.

    Raises InvalidArgument when they cannot have been equal.
    """
    if len(work) % ROUNDS:
        raise InvalidArgument(
            f"torch.profiler kept {len(work)} kernels of {ROUNDS} equal calls: some were lost"
        )
    return list(work[-(len(work) // ROUNDS) :])


def align(work: Sequence[Work], spans: Sequence[Span]) -> tuple[float, float]:
    """(shift, spread) in ns: what to add to the profiler's times for the clock of the marks.

    A dispatch is marked by its first CTA just after the kernel's start, every time alike. Raises
    InvalidArgument when the profiler and the marks do not know the same dispatches.
    """
    kernels = [each.start_ns for each in work if each.name == "dispatch"]
    marks = sorted(s.start_ns for s in spans if s.phase == "dispatch" and s.finished)
    if len(kernels) != len(marks) or not marks:
        raise InvalidArgument(
            f"the profiler kept {len(kernels)} dispatches and their marks are {len(marks)}; there "
            f"should be {ROUNDS} of both"
        )
    shifts = [mark - start for mark, start in zip(marks, kernels, strict=True)]
    return median(shifts), max(shifts) - min(shifts)


def to_chrome(modes: Sequence[Sequence[Call]], *, shared_clock: bool) -> dict[str, Any]:
    """The trace as a JSON object: a process for each rank of each mode, each mode from 0 us on."""
    events: list[Event] = []
    facts: list[Event] = []
    for place, calls in enumerate(modes):
        spans = [[s for s in call.spans if s.finished] for call in calls]
        flags = [[s for s in each if s.phase == "dispatch"] for each in spans]
        skew = Skew((0.0,) * len(calls), 0.0, 1) if shared_clock else estimate_skew(flags)
        shifts = [call.shift_ns + skew.offsets_ns[r] for r, call in enumerate(calls)]
        firsts = [call.work[0].start_ns + shift for call, shift in zip(calls, shifts, strict=True)]
        last = [[s for s in each if s.epoch == max(t.epoch for t in each)] for each in spans]
        firsts += [s.start_ns + skew.offsets_ns[s.rank] for each in last for s in each]
        first = min(firsts)
        events += _marks(last, skew, place, first)
        for rank, call in enumerate(calls):
            events += _kernels(call, PROCESSES * place + rank, shifts[rank] - first)
        facts.append(
            {
                "overlap": calls[0].overlap,
                "offsets_ns": [round(offset) for offset in skew.offsets_ns],
                "uncertainty_ns": round(skew.uncertainty_ns),
                "kernels_against_marks_ns": round(max(call.spread_ns for call in calls)),
                "tick_ns": skew.tick_ns,
                "profiled_us": round(max(call.us for call in calls), 2),
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ns", "metadata": {"modes": facts}}


def _marks(last: list[list[Span]], skew: Skew, place: int, first: float) -> Iterator[Event]:
    """The in-kernel marks of the last round, moved to this mode's processes and zero."""
    starts = [s.start_ns + skew.offsets_ns[s.rank] for each in last for s in each]
    shift = (min(starts, default=first) - first) / 1e3
    for event in marks_to_chrome(last, skew)["traceEvents"]:
        moved = {**event, "pid": event["pid"] + PROCESSES * place}
        if event["name"] == "process_name" or event["name"] == "process_sort_index":
            continue
        if "ts" in event:
            moved["ts"] = event["ts"] + shift
        if "id" in event:
            moved["id"] = f"{place}.{event['id']}"
        yield moved


def _kernels(call: Call, pid: int, shift_ns: float) -> Iterator[Event]:
    """Every kernel in its stream; what overlaps its predecessor there goes to a track beside."""

    def named(kind: str, tid: int, **args: object) -> Event:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}

    yield named("process_name", 0, name=f"{call.overlap}: rank {pid % PROCESSES}")
    yield named("process_sort_index", 0, sort_index=pid)
    streams = list(dict.fromkeys(work.stream for work in call.work))
    ends: dict[int, float] = {}
    for work in call.work:
        lane = TRACKS * (1 + streams.index(work.stream))
        while ends.get(lane, work.start_ns) > work.start_ns:
            lane += 1
        if lane not in ends:
            beside = ", beside" if lane % TRACKS else ""
            yield named("thread_name", lane, name=f"stream {work.stream}{beside}")
            yield named("thread_sort_index", lane, sort_index=lane - 100 * TRACKS)
        ends[lane] = work.end_ns
        yield {
            "ph": "X",
            "name": short(work.name),
            "cat": "kernel",
            "pid": pid,
            "tid": lane,
            "ts": (work.start_ns + shift_ns) / 1e3,
            "dur": work.duration_ns / 1e3,
            "args": {"name": work.name[:200], "grid": list(work.grid)},
        }


def short(name: str) -> str:
    """A kernel's name without return type, template and arguments, at most 60 characters."""
    bare = name.removeprefix("void ").split("(")[0].split("<")[0]
    return (bare or name)[:60]
