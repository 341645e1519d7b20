# SPDX-License-Identifier: Apache-2.0
"""Benchmark harness: start ranks, check each trial over poisoned memory, time and recheck it.

CUDA: a graph of CALLS calls is replayed without pauses, with an event after each replay, so times
include neither host overhead nor skew between ranks. The times of a call's steps come from a second
graph with events between the steps. These events add a little time, so quote the total time.
CPU: the host clock is read around each step, with a barrier before every sample.
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
MIN_REPLAYS = 11  # minimum number of samples for a meaningful median
RUN_TIMEOUT = 3600.0  # seconds
TIMEOUT = 30.0  # of operators, in seconds: ranks that share cores may be late
POISON = 0xFF  # a NaN in every float type that is sent

Step: TypeAlias = Callable[[], object]
SamplesOfRank: TypeAlias = dict[str, list[list[float]]]  # phase -> samples in us, by rank


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A collective call to time, bound to static inputs.

    Attributes:
        steps: Steps of the call by phase name, in order.
        total_phase: Phase name of the whole call.
        capturable: Whether the steps can be captured in a CUDA graph.
    """

    steps: Mapping[str, Step]
    total_phase: str = "call"
    capturable: bool = True

    def __call__(self) -> None:
        """Run all steps."""
        for step in self.steps.values():
            step()


@dataclass(frozen=True, slots=True)
class Measurement:
    """Timing of one variant at one size.

    Attributes:
        method: Description of the timing method.
        samples_us: Samples of each phase; the total phase is last.
        metadata: Counters of the trial.
    """

    variant: str
    tokens: int
    method: str
    samples_us: SamplesOfRank
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SkippedVariant:
    """A variant that does not support a size or layer; identical on all ranks."""

    variant: str
    tokens: int
    reason: str


class Trial:
    """One variant at one size, with its inputs. All methods are collective."""

    group: Group
    variant: str
    tokens: int
    outputs: list[torch.Tensor]

    def timed_call(self) -> TimedCall:
        """Return the call to time."""
        raise NotImplementedError

    def check(self) -> str | None:
        """Run the call on poisoned memory and describe the first wrong result, or return None."""
        self.poison()
        self.timed_call()()
        return self.compare()

    def poison(self) -> None:
        """Poison the outputs, so that stale results are detected."""
        for output in self.outputs:
            poison(output)
        synchronize_ranks(self.group)

    def compare(self) -> str | None:
        """Describe the first difference between the outputs and the reference, or return None."""
        raise NotImplementedError

    def metadata(self) -> dict[str, Any]:
        """Return counters as JSON values. Raises errors that the device recorded."""
        raise NotImplementedError


Trials: TypeAlias = Generator[Trial | SkippedVariant, None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Parameters of one run, equal on all ranks. Subclasses add those of an operator.

    Attributes:
        tokens: Sizes to measure, in tokens per rank.
        samples: Timed samples per size.
        graph: Whether to use CUDA graphs instead of eager calls.
        seed: Seed of inputs and routing.
        num_sms: SMs that the kernels may use, or None for all.
        programmatic_launch: Whether to use programmatic dependent launch.
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
    total_phase: ClassVar[str] = "call"  # phase name of the whole call
    check_description: ClassVar[str]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise InvalidArgument("nothing to measure: pass at least one number of tokens")
        if min(self.tokens) < 1:
            raise InvalidArgument(f"tokens is {min(self.tokens)}; it must be at least 1")
        if not 1 <= self.samples <= 5000:
            raise InvalidArgument(f"samples is {self.samples}; it must be in 1..5000")
        if self.device == "cuda" and self.graph and self.samples < MIN_REPLAYS:
            raise InvalidArgument(
                f"{self.samples} replays of the graph; a median needs at least {MIN_REPLAYS}"
            )
        if self.num_sms is not None and self.device != "cuda":
            raise InvalidArgument(
                f"num_sms is {self.num_sms} on {self.device} ranks, but it limits GPU kernels: "
                "omit it"
            )

    def row_seed(self, tokens: int, rank: int) -> int:
        """Return the seed of one rank's rows."""
        return (self.seed * 7919 + tokens) * 64 + rank

    def trials(self, group: Group) -> Trials:
        """Yield every variant at every size. Collective.

        The operator of a trial is open until the next trial is requested.
        """
        raise NotImplementedError

    def baseline_case(self) -> Case | None:
        """Return the equivalent case for other libraries, or None if there is none."""
        return self

    def describe(self) -> str:
        """Return a title with the sizes and options."""
        raise NotImplementedError

    def phase_bytes(self, measurement: Measurement, phase: str) -> tuple[float, float]:
        """Return the logical bytes of a phase, and the bytes that the busiest rank transfers."""
        raise NotImplementedError

    def floor_us(self, measurement: Measurement, gpus: list[str]) -> float | None:
        """Return the minimum time of the whole call on this hardware in us, or None if unknown."""
        raise NotImplementedError

    def describe_floor(self) -> str:
        """Return the formula of `floor_us` as text."""
        raise NotImplementedError

    def extra_columns(self, measurement: Measurement) -> dict[str, float | str]:
        """Return the operator's own columns of a table row."""
        return {}

    def format_notes(self, measurements: Sequence[Measurement]) -> list[str]:
        """Return lines to print below the table."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsCase(Case):
    """Parameters of a run whose rows have `hidden` elements of `dtype`."""

    hidden: int = 7168
    dtype: str = "bf16"

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of the results."""
        return DTYPES[self.dtype]

    @property
    def capacity(self) -> int:
        """Maximum number of tokens per rank."""
        return max(self.tokens)


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a run.

    Attributes:
        machine: Result of `describe_machine`.
        skipped: Unsupported variants and the reasons.
        error: Description of a failed check, which ended the run.
    """

    case: Case
    machine: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    error: str | None = None


def run_on_ranks(
    case: Case, body: Callable[..., Any], *args: Any, timeout: float = RUN_TIMEOUT
) -> list[Any]:
    """Run `body(group, case, *args)` on every rank and return the results by rank."""
    return launch(body, case, *args, ranks=case.ranks, device=case.device, timeout=timeout)


def run(case: Case, *, quiet: bool = False) -> Report:
    """Start ranks, and check and time every variant at every size."""
    return Report(case, **run_on_ranks(case, measure_on_rank, quiet)[0])


def measure_on_rank(group: Group, case: Case, quiet: bool) -> dict[str, Any]:
    """Check and time every variant at every size on one rank.

    Returns:
        The fields of `Report` other than `case`, identical on all ranks.
    """
    measurements: list[Measurement] = []
    skipped: list[str] = []
    error = None
    with contextlib.closing(case.trials(group)) as trials:
        for trial in trials:
            name = f"{trial.variant}, {trial.tokens} tokens"
            if isinstance(trial, SkippedVariant):
                skipped.append(f"{name}: {trial.reason}")
                continue
            if group.rank == 0 and not quiet:
                print(f"weft bench {case.operator}: {name}", file=sys.stderr, flush=True)
            if error := gather_first_error(group, trial.check()):
                error = f"{name}: {error}"
                break
            trial.poison()
            method, us = measure(group, trial.timed_call(), samples=case.samples, graph=case.graph)
            if error := gather_first_error(group, trial.compare()):
                error = f"{name}: after timing, {error}"
                break
            measurements.append(
                Measurement(trial.variant, trial.tokens, method, us, trial.metadata())
            )
            group.barrier()  # a peer may still be reading from this rank's memory
        group.barrier()
    if not measurements and error is None:
        error = "; ".join(skipped)
    machine = describe_machine(gather_gpu_names(group))
    return {
        "machine": machine,
        "measurements": measurements,
        "skipped": skipped,
        "error": error,
    }


def gather_first_error(group: Group, error: str | None) -> str | None:
    """Return the error of the lowest rank that has one, or None. Collective."""
    return next((text for text in group.all_gather(error) if text), None)


def gather_gpu_names(group: Group) -> list[str]:
    """Return the GPU name of each rank; empty for CPU ranks. Collective."""
    is_cuda = group.device.type == "cuda"
    name = torch.cuda.get_device_name(group.device) if is_cuda else ""
    return [gpu for gpu in group.all_gather(name) if gpu]


def synchronize_ranks(group: Group) -> None:
    """Wait for the work of this rank's device, then for all ranks."""
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    group.barrier()


def poison(tensor: torch.Tensor) -> None:
    """Overwrite a tensor with a pattern that no correct result contains."""
    if tensor.dtype.is_floating_point:
        tensor.view(torch.uint8).fill_(POISON)
    else:  # packed scales have strides
        tensor.fill_(-1)


def describe_first_difference(
    name: str, rank: int, actual: torch.Tensor, expected: torch.Tensor
) -> str | None:
    """Describe the first row that is not bitwise equal, or return None.

    Both tensors are `[tokens, columns]` of one dtype.
    """
    actual_bytes, expected_bytes = (
        tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for tensor in (actual, expected)
    )
    differs = actual_bytes != expected_bytes
    rows = differs.any(dim=1).nonzero()
    if not len(rows):
        return None
    token = int(rows[0])
    elements = differs[token].view(-1, actual.itemsize).any(dim=1)
    columns = elements.nonzero().flatten()[:4].tolist()
    return (
        f"rank {rank}: {name} of token {token} of {len(actual)} is "
        f"{actual[token].double()[columns].tolist()} in columns {columns}, but the reference is "
        f"{expected[token].double()[columns].tolist()}"
    )


def measure(
    group: Group, call: TimedCall, *, samples: int, graph: bool
) -> tuple[str, SamplesOfRank]:
    """Time a call on all ranks. Collective.

    Args:
        group: The ranks.
        call: The call to time.
        samples: On CUDA, number of replays of a graph of CALLS calls (or of CALLS eager calls); on
            CPU, number of calls.
        graph: Whether to capture a CUDA graph if the call is capturable.

    Returns:
        A description of the method, and the samples of every rank in us by phase.
    """
    if group.device.type == "cuda":
        method, us = _measure_cuda(group, call, samples, graph=graph and call.capturable)
    else:
        method, us = _measure_cpu(group, call, samples)
    us_by_rank: list[dict[str, list[float]]] = group.all_gather(us)
    return method, {phase: [rank_us[phase] for rank_us in us_by_rank] for phase in us}


Times: TypeAlias = tuple[str, dict[str, list[float]]]  # method, and us by phase


def _measure_cpu(group: Group, call: TimedCall, samples: int) -> Times:
    step_us = []  # by sample and step
    for _ in range(WARM_UP + samples):
        group.barrier()
        stamps = [time.perf_counter_ns()]
        for step in call.steps.values():
            step()
            stamps.append(time.perf_counter_ns())
        step_us.append([(end - start) / 1e3 for start, end in pairwise(stamps)])
    del step_us[:WARM_UP]
    us = {name: [sample[i] for sample in step_us] for i, name in enumerate(call.steps)}
    us[call.total_phase] = [sum(sample) for sample in step_us]
    return f"host clock, {samples} calls with a barrier before each", us


def _measure_cuda(group: Group, call: TimedCall, samples: int, *, graph: bool) -> Times:
    _warm_up(call)

    def run_calls() -> None:
        for _ in range(CALLS):
            call()

    total_us = time_rounds(group, capture(run_calls).replay if graph else run_calls, samples)
    us = _time_steps(group, call, samples, graph=graph) if len(call.steps) > 1 else {}
    us[call.total_phase] = total_us
    if graph:
        return f"CUDA graph of {CALLS} calls, {samples} replays", us
    return f"eager, CUDA events, {samples} rounds of {CALLS} calls", us


def _warm_up(call: TimedCall) -> None:
    """Run eager calls on a side stream before a capture; they load modules and start NCCL."""
    create_stream: Callable[[], torch.cuda.Stream] = torch.cuda.Stream
    stream = create_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def capture(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture the work that a function enqueues in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: the watchdog thread of torch.distributed may call the driver during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph


def create_events(num_events: int, **options: bool) -> list[torch.cuda.Event]:
    """Create CUDA events with timing."""
    create_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return [create_event(enable_timing=True, **options) for _ in range(num_events)]


def time_rounds(group: Group, run_round: Callable[[], None], samples: int) -> list[float]:
    """Time rounds of CALLS calls that are enqueued without a pause.

    An additional first round absorbs the skew between ranks.

    Returns:
        The us per call of each round.
    """
    events = create_events(samples + 1)
    group.barrier()
    run_round()
    events[0].record()
    for event in events[1:]:
        run_round()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 / CALLS for start, end in pairwise(events)]


def _time_steps(
    group: Group, call: TimedCall, samples: int, *, graph: bool
) -> dict[str, list[float]]:
    """Return the us of each step by sample: the mean over a round's calls except the first.

    The first call includes the skew between ranks after a host synchronization.
    """
    steps, num_steps = list(call.steps.values()), len(call.steps)
    # A graph records external events at every replay.
    events = create_events(num_steps * CALLS + 1, external=graph)

    def run_calls() -> None:
        for event, step in zip(events, steps * CALLS, strict=False):
            event.record()
            step()
        events[-1].record()

    run_round = capture(run_calls).replay if graph else run_calls
    us_by_step: dict[str, list[float]] = {name: [] for name in call.steps}
    for _ in range(samples):
        group.barrier()
        run_round()
        torch.cuda.synchronize()
        spans = [start.elapsed_time(end) * 1e3 for start, end in pairwise(events)]
        for index, step_us in enumerate(us_by_step.values()):
            step_us.append(sum(spans[num_steps + index :: num_steps]) / (CALLS - 1))
    return us_by_step
