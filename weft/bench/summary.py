"""From samples to the figures of a row: statistics over ranks, bandwidths, floor and rivals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from weft.bench.cases import Settings
from weft.bench.clock import HALVES, PHASES
from weft.bench.limits import pair_floor_us
from weft.bench.moe import Measurement, Report
from weft.bench.peers import Peer

_ORDER = (*PHASES[:2], *HALVES, PHASES[2])


@dataclass(frozen=True, slots=True)
class Spread:
    """us per call: each statistic is taken over a rank's samples, then the slowest rank counts."""

    min: float
    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples_of_rank: Sequence[Sequence[float]]) -> Spread:
        """From every rank's samples."""
        return cls(
            min=max(min(samples) for samples in samples_of_rank),
            median=max(statistics.median(samples) for samples in samples_of_rank),
            p99=max(_p99(samples) for samples in samples_of_rank),
            max=max(max(samples) for samples in samples_of_rank),
        )


@dataclass(frozen=True, slots=True)
class Company:
    """A pair beside a matrix product, medians in us, slowest rank.

    product: beside the pairs; limited: alone on the SMs left to it; alone: alone on all SMs.
    slower, slower_limited: the product against each of these, on the rank where it is worst.
    """

    pair: float
    product: float
    limited: float
    alone: float
    slower: float
    slower_limited: float

    @classmethod
    def of(cls, times: dict[str, list[list[float]]] | None) -> Company | None:
        """From every rank's times (`bench.beside.Together`), or None where there are none."""
        if not times:
            return None
        ranks = {name: [statistics.median(each) for each in times[name]] for name in times}
        product, alone = ranks["product"], ranks["product_alone"]
        limited = ranks["product_limited"]
        return cls(
            pair=max(ranks["pair"]),
            product=max(product),
            limited=max(limited),
            alone=max(alone),
            slower=max(a / b for a, b in zip(product, alone, strict=True)),
            slower_limited=max(a / b for a, b in zip(product, limited, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One phase of one size.

    logical: GB/s of tokens x top_k rows, as if every expert were sent its own.
    wire: GB/s of the rows that the routing sends off the busiest rank.
    floor: least us on this hardware, ratio: median / floor; None where unknown.
    rivals: library -> us of a pair of this size.
    moved: bytes behind `wire`; 0 for a half that moves no rows.
    cold: median us with flushed caches, or None.  beside: with a matrix product, or None.
    """

    backend: str
    tokens: int
    phase: str
    us: Spread
    logical: float
    wire: float
    floor: float | None
    ratio: float | None
    rivals: dict[str, float]
    moved: int
    cold: float | None
    beside: Company | None = None


def rows_of(report: Report, peers: Sequence[Peer]) -> list[Row]:
    """Return a row for each phase of each measurement; rivals only beside GPUs."""
    rows = []
    for found in report.measurements:
        for phase in _ORDER:
            if phase in found.samples:
                rows.append(_row(report, found, phase, peers if report.machine["gpus"] else ()))
    return rows


def _row_bytes(settings: Settings, phase: str) -> int:
    """Bytes of a row that a phase moves; a half that only tells or only waits moves none."""
    sent, returned = settings.sent_bytes, settings.returned_bytes
    carrier = "combine_recv" if settings.combine_by == "pull" else "combine_send"
    known = {"dispatch": sent, "dispatch_send": sent, "combine": returned, carrier: returned}
    return sent + returned if phase == "pair" else known.get(phase, 0)


def _row(report: Report, found: Measurement, phase: str, peers: Sequence[Peer]) -> Row:
    traffic = found.traffic
    moved = _row_bytes(report.settings.of_backend(found.backend), phase)
    us = Spread.of(found.samples[phase])
    floor, rivals = None, {}
    if phase == "pair":
        floor = floor_of(report, found)
        rivals = {p.label: p.us[found.tokens] for p in peers if found.tokens in p.us}
    return Row(
        backend=found.backend,
        tokens=found.tokens,
        phase=phase,
        us=us,
        logical=traffic.chosen * moved / us.median / 1e3,
        wire=traffic.wire * moved / us.median / 1e3,
        floor=floor,
        ratio=None if floor is None else us.median / floor,
        rivals=rivals,
        moved=traffic.wire * moved,
        cold=Spread.of(found.cold[phase]).median if found.cold and phase in found.cold else None,
        beside=Company.of(found.beside) if phase == "pair" else None,
    )


def floor_of(report: Report, found: Measurement) -> float | None:
    """Return the least us of a pair of this size, or None where nothing was measured."""
    wire, settings = found.traffic.wire, report.settings.of_backend(found.backend)
    return pair_floor_us(
        wire * settings.sent_bytes, wire * settings.returned_bytes, report.machine["gpus"]
    )


def _p99(samples: Sequence[float]) -> float:
    """The 99th percentile, between the two nearest samples in proportion."""
    ordered = sorted(samples)
    place = 0.99 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
