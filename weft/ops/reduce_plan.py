"""How many CTAs share the work of an all-reduce, of how many threads, in clusters of how many.

Local to a rank: peers may choose differently, and no choice changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.errors import InvalidArgument

WARP = 32
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
        threads, cluster = _row(vectors, widest)
        if threads <= 512 and resident(threads, cluster) >= cluster:
            return ReducePlan(tokens * cluster, threads, cluster)
    raise InvalidArgument(f"no cluster of this GPU holds a row of {16 * vectors} bytes")


def plan_twoshot(
    tokens: int, vectors: int, ranks: int, *, pieces: int, resident: Resident
) -> ReducePlan:
    """All CTAs fit at once: those that finish rows hold their places while they wait for sums."""
    rows = -(-tokens // ranks)
    share = -(-vectors // pieces)
    for widest in range(LARGEST_CLUSTER // pieces, LARGEST_CLUSTER + 1):
        threads, cluster = _row(share, min(widest, max(1, -(-share // (4 * WARP)))))
        room = resident(threads, cluster) if threads <= 512 else 0
        if room >= 2 * cluster:
            break
    else:
        raise InvalidArgument(f"no cluster of this GPU holds a row of {16 * vectors} bytes")
    room = room // cluster * cluster
    reducers = min(rows, max(1, room // cluster // (3 if pieces == 1 else 4))) * cluster
    wanted = -(-rows * (ranks - 1) * vectors // threads)
    pushers = min(room - reducers, -(-wanted // cluster) * cluster)
    return ReducePlan(pushers + reducers, threads, cluster, pushers, reducers, True)


def _row(vectors: int, widest: int) -> tuple[int, int]:
    """(threads, cluster) with a thread for each vector, in at most `widest` CTAs."""
    warps = -(-vectors // WARP)
    each = -(-warps // widest)
    return each * WARP, -(-warps // each)
