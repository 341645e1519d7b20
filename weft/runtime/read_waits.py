# SPDX-License-Identifier: Apache-2.0
"""Conversion of the wait counters in a header to public results."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.group.waits import PeerWaits, PhaseTimes, Waits, WaitTimes
from weft.heap.header import EPOCH_MASK, PHASES, Record
from weft.heap.header import WaitTimes as WaitCounters


def read_waits(
    header: Any,
    rank: int,
    ranks: Sequence[int],
    phases: Sequence[str],
    rounds_before: Mapping[str, int],
) -> Waits:
    """Return the waits that a header counts.

    Args:
        header: Copy of the rank's header.
        rank: The rank in the group.
        ranks: Ranks of this host in the group, by their rank on the host.
        phases: Names of the phases of `header.waits`.
        rounds_before: Finished rounds of each phase that the header does not count.
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
    return Waits(rank, tuple(_phase_times(header, rounds_before)), peers)


def _convert(times: WaitCounters) -> WaitTimes:
    return WaitTimes(times.total_ns / 1e9, times.max_ns / 1e9, tuple(times.counts))


def count_rounds(header: Any) -> dict[str, int]:
    """Return the number of finished rounds of each phase."""
    rounds: dict[str, int] = {}
    for record in header.ring:
        if record.phase:
            number = (record.epoch - header.first_epoch) & EPOCH_MASK
            rounds[PHASES[record.phase]] = max(rounds.get(PHASES[record.phase], 0), number)
    return rounds


def _phase_times(header: Any, rounds_before: Mapping[str, int]) -> Iterator[PhaseTimes]:
    rounds = Counter(rounds_before)
    rounds.update(count_rounds(header))
    records = sorted(header.ring, key=lambda record: record.start_ns)
    whole = [_skip_torn([r for r in records if r.phase == phase]) for phase in PHASES]
    finished = sorted(itertools.chain(*whole), key=lambda record: record.start_ns)
    for phase, name in PHASES.items():
        if name not in rounds:
            continue
        times = [record.end_ns - record.start_ns for record in finished if record.phase == phase]
        gaps = [
            record.start_ns - before.end_ns
            for before, record in itertools.pairwise(finished)
            if record.phase == phase and before.end_ns <= record.start_ns
        ]
        yield PhaseTimes(name, rounds[name], _mean(times) / 1e9, _mean(gaps) / 1e9)


def _skip_torn(records: Sequence[Record]) -> Iterator[Record]:
    """Skip records of one phase that a kernel wrote while the header was copied.

    Such a record may have an old start and a new end, or the reverse. Finished operations of one
    phase do not overlap.
    """
    next_starts = [*(record.start_ns for record in records[1:]), sys.maxsize]
    for record, next_start in zip(records, next_starts, strict=False):
        if record.start_ns <= record.end_ns <= next_start:
            yield record


def _mean(values: Sequence[int]) -> float:
    return sum(values) / max(1, len(values))
