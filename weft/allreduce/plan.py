"""How many CTAs share the work of an all-reduce, of how many threads, in clusters of how many.

Local to a rank: peers may choose differently, and no choice changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from weft.errors import InvalidArgument

WARP = 32
LARGEST_CTA = 512  # launch bounds in reduce_source.py
LARGEST_CLUSTER = 8  # that every GPU from Hopper on can form
# CTAs of a cluster, by threads of a CTA -> CTAs that fit on the GPU at once.
Resident = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """A launch: `ctas` of `threads`, `cluster` of them to a row.

    pushers, reducers: of the two-shot backends, how many CTAs push rows and sum rows; the others
    finish rows, and so do pushers when they have pushed, if `pushers_finish`.
    """

    ctas: int
    threads: int
    cluster: int
    pushers: int = 0
    reducers: int = 0
    pushers_finish: bool = False


def plan_oneshot(tokens: int, vectors: int, *, sms: int, resident: Resident) -> ReducePlan:
    """One cluster a token, as wide as fills the SMs: one SM pushes only about 36 GB/s."""
    for widest in range(min(LARGEST_CLUSTER, max(1, sms // tokens)), LARGEST_CLUSTER + 1):
        for threads, cluster in _rows(vectors, widest):
            if resident(threads, cluster) >= cluster:
                return ReducePlan(tokens * cluster, threads, cluster)
    raise InvalidArgument(f"no cluster of this GPU holds a row of {16 * vectors} bytes")


def plan_twoshot(
    tokens: int, vectors: int, ranks: int, *, pieces: int, resident: Resident
) -> ReducePlan:
    """All CTAs fit at once: those that finish rows hold their places while they wait for sums.

    One piece, few rows: a row is a cluster's, so that few of them fill the SMs. Two pieces, many
    rows: a row is one CTA's, which meets in itself (8 x H200, 7168, 2026-11-20: 47.4 against 51.1
    us at 512 tokens, 169 against 177 at 2048, for 1 x 448 against 4 x 128 threads a row).
    """
    rows = -(-tokens // ranks)
    share = -(-vectors // pieces)
    threads, cluster, room = _roomy(share, LARGEST_CLUSTER if pieces == 1 else 1, resident)
    if room < 2 * cluster:
        raise InvalidArgument(f"no cluster of this GPU holds a row of {16 * vectors} bytes")
    # The fewer the ranks, the more of the work is summing: a rank owns more of the rows.
    share_of_sums = 3 if pieces == 1 else 2 + ranks / 4
    reducers = min(rows, max(1, int(room // cluster / share_of_sums))) * cluster
    wanted = -(-rows * (ranks - 1) * vectors // threads)
    pushers = min(room - reducers, -(-wanted // cluster) * cluster)
    return ReducePlan(pushers + reducers, threads, cluster, pushers, reducers, True)


def _roomy(vectors: int, widest: int, resident: Resident) -> tuple[int, int, int]:
    """(threads, cluster, CTAs that fit at once) of the first shape of which two clusters fit."""
    for most in range(widest, LARGEST_CLUSTER + 1):
        # Warps of a CTA: four at least, so that few CTAs make a row.
        for threads, cluster in _rows(vectors, min(most, max(1, -(-vectors // (4 * WARP))))):
            room = resident(threads, cluster) // cluster * cluster
            if room >= 2 * cluster:
                return threads, cluster, room
    return WARP, 1, 0


def _rows(vectors: int, widest: int) -> Iterator[tuple[int, int]]:
    """(threads, cluster) with a thread for each vector, in at most `widest` CTAs.

    The second has a power of two, for GPUs that form no other clusters; some CTAs of it may idle.
    """
    warps = -(-vectors // WARP)
    each = -(-warps // widest)
    cluster = -(-warps // each)
    if each * WARP <= LARGEST_CTA:
        yield each * WARP, cluster
        yield each * WARP, 1 << (cluster - 1).bit_length()
