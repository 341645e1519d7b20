# SPDX-License-Identifier: Apache-2.0
"""Clock offsets between ranks, estimated from the causality of flags.

A flag is sent before it is observed. With offset o_r of rank r's clock, a flag from p to q implies
    sent_p + o_p <= observed_q + o_q
so the fastest flag from p to q bounds o_p - o_q from above, and the fastest from q to p from below.
As in NTP, the error of the midpoint is at most half the gap. Bounds through other ranks are
included (shortest paths), so the resulting offsets satisfy every flag.
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
    """Clock offsets of all ranks.

    Attributes:
        offsets_ns: Nanoseconds to add to each rank's times; 0 for rank 0.
        uncertainty_ns: Maximum error of the difference of two offsets.
        tick_ns: Coarsest resolution of the ranks' clocks, derived from their stamps.
    """

    offsets_ns: tuple[float, ...]
    uncertainty_ns: float
    tick_ns: int

    def metadata(self) -> dict[str, Any]:
        """Return the fields as metadata of a Chrome trace."""
        return {
            "offsets_ns": [round(offset) for offset in self.offsets_ns],
            "uncertainty_ns": round(self.uncertainty_ns),
            "tick_ns": self.tick_ns,
        }


def estimate_skew(ranks: Sequence[Sequence[Span]]) -> Skew:
    """Estimate the clock offsets of the ranks.

    Args:
        ranks: Spans of each rank, of the same rounds.

    Raises:
        InvalidArgument: two ranks have no finished round in common, or their clocks drifted apart
            while the spans were recorded.
    """
    tick = max(compute_clock_tick(spans) for spans in ranks)
    bounds = _compute_flag_bounds(ranks, tick)
    _check_drift(bounds)
    indices = range(len(ranks))
    for via in indices:
        for p in indices:
            for q in indices:
                bounds[p][q] = min(bounds[p][q], bounds[p][via] + bounds[via][q])
    _check_drift(bounds)
    unbounded = next((p for p in indices if math.isinf(bounds[p][0] + bounds[0][p])), None)
    if unbounded is not None:
        raise InvalidArgument(
            f"ranks 0 and {unbounded} have no finished round in common; record their spans together"
        )
    offsets = tuple((bounds[p][0] - bounds[0][p]) / 2 for p in indices)
    max_gap = max(bounds[p][q] + bounds[q][p] for p in indices for q in indices)
    return Skew(offsets, max_gap / 2, tick)


def _check_drift(bounds: Sequence[Sequence[float]]) -> None:
    """Raise InvalidArgument if no constant offset satisfies the bounds of two ranks."""
    for p in range(len(bounds)):
        for q in range(p):
            gap = bounds[p][q] + bounds[q][p]
            if gap < 0:
                raise InvalidArgument(
                    f"the clocks of ranks {q} and {p} drifted apart by {-gap:.0f} ns or more "
                    "within these spans; record rounds that are closer together"
                )


def compute_clock_tick(spans: Sequence[Span]) -> int:
    """Compute the resolution of a rank's clock in ns: the GCD of its stamps, at least 1."""
    stamps = [
        stamp
        for span in spans
        for stamp in (span.start_ns, span.sent_ns, span.published_ns, span.end_ns)
        if stamp
    ]
    return max(1, math.gcd(*(stamp - stamps[0] for stamp in stamps))) if stamps else 1


def _compute_flag_bounds(ranks: Sequence[Sequence[Span]], tick: int) -> list[list[float]]:
    """Compute `bounds[p][q]`, the upper bound of o_p - o_q from the fastest flag from p to q.

    Stamps are rounded down to ticks, so a flag may have been observed up to a tick after its stamp.
    """
    bounds = [[0.0 if p == q else math.inf for q in range(len(ranks))] for p in range(len(ranks))]
    sent = {(s.rank, s.phase, s.epoch): s.sent_ns for spans in ranks for s in spans if s.finished}
    for q, spans in enumerate(ranks):
        for span in spans:
            for p, arrived_ns in enumerate(span.arrived_ns):
                sent_ns = sent.get((p, span.phase, span.epoch))
                if span.finished and sent_ns is not None and p != q:
                    bounds[p][q] = min(bounds[p][q], arrived_ns - sent_ns + tick)
    return bounds
