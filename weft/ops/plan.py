"""How many CTAs share the work of a call, and of how many threads.

Local to a rank: peers may choose differently. The numbers are from sweeps on 8 x H200, hidden 7168,
2026-11-20 (docs/measuring.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LARGEST = 512  # threads of a dispatch CTA
SMALLEST = 64
GRID_LIMIT = 65535  # pieces of a row; a CTA takes more of them in turn
PIECE = 128  # threads of a combine CTA
PIECES_PER_SM = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch: `workers` x `chunks` CTAs of `threads`.

    A worker takes tokens in turn, a chunk takes part of each row.
    """

    workers: int
    chunks: int
    threads: int


def plan_dispatch(tokens: int, vectors: int, *, sms: int, per_sm: Callable[[int], int]) -> Plan:
    """Split rows of `vectors` 16-byte words over the CTAs that push them.

    Few tokens: one SM pushes about 36 GB/s and the GPU 334, so a row is cut into as many pieces as
    fill the SMs, down to `SMALLEST` threads each. Many: the whole resident grid takes turns.

    per_sm: resident CTAs of one SM, by threads of a CTA.
    """
    chunks = -(-vectors // LARGEST)
    if tokens * chunks < sms:
        chunks = max(chunks, min(sms // max(tokens, 1), -(-vectors // SMALLEST)))
    threads = min(LARGEST, max(SMALLEST, _whole_warps(-(-vectors // chunks))))
    chunks = min(-(-vectors // threads), GRID_LIMIT)
    resident = max(1, sms * max(1, per_sm(threads)) // chunks)
    return Plan(workers=max(1, min(tokens, resident)), chunks=chunks, threads=threads)


def plan_combine(tokens: int, vectors: int, *, sms: int, per_sm: Callable[[int], int]) -> Plan:
    """Split rows of `vectors` 16-byte words over the CTAs that pull them.

    Every thread has a load to each peer in flight, so few threads fill the links, and more only
    queue: twelve CTAs of 64 an SM cost 8 % against four at 128 tokens. At most two pieces an SM are
    taken one after the other (30.3 against 31.6 us a pair at 32 tokens).
    """
    threads = min(PIECE, max(SMALLEST, _whole_warps(vectors)))
    chunks = -(-vectors // threads)
    deep = 1 if tokens * chunks <= 2 * sms else PIECES_PER_SM
    resident = max(1, sms * max(1, min(deep, per_sm(threads))) // chunks)
    return Plan(workers=max(1, min(tokens, resident)), chunks=chunks, threads=threads)


def _whole_warps(threads: int) -> int:
    return -(-threads // 32) * 32
