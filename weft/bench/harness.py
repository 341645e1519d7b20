# SPDX-License-Identifier: Apache-2.0
"""The harness: start the ranks, check each trial over poisoned memory, time it, check it again.

CUDA: a graph of CALLS calls is replayed back to back with an event after each replay, so that
neither the host nor the skew between ranks is in the figure. How a call splits into its steps comes
from a second graph with events between them; its extra nodes cost a little, so the whole is the
figure to quote and the split shows where it goes.
CPU: the host's clock around each step, with a barrier before every sample.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import torch

from weft.bench.machine import describe_machine
from weft.errors import InvalidArgument
from weft.group import Group
from weft.launcher import launch

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
CALLS = 50  # in one graph
WARM_UP = 3
FEWEST_REPLAYS = 11  # the median of fewer says little
LIMIT_SECONDS = 3600.0  # of a whole run
TIMEOUT = 30.0  # of operators: ranks that share cores may be late without being dead
POISON = 0xFF  # as bytes a NaN in every float type that is sent

Step: TypeAlias = Callable[[], object]
SamplesOfRank: TypeAlias = dict[str, list[list[float]]]  # phase -> for each rank, its samples, us


@dataclass(frozen=True, slots=True)
class Calls:
    """What is timed, bound to static inputs. Collective: all ranks make all of them.

    steps: by name, in their order; one after the other they are one call.  whole: its name.
    graph: may it be captured?
    """

    steps: Mapping[str, Step]
    whole: str = "call"
    graph: bool = True

    def __call__(self) -> None:
        """One call."""
        for step in self.steps.values():
            step()


@dataclass(frozen=True, slots=True)
class Measured:
    """One variant at one size.

    samples_us: of each phase, the whole last.  method: how they were taken.
    facts: what the trial counted.
    """

    variant: str
    tokens: int
    method: str
    samples_us: SamplesOfRank
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """A variant that does not serve this size or layer, and why, equally on all ranks."""

    variant: str
    tokens: int
    why: str


class Trial:
    """One variant at one size, with its inputs. All ranks make the same calls in the same order."""

    group: Group
    variant: str
    tokens: int
    outputs: list[torch.Tensor]

    def calls(self) -> Calls:
        """What is timed."""
        raise NotImplementedError

    def check(self) -> str | None:
        """Call once over poisoned memory; return what differs from the reference, or None."""
        self.poison()
        self.calls()()
        return self.compare()

    def poison(self) -> None:
        """Overwrite the outputs: what is right from here on was written anew."""
        for output in self.outputs:
            poison(output)
        settle(self.group)

    def compare(self) -> str | None:
        """Return how the outputs differ from the reference, or None."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What was counted, as JSON values; also raises what the device has recorded."""
        raise NotImplementedError


Trials: TypeAlias = Generator[Trial | Refused, None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one run of an operator measures. Equal on all ranks; each operator adds its own.

    tokens: sizes, tokens per rank.  samples: timed samples per size.  seed: of inputs and routing.
    graph: CUDA graphs, else eager calls.  num_sms: SMs that the kernels may fill, None for all.
    programmatic_launch: as in the operators.
    """

    ranks: int
    device: str
    tokens: tuple[int, ...]
    samples: int = 15
    graph: bool = True
    seed: int = 0
    num_sms: int | None = None
    programmatic_launch: bool = True

    operator: ClassVar[str]  # its command
    whole: ClassVar[str] = "call"  # the phase that is quoted
    checked: ClassVar[str]  # how results are checked, in words

    def __post_init__(self) -> None:
        if not self.tokens:
            raise InvalidArgument("nothing to measure: pass at least one number of tokens")
        if min(self.tokens) < 1:
            raise InvalidArgument(f"{min(self.tokens)} tokens; a timed size is at least 1")
        if not 1 <= self.samples <= 5000:
            raise InvalidArgument(f"{self.samples} samples; choose 1..5000")
        if self.device == "cuda" and self.graph and self.samples < FEWEST_REPLAYS:
            raise InvalidArgument(
                f"{self.samples} replays of the graph; at least {FEWEST_REPLAYS} are needed for a "
                "median"
            )
        if self.num_sms is not None and self.device != "cuda":
            raise InvalidArgument(
                f"num_sms is {self.num_sms} on {self.device} ranks; it limits GPU kernels: "
                "leave it out"
            )

    def seed_of(self, tokens: int, rank: int) -> int:
        """The seed of a rank's rows of one size, by which every rank can draw them."""
        return (self.seed * 7919 + tokens) * 64 + rank

    def trials(self, group: Group) -> Trials:
        """Each variant at each size, with an operator that is open until the next. Collective."""
        raise NotImplementedError

    def comparable(self) -> Case | None:
        """What other libraries are asked for, or None where they have nothing like it."""
        return self

    def title(self) -> str:
        """The sizes and options in words."""
        raise NotImplementedError

    def bytes_of(self, found: Measured, phase: str) -> tuple[float, float]:
        """(logical, wire) bytes of a phase: of one rank's rows, and off the busiest rank."""
        raise NotImplementedError

    def floor_us(self, found: Measured, gpus: list[str]) -> float | None:
        """Least us of the whole on this hardware, or None where nothing was measured."""
        raise NotImplementedError

    def floor_text(self) -> str:
        """What the floor is made of, in words."""
        raise NotImplementedError

    def columns(self, found: Measured) -> dict[str, float | str]:
        """Further columns of a row."""
        return {}

    def notes(self, found: Sequence[Measured]) -> list[str]:
        """Lines below the table."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsCase(Case):
    """A case of an operator that moves rows.

    hidden, dtype: of a row.
    """

    hidden: int = 7168
    dtype: str = "bf16"

    @property
    def out_dtype(self) -> torch.dtype:
        """dtype of the rows that come back."""
        return DTYPES[self.dtype]

    @property
    def capacity(self) -> int:
        """Most tokens of one rank: the operator has room for the largest size."""
        return max(self.tokens)


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. problem: what a check found wrong; nothing is timed from there on.

    refused: what a variant does not serve, in words.
    """

    case: Case
    machine: dict[str, Any]
    measured: list[Measured] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    problem: str | None = None


def on_ranks(
    case: Case, body: Callable[..., Any], *given: Any, seconds: float = LIMIT_SECONDS
) -> list[Any]:
    """What `body(group, case, *given)` returns on each rank of a case. Raises as `weft.launch`."""
    return launch(body, case, *given, ranks=case.ranks, device=case.device, timeout=seconds)


def run(case: Case, *, quiet: bool = False) -> Report:
    """Check and time every variant at every size. Raises as `weft.launch`."""
    return Report(case, **on_ranks(case, rank_body, quiet)[0])


def rank_body(group: Group, case: Case, quiet: bool) -> dict[str, Any]:
    """What every rank does; all ranks return the same, as Report's fields."""
    found: list[Measured] = []
    refused: list[str] = []
    problem = None
    with contextlib.closing(case.trials(group)) as trials:
        for trial in trials:
            name = f"{trial.variant}, {trial.tokens} tokens"
            if isinstance(trial, Refused):
                refused.append(f"{name}: {trial.why}")
                continue
            if group.rank == 0 and not quiet:
                print(f"weft bench {case.operator}: {name}", file=sys.stderr, flush=True)
            if problem := first_problem(group, trial.check()):
                problem = f"{name}: {problem}"
                break
            trial.poison()
            method, us = measure(group, trial.calls(), samples=case.samples, graph=case.graph)
            if problem := first_problem(group, trial.compare()):
                problem = f"{name}: after timing, {problem}"
                break
            found.append(Measured(trial.variant, trial.tokens, method, us, trial.facts()))
            group.barrier()  # a peer may still be reading what is about to go
        group.barrier()
    if not found and problem is None:
        problem = "; ".join(refused)
    machine = describe_machine(gpu_names(group))
    return {"machine": machine, "measured": found, "refused": refused, "problem": problem}


def first_problem(group: Group, problem: str | None) -> str | None:
    """Every rank learns what any rank found, so that all of them stop at the same place."""
    return next((found for found in group.all_gather(problem) if found), None)


def gpu_names(group: Group) -> list[str]:
    """The name of each rank's GPU; empty for CPU ranks. Collective."""
    cuda = group.device.type == "cuda"
    name = torch.cuda.get_device_name(group.device) if cuda else ""
    return [gpu for gpu in group.all_gather(name) if gpu]


def settle(group: Group) -> None:
    """Wait for this rank's device, then for every rank."""
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    group.barrier()


def poison(tensor: torch.Tensor) -> None:
    """Overwrite with bytes that no right result has."""
    if tensor.dtype.is_floating_point:
        tensor.view(torch.uint8).fill_(POISON)
    else:  # packed scales, column by column
        tensor.fill_(-1)


def unlike_row(name: str, rank: int, got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Return the first token whose row differs in a byte, with both values, or None.

    got, want: `[tokens, columns]` of one dtype.
    """
    ours, theirs = (each.clone(memory_format=torch.contiguous_format) for each in (got, want))
    differ = ours.view(torch.uint8) != theirs.view(torch.uint8)
    unlike = differ.any(dim=1).nonzero()
    if not len(unlike):
        return None
    token = int(unlike[0])
    places = differ[token].view(-1, got.itemsize).any(dim=1).nonzero().flatten()[:4].tolist()
    return (
        f"rank {rank}: {name} of token {token} of {len(got)} is "
        f"{got[token].double()[places].tolist()} in columns {places}, the reference says "
        f"{want[token].double()[places].tolist()}"
    )


def measure(group: Group, calls: Calls, *, samples: int, graph: bool) -> tuple[str, SamplesOfRank]:
    """How times were taken, and every rank's. Collective; all ranks make as many calls.

    samples: replays of a graph (or rounds of CALLS eager calls) on CUDA, single calls on CPU.
    graph: capture on CUDA; CPU ranks have no graphs and ignore it.
    """
    if group.device.type == "cuda":
        method, us = _on_cuda(group, calls, samples, graph=graph and calls.graph)
    else:
        method, us = _on_cpu(group, calls, samples)
    ranks: list[dict[str, list[float]]] = group.all_gather(us)
    return method, {name: [each[name] for each in ranks] for name in us}


Times: TypeAlias = tuple[str, dict[str, list[float]]]  # how; us of each step, the whole last


def _on_cpu(group: Group, calls: Calls, samples: int) -> Times:
    rounds = []
    for _ in range(WARM_UP + samples):
        group.barrier()
        marks = [time.perf_counter_ns()]
        for step in calls.steps.values():
            step()
            marks.append(time.perf_counter_ns())
        rounds.append([(after - before) / 1e3 for before, after in pairwise(marks)])
    del rounds[:WARM_UP]
    us = {name: [times[at] for times in rounds] for at, name in enumerate(calls.steps)}
    us[calls.whole] = [sum(times) for times in rounds]
    return f"host clock, {samples} calls with a barrier before each", us


def _on_cuda(group: Group, calls: Calls, samples: int, *, graph: bool) -> Times:
    _warm_up(calls)

    def every() -> None:
        for _ in range(CALLS):
            calls()

    whole = rounds_of(group, capture(every).replay if graph else every, samples)
    us = _split(group, calls, samples, graph=graph) if len(calls.steps) > 1 else {}
    us[calls.whole] = whole
    if graph:
        return f"CUDA graph of {CALLS} calls, {samples} replays", us
    return f"eager, CUDA events, {samples} rounds of {CALLS} calls", us


def _warm_up(calls: Calls) -> None:
    """Eager calls on a side stream, as capture asks for: they load modules and start NCCL."""
    make: Callable[[], torch.cuda.Stream] = torch.cuda.Stream
    side = make()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            calls()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a graph of what `body` enqueues."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: a watchdog thread of torch.distributed may ask the driver something meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    return graph


def events(count: int, **kind: bool) -> list[torch.cuda.Event]:
    """Return events that keep the time at which the stream reaches them."""
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return [make(enable_timing=True, **kind) for _ in range(count)]


def rounds_of(group: Group, round_: Callable[[], None], samples: int) -> list[float]:
    """us per call of `samples` rounds that are queued without a pause; one more goes ahead of them
    and absorbs the skew between the ranks."""
    marks = events(samples + 1)
    group.barrier()
    round_()
    marks[0].record()
    for mark in marks[1:]:
        round_()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e3 / CALLS for before, after in pairwise(marks)]


def _split(group: Group, calls: Calls, samples: int, *, graph: bool) -> dict[str, list[float]]:
    """us of each step: the mean over a round's calls but the first, which holds the skew between
    ranks that a synchronised host brings about."""
    steps, count = list(calls.steps.values()), len(calls.steps)
    # A graph records external events at every replay.
    marks = events(count * CALLS + 1, external=graph)

    def every() -> None:
        for mark, step in zip(marks, steps * CALLS, strict=False):
            mark.record()
            step()
        marks[-1].record()

    round_ = capture(every).replay if graph else every
    times: dict[str, list[float]] = {name: [] for name in calls.steps}
    for _ in range(samples):
        group.barrier()
        round_()
        torch.cuda.synchronize()
        spans = [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]
        for step, found in enumerate(times.values()):
            found.append(sum(spans[count + step :: count]) / (CALLS - 1))
    return times
