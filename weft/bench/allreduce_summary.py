"""From samples of an all-reduce to the figures of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.bench.allreduce import ReduceReport
from weft.bench.allreduce_cases import wire_bytes
from weft.bench.limits import allreduce_floor_us
from weft.bench.peers import Peer
from weft.bench.summary import Spread


@dataclass(frozen=True, slots=True)
class ReduceRow:
    """One size of one backend.

    chosen: the backend that ran.
    logical: GB/s of the rows of one rank, as if nothing but them had to move.
    wire: GB/s of the bytes that the backend sends off a rank.
    floor: least us on this hardware, ratio: median / floor; None where unknown.
    rivals: library -> us of a call of this size.
    """

    backend: str
    tokens: int
    chosen: str
    us: Spread
    logical: float
    wire: float
    floor: float | None
    ratio: float | None
    rivals: dict[str, float]


def reduce_rows(report: ReduceReport, peers: Sequence[Peer]) -> list[ReduceRow]:
    """Return a row for each measurement; rivals only beside GPUs, or measured in this run."""
    settings, gpus = report.settings, report.machine["gpus"]
    rows = []
    for found in report.measurements:
        us = Spread.of(found.samples)
        payload = found.tokens * settings.row_bytes
        floor = allreduce_floor_us(payload, settings.ranks, gpus)
        rows.append(
            ReduceRow(
                backend=found.backend,
                tokens=found.tokens,
                chosen=found.chosen,
                us=us,
                logical=payload / us.median / 1e3,
                wire=wire_bytes(found.chosen, payload, settings.ranks) / us.median / 1e3,
                floor=floor,
                ratio=None if floor is None else us.median / floor,
                rivals={
                    peer.label: peer.us[found.tokens]
                    for peer in peers
                    if found.tokens in peer.us and (gpus or peer.measured)
                },
            )
        )
    return rows
