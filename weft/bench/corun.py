"""Co-runs of calls and a matmul on one GPU: what each costs the other. CUDA only.

The one-sided kernels are built for `num_sms` SMs, and cuBLASLt is limited to the others. A graph of
matmuls runs on a stream of its own for longer than the calls take, which are replayed meanwhile. A
figure counts only if matmuls ran from before the first timed call until after the last one.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from weft.bench.case import Case
from weft.bench.clock import CALLS, Calls, Samples, capture, events, external_events
from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from weft.memory import Group

ALONE = 300  # matmuls timed alone, after as many: half a second, so that clocks settle
WINDOW_US = 60_000.0  # at least so long are calls replayed: it holds dozens of matmuls
SLACK = 3.0  # matmuls last so many times as long as the calls would take without them
ATTEMPTS = 3  # each with twice the matmuls of the one before


def measure_corun(
    group: Group, call: Calls, case: Case, *, samples: int, call_us: float
) -> Samples:
    """Time calls that run together with matmuls. Collective; all ranks make as many calls.

    call_us: what a call takes alone, in us, equal on all ranks.
    Returns us of "call" and "matmul" in the co-run; of "matmul_limited" alone on the SMs that the
    calls leave; of "matmul_alone" alone on all SMs. There are no times where the matmuls ended
    before the calls did; the method says so.
    Raises InvalidArgument where no SM is left to the matmul, or torch cannot limit or mark it.
    """
    matmul = Matmul(group.device, case.matmul_size, case.num_sms or 0)
    alone, limited = matmul.alone(spare=0), matmul.alone(spare=matmul.spare)
    make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
    stream = make(priority=-1)  # a call that waits for an SM gets the next free one

    def every() -> None:
        for _ in range(CALLS):
            call()

    calls = _Queue(capture(every, stream), stream)
    rounds = max(samples, math.ceil(WINDOW_US / (CALLS * call_us)))
    span = SLACK * (rounds + 1) * CALLS * call_us
    count = max(4, math.ceil(span / statistics.median(limited)))
    for _ in range(ATTEMPTS):
        found = _together(group, calls, matmul.queue(count, spare=matmul.spare), rounds)
        if all(group.all_gather(found is not None)) and found is not None:
            times = {"matmul_alone": alone, "matmul_limited": limited}
            return Samples(
                f"co-run with {matmul.name}: {rounds} replays of {CALLS} calls while matmuls run "
                f"on {matmul.sms - matmul.spare} of {matmul.sms} SMs",
                {"call": found[0], "matmul": found[1], **times},
            )
        count *= 2
    return Samples(
        f"co-run with {matmul.name}: no figure, {count // 2} matmuls ended before {rounds} replays "
        f"of {CALLS} calls; take fewer tokens or --iters",
        {},
    )


@dataclass(frozen=True, slots=True)
class _Queue:
    """A graph, the stream that it runs on, and the marks within it."""

    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream
    marks: tuple[torch.cuda.Event, ...] = ()

    def replay(self) -> None:
        with torch.cuda.stream(self.stream):
            self.graph.replay()


class Matmul:
    """`size`^3 of bf16 random numbers on a stream of its own, `spare` SMs left alone."""

    def __init__(self, device: torch.device, size: int, num_sms: int) -> None:
        self.sms = int(torch.cuda.get_device_properties(device).multi_processor_count)
        self.spare, self.name = num_sms, f"matmul {size}^3 bf16"
        if not 0 < num_sms < self.sms:
            raise InvalidArgument(
                f"num_sms is {num_sms} and this GPU has {self.sms} SMs; the co-running matmul "
                f"needs one at least: choose 1..{self.sms - 1}"
            )
        self._a, self._b = (torch.randn((size, size), device=device).bfloat16() for _ in "ab")
        self._out = torch.empty_like(self._a)
        make: Callable[[], torch.cuda.Stream] = torch.cuda.Stream
        self._stream = make()
        self._stream.wait_stream(torch.cuda.current_stream())

    def queue(self, count: int, *, spare: int) -> _Queue:
        """Return a graph of `count` matmuls, with a mark before each and one behind all."""
        marks = external_events(count + 1)
        if marks is None:
            raise InvalidArgument(
                f"torch {torch.__version__} has no events that graphs record; a co-run "
                "needs torch.cuda.Event(external=True): update torch, or leave --corun out"
            )

        def matmuls() -> None:
            for mark in marks[:-1]:
                mark.record()
                self._multiply()
            marks[-1].record()

        with _limited(spare):
            with torch.cuda.stream(self._stream):
                self._multiply()  # loads the kernel and makes the workspace before the capture
            torch.cuda.synchronize()
            return _Queue(capture(matmuls, self._stream), self._stream, tuple(marks))

    def alone(self, *, spare: int) -> list[float]:
        """us of each matmul alone, at the clocks that a long run of them has."""
        queue = self.queue(ALONE, spare=spare)
        queue.replay()
        queue.replay()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) * 1e3 for a, b in pairwise(queue.marks)]

    def _multiply(self) -> None:
        torch.mm(self._a, self._b, out=self._out)


def _together(
    group: Group, calls: _Queue, matmuls: _Queue, rounds: int
) -> tuple[list[float], list[float]] | None:
    """us of a call in each round of calls, and of each matmul that ran wholly during them.

    None where matmuls did not run all the time. A first round swallows the skew between ranks.
    """
    origin, *marks = events(rounds + 2)
    torch.cuda.synchronize()
    group.barrier()
    with torch.cuda.stream(matmuls.stream):
        origin.record()
    matmuls.replay()
    with torch.cuda.stream(calls.stream):
        calls.replay()
        marks[0].record()
        for mark in marks[1:]:
            calls.replay()
            mark.record()
    torch.cuda.synchronize()
    first, *_, last = (origin.elapsed_time(mark) for mark in marks)
    starts = [origin.elapsed_time(mark) for mark in matmuls.marks]
    inside = [(b - a) * 1e3 for a, b in pairwise(starts) if first <= a and b <= last]
    if not inside or starts[0] > first or starts[-1] < last:
        return None
    return [a.elapsed_time(b) * 1e3 / CALLS for a, b in pairwise(marks)], inside


@contextlib.contextmanager
def _limited(spare: int) -> Iterator[None]:
    """What is captured inside multiplies with cuBLASLt and leaves `spare` SMs alone."""
    limit = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if limit is None:
        raise InvalidArgument(
            f"torch {torch.__version__} cannot limit the SMs of a matmul; --corun needs "
            "a torch that has torch._C._set_sm_carveout_experimental"
        )
    library = torch.backends.cuda.preferred_blas_library()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls both settings experimental
        torch.backends.cuda.preferred_blas_library("cublaslt")
        limit(spare or None)
    try:
        yield
    finally:
        limit(None)
        torch.backends.cuda.preferred_blas_library(library)
