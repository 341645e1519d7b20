# SPDX-License-Identifier: Apache-2.0
"""The harness: start ranks, check each trial over poisoned memory, time it, and check it again.

CUDA: a graph of CALLS calls is replayed without pauses, with an event after each replay. So times
include neither the host nor the skew between ranks. The split of a call into steps comes from a
second graph with events between the steps. Those add a little time, so quote the whole call's time.
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
CALLS = 50  # calls in one graph
WARM_UP = 3
FEWEST_REPLAYS = 11  # fewest samples for a meaningful median
LIMIT_SECONDS = 3600.0  # timeout of a run
TIMEOUT = 30.0  # timeout of operators: ranks that share cores may be late
POISON = 0xFF  # this byte is NaN in every float type that is sent

Step: TypeAlias = Callable[[], object]
SamplesOfRank: TypeAlias = dict[str, list[list[float]]]  # phase -> samples in us, by rank


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls to time, bound to static inputs. Collective: all ranks make all calls.

    Attributes:
        steps: Steps of a call by name, in order.
        whole: Name of the whole call.
        graph: Whether the steps may be captured.
    """

    steps: Mapping[str, Step]
    whole: str = "call"
    graph: bool = True

    def __call__(self) -> None:
        """Run one call."""
        for step in self.steps.values():
            step()


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurements of one variant at one size.

    Attributes:
        samples_us: Samples of each phase, the whole call last.
        method: How they were measured.
        facts: The trial's counters.
    """

    variant: str
    tokens: int
    method: str
    samples_us: SamplesOfRank
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rejection:
    """A variant that does not support a size or layer, with the reason; equal on all ranks."""

    variant: str
    tokens: int
    why: str


class Trial:
    """One variant at one size, with its inputs. Collective: all ranks make the same calls."""

    group: Group
    variant: str
    tokens: int
    outputs: list[torch.Tensor]

    def calls(self) -> Calls:
        """Return the calls to time."""
        raise NotImplementedError

    def check(self) -> str | None:
        """Call once over poisoned memory; return a difference from the reference, or None."""
        self.poison()
        self.calls()()
        return self.compare()

    def poison(self) -> None:
        """Overwrite the outputs, so that stale results are detected."""
        for output in self.outputs:
            poison(output)
        synchronize_ranks(self.group)

    def compare(self) -> str | None:
        """Return a difference between the outputs and the reference, or None."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return counters as JSON values. Raises errors that the device recorded."""
        raise NotImplementedError


Trials: TypeAlias = Generator[Trial | Rejection, None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Parameters of one run, equal on all ranks. Each operator adds its own.

    Attributes:
        tokens: Sizes to measure, in tokens per rank.
        samples: Timed samples per size.
        graph: Whether to use CUDA graphs instead of eager calls.
        seed: Seed of inputs and routing.
        num_sms: SMs that the kernels may use, or None for all.
        programmatic_launch: As in the operators.
    """

    ranks: int
    device: str
    tokens: tuple[int, ...]
    samples: int = 15
    graph: bool = True
    seed: int = 0
    num_sms: int | None = None
    programmatic_launch: bool = True

    operator: ClassVar[str]  # name of the command
    whole: ClassVar[str] = "call"  # name of the whole call's phase
    checked: ClassVar[str]  # description of the check

    def __post_init__(self) -> None:
        if not self.tokens:
            raise InvalidArgument("nothing to measure: pass at least one number of tokens")
        if min(self.tokens) < 1:
            raise InvalidArgument(f"{min(self.tokens)} tokens; a timed size is at least 1")
        if not 1 <= self.samples <= 5000:
            raise InvalidArgument(f"{self.samples} samples; choose 1..5000")
        if self.device == "cuda" and self.graph and self.samples < FEWEST_REPLAYS:
            raise InvalidArgument(
                f"{self.samples} replays of the graph; a median needs at least {FEWEST_REPLAYS}"
            )
        if self.num_sms is not None and self.device != "cuda":
            raise InvalidArgument(
                f"num_sms is {self.num_sms} on {self.device} ranks, but it limits GPU kernels: "
                "leave it out"
            )

    def seed_of(self, tokens: int, rank: int) -> int:
        """Return the seed of a rank's rows, with which every rank can generate them."""
        return (self.seed * 7919 + tokens) * 64 + rank

    def trials(self, group: Group) -> Trials:
        """Yield each variant at each size; its operator is open until the next. Collective."""
        raise NotImplementedError

    def comparable(self) -> Case | None:
        """Return the case that other libraries run, or None if they have no equivalent."""
        return self

    def title(self) -> str:
        """Describe sizes and options."""
        raise NotImplementedError

    def bytes_of(self, measured: Measurement, phase: str) -> tuple[float, float]:
        """Return (logical, wire) bytes of a phase: of one rank's rows, and of the busiest rank."""
        raise NotImplementedError

    def floor_us(self, measured: Measurement, gpus: list[str]) -> float | None:
        """Return the hardware's lower bound of the whole call in us, or None if unknown."""
        raise NotImplementedError

    def floor_text(self) -> str:
        """Describe the floor."""
        raise NotImplementedError

    def columns(self, measured: Measurement) -> dict[str, float | str]:
        """Return further columns of a row."""
        return {}

    def notes(self, measured: Sequence[Measurement]) -> list[str]:
        """Return lines to print below the table."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsCase(Case):
    """A case of an operator that moves rows of `hidden` elements of `dtype`."""

    hidden: int = 7168
    dtype: str = "bf16"

    @property
    def out_dtype(self) -> torch.dtype:
        """dtype of combined rows."""
        return DTYPES[self.dtype]

    @property
    def capacity(self) -> int:
        """Capacity of the operator, the largest size."""
        return max(self.tokens)


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a run.

    Attributes:
        refused: Variants that are not supported, with reasons.
        problem: A failed check, after which nothing is timed.
    """

    case: Case
    machine: dict[str, Any]
    measured: list[Measurement] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    problem: str | None = None


def on_ranks(
    case: Case, body: Callable[..., Any], *args: Any, seconds: float = LIMIT_SECONDS
) -> list[Any]:
    """Return `body(group, case, *args)` of each rank. Raises errors of `weft.launch`."""
    return launch(body, case, *args, ranks=case.ranks, device=case.device, timeout=seconds)


def run(case: Case, *, quiet: bool = False) -> Report:
    """Check and time every variant at every size. Raises errors of `weft.launch`."""
    return Report(case, **on_ranks(case, rank_body, quiet)[0])


def rank_body(group: Group, case: Case, quiet: bool) -> dict[str, Any]:
    """Run the case on one rank; return Report's fields, equal on all ranks."""
    measured: list[Measurement] = []
    refused: list[str] = []
    problem = None
    with contextlib.closing(case.trials(group)) as trials:
        for trial in trials:
            name = f"{trial.variant}, {trial.tokens} tokens"
            if isinstance(trial, Rejection):
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
            measured.append(Measurement(trial.variant, trial.tokens, method, us, trial.facts()))
            group.barrier()  # a peer may still be reading from this rank's memory
        group.barrier()
    if not measured and problem is None:
        problem = "; ".join(refused)
    machine = describe_machine(gpu_names(group))
    return {"machine": machine, "measured": measured, "refused": refused, "problem": problem}


def first_problem(group: Group, problem: str | None) -> str | None:
    """Return the first problem of any rank, so that all ranks stop together."""
    return next((each for each in group.all_gather(problem) if each), None)


def gpu_names(group: Group) -> list[str]:
    """Return the name of each rank's GPU, empty for CPU ranks. Collective."""
    cuda = group.device.type == "cuda"
    name = torch.cuda.get_device_name(group.device) if cuda else ""
    return [gpu for gpu in group.all_gather(name) if gpu]


def synchronize_ranks(group: Group) -> None:
    """Synchronize this rank's device, then all ranks."""
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    group.barrier()


def poison(tensor: torch.Tensor) -> None:
    """Overwrite a tensor with bytes that no correct result has."""
    if tensor.dtype.is_floating_point:
        tensor.view(torch.uint8).fill_(POISON)
    else:  # packed scales have strides
        tensor.fill_(-1)


def first_row_difference(name: str, rank: int, got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Return the first token whose row differs in a byte, with both values, or None.

    `got` and `want` are `[tokens, columns]` of one dtype.
    """
    ours, theirs = (each.clone(memory_format=torch.contiguous_format) for each in (got, want))
    differ = ours.view(torch.uint8) != theirs.view(torch.uint8)
    rows = differ.any(dim=1).nonzero()
    if not len(rows):
        return None
    token = int(rows[0])
    columns = differ[token].view(-1, got.itemsize).any(dim=1).nonzero().flatten()[:4].tolist()
    return (
        f"rank {rank}: {name} of token {token} of {len(got)} is "
        f"{got[token].double()[columns].tolist()} in columns {columns}, but the reference is "
        f"{want[token].double()[columns].tolist()}"
    )


def measure(group: Group, calls: Calls, *, samples: int, graph: bool) -> tuple[str, SamplesOfRank]:
    """Return the method, and every rank's samples. Collective; all ranks make equal calls.

    Args:
        group: The ranks.
        calls: The calls to time.
        samples: Replays of a graph (or rounds of CALLS eager calls) on CUDA, single calls on CPU.
        graph: Whether to capture on CUDA. CPU ranks have no graphs.
    """
    if group.device.type == "cuda":
        method, us = _on_cuda(group, calls, samples, graph=graph and calls.graph)
    else:
        method, us = _on_cpu(group, calls, samples)
    ranks: list[dict[str, list[float]]] = group.all_gather(us)
    return method, {name: [each[name] for each in ranks] for name in us}


Times: TypeAlias = tuple[str, dict[str, list[float]]]  # method; us of each step, the whole last


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
    us = {name: [times[i] for times in rounds] for i, name in enumerate(calls.steps)}
    us[calls.whole] = [sum(times) for times in rounds]
    return f"host clock, {samples} calls with a barrier before each", us


def _on_cuda(group: Group, calls: Calls, samples: int, *, graph: bool) -> Times:
    _warm_up(calls)

    def run_all() -> None:
        for _ in range(CALLS):
            calls()

    whole = rounds_of(group, capture(run_all).replay if graph else run_all, samples)
    us = _split(group, calls, samples, graph=graph) if len(calls.steps) > 1 else {}
    us[calls.whole] = whole
    if graph:
        return f"CUDA graph of {CALLS} calls, {samples} replays", us
    return f"eager, CUDA events, {samples} rounds of {CALLS} calls", us


def _warm_up(calls: Calls) -> None:
    """Run eager calls on a side stream, as capture requires; they load modules and start NCCL."""
    new_stream: Callable[[], torch.cuda.Stream] = torch.cuda.Stream
    side = new_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            calls()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a graph of the work that `body` enqueues."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: a watchdog thread of torch.distributed may call the driver meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    return graph


def make_events(count: int, **kind: bool) -> list[torch.cuda.Event]:
    """Return events that record timestamps."""
    new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return [new_event(enable_timing=True, **kind) for _ in range(count)]


def rounds_of(group: Group, round_: Callable[[], None], samples: int) -> list[float]:
    """Return the us per call of `samples` rounds that are queued without a pause.

    One more round runs first and absorbs the skew between ranks.
    """
    marks = make_events(samples + 1)
    group.barrier()
    round_()
    marks[0].record()
    for mark in marks[1:]:
        round_()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e3 / CALLS for before, after in pairwise(marks)]


def _split(group: Group, calls: Calls, samples: int, *, graph: bool) -> dict[str, list[float]]:
    """Return the us of each step: the mean over a round's calls except the first.

    The first call contains the skew between ranks that synchronizing the hosts causes.
    """
    steps, count = list(calls.steps.values()), len(calls.steps)
    # A graph records external events at every replay.
    marks = make_events(count * CALLS + 1, external=graph)

    def run_all() -> None:
        for mark, step in zip(marks, steps * CALLS, strict=False):
            mark.record()
            step()
        marks[-1].record()

    round_ = capture(run_all).replay if graph else run_all
    times: dict[str, list[float]] = {name: [] for name in calls.steps}
    for _ in range(samples):
        group.barrier()
        round_()
        torch.cuda.synchronize()
        spans = [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]
        for step, us in enumerate(times.values()):
            us.append(sum(spans[count + step :: count]) / (CALLS - 1))
    return times
