"""Time per call when the caches hold nothing of it, as after a layer's other work.

CUDA: eager calls. Before each pair a buffer of twice the L2 is written, then the ranks meet in an
exchange of no tokens, so that no rank's figure holds another's delay; events stand before, between
and behind the two calls. CPU: the same with the host's clock, a buffer and a barrier.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from weft.bench.clock import Phases, Samples, events
from weft.ops.alltoall import AllToAll

if TYPE_CHECKING:
    from weft.memory import Group

MIN_SAMPLES = 30
# Writing so often takes about half a millisecond, in which the host queues the calls: what a launch
# costs on the host is then not in the figure.
WRITES = 16
CPU_BYTES = 64 << 20  # more than the caches that a rank can count on


class ColdClock:
    """Flushes the caches before each pair that it times. Collective. A context manager."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._buffer = flush_buffer(group.device)
        self._gate = _Gate(group) if group.device.type == "cuda" else None

    def __enter__(self) -> ColdClock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._gate is not None:
            self._gate.close()

    def measure(self, phases: Phases, *, samples: int) -> Samples:
        """Return this rank's times of at least MIN_SAMPLES pairs. Collective."""
        count = max(samples, MIN_SAMPLES)
        if self._gate is None:
            return self._on_host(phases, count)
        return self._on_gpu(phases, count, self._gate)

    def _on_gpu(self, phases: Phases, count: int, gate: _Gate) -> Samples:
        marks = [events(3) for _ in range(count + 1)]
        self._group.barrier()
        for start, middle, end in marks:
            for _ in range(WRITES):
                self._buffer.zero_()
            gate.meet()
            start.record()
            phases.dispatch()
            middle.record()
            phases.combine()
            end.record()
        torch.cuda.synchronize()
        size = self._buffer.numel() / 2**20
        found = Samples(f"cold: {count} eager calls, {size:.0f} MiB written before each")
        for start, middle, end in marks[1:]:  # the first one loads what is loaded only once
            found.dispatch.append(start.elapsed_time(middle) * 1e3)
            found.combine.append(middle.elapsed_time(end) * 1e3)
            found.pair.append(start.elapsed_time(end) * 1e3)
        return found

    def _on_host(self, phases: Phases, count: int) -> Samples:
        size = self._buffer.numel() / 2**20
        found = Samples(f"cold: {count} calls, {size:.0f} MiB written before each")
        for sample in range(count + 1):
            self._buffer.fill_(sample % 256)
            self._group.barrier()
            start = time.perf_counter_ns()
            phases.dispatch()
            middle = time.perf_counter_ns()
            phases.combine()
            end = time.perf_counter_ns()
            if sample:
                found.dispatch.append((middle - start) / 1e3)
                found.combine.append((end - middle) / 1e3)
                found.pair.append((end - start) / 1e3)
        return found


class _Gate:
    """A barrier of all ranks on the device that touches a few lines of the cache."""

    def __init__(self, group: Group) -> None:
        self._exchange = AllToAll(
            group, max_tokens=1, top_k=1, num_experts=group.size, hidden=8, timeout=30.0
        )
        self._x = torch.empty((0, 8), dtype=torch.bfloat16, device=group.device)
        self._ids = torch.empty((0, 1), dtype=torch.int32, device=group.device)
        self._out = torch.empty_like(self._x)

    def meet(self) -> None:
        """Let the stream wait until every rank's stream is here."""
        self._exchange.dispatch(self._x, self._ids)
        self._exchange.combine(out=self._out)

    def close(self) -> None:
        """Give the memory back."""
        self._exchange.close()


def flush_buffer(device: torch.device) -> torch.Tensor:
    """Return uint8 `[2 x L2]` on a GPU; writing it leaves nothing else in that cache."""
    size = CPU_BYTES
    if device.type == "cuda":
        size = 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    return torch.empty(size, dtype=torch.uint8, device=device)
