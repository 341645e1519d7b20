"""Time per call when the caches hold nothing of it, as after a layer's other work.

CUDA: eager calls. Before each a buffer of twice the L2 is written, then the ranks meet in an
exchange of no tokens, so that no rank's figure holds another's delay; events stand before, between
and behind its steps. CPU: the same with the host's clock, a buffer and a barrier.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from weft.alltoall.operator import AllToAll
from weft.bench.clock import Calls, Samples, Step, events, host_us

if TYPE_CHECKING:
    from weft.memory import Group

MIN_SAMPLES = 30
# Writing so often takes about half a millisecond, in which the host queues the calls: what a launch
# costs on the host is then not in the figure.
WRITES = 16
CPU_BYTES = 64 << 20  # more than the caches that a rank can count on


class ColdClock:
    """Flushes the caches before each call that it times. Collective."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._buffer = flush_buffer(group.device)
        self._gate = _Gate(group) if group.device.type == "cuda" else None

    def close(self) -> None:
        """Give the memory back."""
        if self._gate is not None:
            self._gate.close()

    def measure(self, calls: Calls, *, samples: int) -> Samples:
        """Return this rank's times of at least MIN_SAMPLES calls. Collective."""
        count = max(samples, MIN_SAMPLES)
        names, steps = list(calls.steps), list(calls.steps.values())
        rounds = self._on_gpu(steps, count) if self._gate else self._on_host(steps, count)
        us = {name: [times[place] for times in rounds] for place, name in enumerate(names)}
        us[calls.whole] = [sum(times) for times in rounds]
        kind = "eager calls" if self._gate else "calls"
        size = self._buffer.numel() / 2**20
        return Samples(f"cold: {count} {kind}, {size:.0f} MiB written before each", us)

    def _on_gpu(self, steps: list[Step], count: int) -> list[list[float]]:
        assert self._gate is not None
        rounds = [events(len(steps) + 1) for _ in range(count + 1)]
        self._group.barrier()
        for marks in rounds:
            for _ in range(WRITES):
                self._buffer.zero_()
            self._gate.meet()
            marks[0].record()
            for step, mark in zip(steps, marks[1:], strict=True):
                step()
                mark.record()
        torch.cuda.synchronize()
        # The first one loads what is loaded only once.
        return [[a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)] for marks in rounds[1:]]

    def _on_host(self, steps: list[Step], count: int) -> list[list[float]]:
        rounds = []
        for sample in range(count + 1):
            self._buffer.fill_(sample % 256)
            self._group.barrier()
            rounds.append(host_us(steps))
        return rounds[1:]


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
