# SPDX-License-Identifier: Apache-2.0
"""All ranks' times on one clock, from causality alone.

A flag is sent before it is seen. With o_r to be added to rank r's clock, each flag from p to q says
    sent_p + o_p <= seen_q + o_q
so the fastest flag of many rounds bounds o_p - o_q from above and the fastest one the other way
from below: the midpoint errs by half the gap at most, as with NTP. Bounds by way of a third rank
count too (shortest paths); the offsets so found satisfy every single flag.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import InvalidArgument
from weft.runtime.timeline import Span


@dataclass(frozen=True, slots=True)
class Skew:
    """offsets_ns: to be added to each rank's times; rank 0's is 0.

    uncertainty_ns: by how much the difference of two ranks' offsets may be wrong, at most.
    tick_ns: the coarsest step of the ranks' clocks, as their stamps show it.
    """

    offsets_ns: tuple[float, ...]
    uncertainty_ns: float
    tick_ns: int

    def metadata(self) -> dict[str, Any]:
        """As the metadata of a Chrome trace has it."""
        return {
            "offsets_ns": [round(offset) for offset in self.offsets_ns],
            "uncertainty_ns": round(self.uncertainty_ns),
            "tick_ns": self.tick_ns,
        }


def estimate_skew(ranks: Sequence[Sequence[Span]]) -> Skew:
    """The skew of the ranks' clocks; `ranks[r]` are rank r's spans, of the same rounds.

    Raises InvalidArgument when two ranks share no finished round, or when their clocks drifted
    apart while the spans were taken.
    """
    tick = max(clock_tick(spans) for spans in ranks)
    bounds = _flag_bounds(ranks, tick)
    _refuse_drift(bounds)
    count = range(len(ranks))
    for via in count:
        for p in count:
            for q in count:
                bounds[p][q] = min(bounds[p][q], bounds[p][via] + bounds[via][q])
    _refuse_drift(bounds)
    lost = next((p for p in count if math.isinf(bounds[p][0] + bounds[0][p])), None)
    if lost is not None:
        raise InvalidArgument(
            f"ranks 0 and {lost} have no finished round in common; take their spans together"
        )
    offsets = tuple((bounds[p][0] - bounds[0][p]) / 2 for p in count)
    widest = max(bounds[p][q] + bounds[q][p] for p in count for q in count)
    return Skew(offsets, widest / 2, tick)


def _refuse_drift(bounds: Sequence[Sequence[float]]) -> None:
    """Two clocks of one speed leave room for some offset between every two ranks."""
    for p in range(len(bounds)):
        for q in range(p):
            gap = bounds[p][q] + bounds[q][p]
            if gap < 0:
                raise InvalidArgument(
                    f"the clocks of ranks {q} and {p} drifted apart by {-gap:.0f} ns or more "
                    "within these spans; take rounds that are closer together"
                )


def clock_tick(spans: Sequence[Span]) -> int:
    """The largest step, in ns, that all of one rank's stamps are multiples of; at least 1."""
    stamps = [
        stamp
        for span in spans
        for stamp in (span.start_ns, span.sent_ns, span.published_ns, span.end_ns)
        if stamp
    ]
    return max(1, math.gcd(*(stamp - stamps[0] for stamp in stamps))) if stamps else 1


def _flag_bounds(ranks: Sequence[Sequence[Span]], tick: int) -> list[list[float]]:
    """`bounds[p][q]`: the most that o_p - o_q can be, by the fastest flag from p to q.

    A stamp is the clock's last tick, so a flag may have been seen up to a tick after its stamp.
    """
    bounds = [[0.0 if p == q else math.inf for q in range(len(ranks))] for p in range(len(ranks))]
    sent = {(s.rank, s.phase, s.epoch): s.sent_ns for spans in ranks for s in spans if s.finished}
    for q, spans in enumerate(ranks):
        for span in spans:
            for p, seen in enumerate(span.arrived_ns):
                left = sent.get((p, span.phase, span.epoch))
                if span.finished and left is not None and p != q:
                    bounds[p][q] = min(bounds[p][q], seen - left + tick)
    return bounds
