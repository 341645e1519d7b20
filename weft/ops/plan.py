"""How many CTAs share the work of a call, and of how many threads. Local to a rank: peers may choose differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SMALLEST = 64  # threads of the smallest CTA worth launching


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch: `workers` x `chunks` CTAs of `threads`; a worker takes tokens in turn, a chunk part of a row."""

    workers: int
    chunks: int
    threads: int


def plan(
    tokens: int, vectors: int, *, sms: int, max_threads: int, per_sm: Callable[[int], int]
) -> Plan:
    """Split rows of `vectors` 16-byte words over CTAs.

    Few tokens: one SM moves about 36 GB/s over NVLink and the GPU 334 (H200, 2026-11-20), so a row is cut into
    as many pieces as fill the SMs, down to `SMALLEST` threads each. Many tokens: a grid that is resident as a
    whole takes them in turn, so that each CTA waits for its peers once.

    per_sm: resident CTAs of one SM, by threads of a CTA.
    """
    chunks = -(-vectors // max_threads)
    if tokens * chunks < sms:
        chunks = max(chunks, min(sms // max(tokens, 1), -(-vectors // SMALLEST)))
    threads = max(SMALLEST, _whole_warps(-(-vectors // chunks)))
    chunks = -(-vectors // threads)
    resident = max(1, sms * max(1, per_sm(threads)) // chunks)
    return Plan(workers=max(1, min(tokens, resident)), chunks=chunks, threads=threads)


def _whole_warps(threads: int) -> int:
    return -(-threads // 32) * 32
