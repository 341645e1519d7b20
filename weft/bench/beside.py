"""Calls and a matrix product on one GPU: what each costs the other. CUDA only.

The one-sided kernels were built for `num_sms` SMs; cuBLASLt is told to use that many less than
there are. Products stand one behind the other in a graph on a stream of their own, for longer than
the calls take, and calls are replayed meanwhile. A figure counts only if products ran from before
the first timed call until after the last one.
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

ALONE = 300  # products timed without company, after as many: half a second, so that clocks settle
WINDOW_US = 60_000.0  # at least so long are calls replayed: it holds dozens of products
SLACK = 3.0  # products last so many times as long as the calls would take without them
ATTEMPTS = 3  # each with twice the products of the one before


def measure_beside(
    group: Group, call: Calls, case: Case, *, samples: int, call_us: float
) -> Samples:
    """Time calls beside products. Collective; every rank makes the same number of calls.

    call_us: what a call takes without company, in us, equal on all ranks.
    Returns us of "call" beside products; of "product" beside calls; of "product_limited" alone on
    the SMs that are left to it; of "product_alone" alone on all SMs. No times where products did
    not last; the method says so.
    Raises InvalidArgument where no SM is left to the product, or torch cannot limit or mark it.
    """
    product = Product(group.device, case.matmul_size, case.num_sms or 0)
    alone, limited = product.alone(spare=0), product.alone(spare=product.spare)
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
        found = _together(group, calls, product.queue(count, spare=product.spare), rounds)
        if all(group.all_gather(found is not None)) and found is not None:
            times = {"product_alone": alone, "product_limited": limited}
            return Samples(
                f"beside {product.name}: {rounds} replays of {CALLS} calls while products run on "
                f"{product.sms - product.spare} of {product.sms} SMs",
                {"call": found[0], "product": found[1], **times},
            )
        count *= 2
    return Samples(
        f"beside {product.name}: no figure, {count // 2} products ended before {rounds} replays of "
        f"{CALLS} calls; take fewer tokens or --iters",
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


class Product:
    """`size`^3 of bf16 random numbers on a stream of its own, `spare` SMs left alone."""

    def __init__(self, device: torch.device, size: int, num_sms: int) -> None:
        self.sms = int(torch.cuda.get_device_properties(device).multi_processor_count)
        self.spare, self.name = num_sms, f"matmul {size}^3 bf16"
        if not 0 < num_sms < self.sms:
            raise InvalidArgument(
                f"num_sms is {num_sms} and this GPU has {self.sms} SMs; the product beside needs "
                f"one at least: choose 1..{self.sms - 1}"
            )
        self._a, self._b = (torch.randn((size, size), device=device).bfloat16() for _ in "ab")
        self._out = torch.empty_like(self._a)
        make: Callable[[], torch.cuda.Stream] = torch.cuda.Stream
        self._stream = make()
        self._stream.wait_stream(torch.cuda.current_stream())

    def queue(self, count: int, *, spare: int) -> _Queue:
        """Return a graph of `count` products, with a mark before each and one behind all."""
        marks = external_events(count + 1)
        if marks is None:
            raise InvalidArgument(
                f"torch {torch.__version__} has no events that graphs record; a product beside "
                "needs torch.cuda.Event(external=True): update torch, or leave --beside out"
            )

        def products() -> None:
            for mark in marks[:-1]:
                mark.record()
                self._multiply()
            marks[-1].record()

        with _limited(spare):
            with torch.cuda.stream(self._stream):
                self._multiply()  # loads the kernel and makes the workspace before the capture
            torch.cuda.synchronize()
            return _Queue(capture(products, self._stream), self._stream, tuple(marks))

    def alone(self, *, spare: int) -> list[float]:
        """us of each product without company, at the clocks that a long run of them has."""
        queue = self.queue(ALONE, spare=spare)
        queue.replay()
        queue.replay()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) * 1e3 for a, b in pairwise(queue.marks)]

    def _multiply(self) -> None:
        torch.mm(self._a, self._b, out=self._out)


def _together(
    group: Group, calls: _Queue, products: _Queue, rounds: int
) -> tuple[list[float], list[float]] | None:
    """us of a call in each round of calls, and of each product that ran wholly beside them.

    None where products did not run all the time. A first round swallows the skew between ranks.
    """
    origin, *marks = events(rounds + 2)
    torch.cuda.synchronize()
    group.barrier()
    with torch.cuda.stream(products.stream):
        origin.record()
    products.replay()
    with torch.cuda.stream(calls.stream):
        calls.replay()
        marks[0].record()
        for mark in marks[1:]:
            calls.replay()
            mark.record()
    torch.cuda.synchronize()
    first, *_, last = (origin.elapsed_time(mark) for mark in marks)
    starts = [origin.elapsed_time(mark) for mark in products.marks]
    beside = [(b - a) * 1e3 for a, b in pairwise(starts) if first <= a and b <= last]
    if not beside or starts[0] > first or starts[-1] < last:
        return None
    return [a.elapsed_time(b) * 1e3 / CALLS for a, b in pairwise(marks)], beside


@contextlib.contextmanager
def _limited(spare: int) -> Iterator[None]:
    """What is captured inside multiplies with cuBLASLt and leaves `spare` SMs alone."""
    limit = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if limit is None:
        raise InvalidArgument(
            f"torch {torch.__version__} cannot limit the SMs of a matrix product; --beside needs "
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
