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
STRIP = 512  # columns that a warp pushes, or sums, at a time
FP8_PIECES_PER_SM = 4  # CTAs of a combine by FP8, one of which sums
MANY_PER_SM = 200  # strips that may have to be pushed: from so many on an SM has one CTA less
MOST_STRIPS = 8  # that one warp pushes at once; max_strips in alltoall/combine_fp8.cuh


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch: `workers` x `chunks` CTAs of `threads`.

    A worker takes tokens in turn, a chunk takes part of each row. Where CTAs differ by what they
    do: a coordinator, then `pushers`, and the rest sum; a warp pushes `strips` strips at a time.
    """

    workers: int
    chunks: int
    threads: int
    pushers: int = 0
    strips: int = 0


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


def plan_combine_fp8(
    tokens: int, slots: int, hidden: int, *, sms: int, per_sm: Callable[[int], int], whole: bool
) -> Plan:
    """Divide the CTAs of a combine by FP8 into those that push rows and those that sum them.

    Those that push come first and wait for nobody, so the grid need not be resident; it is, because
    who waits outside sums nothing. A warp takes one strip at a time where there are few, else up to
    eight: scales of strips that go together share a packet, and the sums of the last rows begin
    when the rows that are pushed at the same time have come.

    slots: rows that may have to be pushed.   per_sm: resident CTAs of one SM, by threads of a CTA.
    whole: `sms` are all that the GPU has.
    """
    warps, strips = PIECE // 32, -(-hidden // STRIP)
    # Measured on 4 x H200, hidden 7168, 2026-11-21, in one run: two CTAs an SM that push took
    # 81.0 us a pair where three took 83.7, at 512 tokens (217 strips an SM; the same dispatch
    # differed by 1.9 us); as long at 128 (54), more below. Other sizes, and 8 ranks, where this
    # means 236 tokens and more, are inferred. Fewer SMs, and a half that only pushes, were not
    # timed: as before.
    many = whole and tokens > 0 and slots * strips >= MANY_PER_SM * sms
    most = FP8_PIECES_PER_SM - 1 if many else FP8_PIECES_PER_SM
    resident = max(3, sms * max(1, min(most, per_sm(PIECE))))
    receivers = min(-(-tokens * strips // warps), resident // most or 1)
    pushers = max(1, min(-(-slots * strips // warps), resident - receivers - 1))
    at_once = min(strips, MOST_STRIPS, max(1, slots * strips // (pushers * warps)))
    at_once = -(-strips // -(-strips // at_once))  # fragments of one length
    return Plan(1 + pushers + receivers, 1, PIECE, pushers, at_once)


def plan_sums(tokens: int, hidden: int, *, sms: int, per_sm: Callable[[int], int]) -> Plan:
    """The receiving half of a combine by FP8: one CTA waits for the peers, the rest sum."""
    units = -(-tokens * -(-hidden // STRIP) // (PIECE // 32))
    resident = sms * max(1, min(PIECES_PER_SM, per_sm(PIECE)))
    return Plan(1 + min(units, resident), 1, PIECE, 0, 1)


def _whole_warps(threads: int) -> int:
    return -(-threads // 32) * 32
