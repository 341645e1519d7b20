# SPDX-License-Identifier: Apache-2.0
"""Conversion of the wait counters in a header to public results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from weft.group.waits import PeerWaits, PhaseTimes, Waits, WaitTimes
from weft.heap.header import EPOCH_MASK, PHASES
from weft.heap.header import WaitTimes as WaitCounters


def read_waits(header: Any, rank: int, ranks: Sequence[int], phases: Sequence[str]) -> Waits:
    """Return the waits that a header counts.

    Args:
        header: Copy of the rank's header.
        rank: The rank in the group.
        ranks: Ranks of this host in the group, by their rank on the host.
        phases: Names of the phases of `header.waits`.
    """
    peers = tuple(
        PeerWaits(
            ranks[peer],
            phase,
            (waits.epoch - header.first_epoch) & EPOCH_MASK if waits.epoch else 0,
            _convert(waits.skew),
            _convert(waits.transfer),
        )
        for phase, by_peer in zip(phases, header.waits, strict=False)
        for peer, waits in enumerate(by_peer[: header.ranks])
        if any(waits.skew.counts) or any(waits.transfer.counts)
    )
    return Waits(rank, tuple(_phase_times(header)), peers)


def _convert(times: WaitCounters) -> WaitTimes:
    return WaitTimes(times.total_ns / 1e9, times.max_ns / 1e9, tuple(times.counts))


def _phase_times(header: Any) -> Iterator[PhaseTimes]:
    records = sorted((r for r in header.ring if r.phase), key=lambda r: r.start_ns)
    for phase in sorted({record.phase for record in records}):
        of_phase = [record for record in records if record.phase == phase]
        gaps = [
            record.start_ns - before.end_ns
            for before, record in itertools.pairwise(records)
            if record.phase == phase
        ]
        yield PhaseTimes(
            PHASES[phase],
            max((record.epoch - header.first_epoch) & EPOCH_MASK for record in of_phase),
            _mean([record.end_ns - record.start_ns for record in of_phase]) / 1e9,
            _mean(gaps) / 1e9,
        )


def _mean(values: Sequence[int]) -> float:
    return sum(values) / max(1, len(values))
