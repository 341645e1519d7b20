"""What an all-reduce should take where nobody measured it: a fixed part and the bytes.

An estimate for choosing a backend until `weft tune allreduce` has run, never a figure to quote.
oneshot sends its rows to every peer: (N-1) S bytes. The two-shots send each row to its owner and
back to all: 2 (N-1)/N S, counted in whole rows, because an owner owns whole rows.

GPUs: 334 GB/s out of one H200, measured (docs/measuring.md). The fixed parts are estimates: 4.8 us
for one way through NVLink and 6.3 us for two; twoshot sends, waits and unpacks in turn, which adds
a quarter to its bytes' time, and twoshot_bulk overlaps them, for a start that takes longer.
CPU ranks: 0.5 GB/s for each rank, sums and norm included, and waits that are turns of the
scheduler; estimates after runs of 4 ranks on 2 cores that they shared with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """fixed: us that any size takes.  factor: of the time that the bytes take."""

    fixed: float
    factor: float


GB_PER_S: Mapping[str, float] = {"gpu": 334.0, "cpu": 0.5}
COSTS: Mapping[str, Mapping[str, Cost]] = {
    "gpu": {
        "oneshot": Cost(4.8, 1.0),
        "twoshot": Cost(6.3, 1.25),
        "twoshot_bulk": Cost(10.0, 1.1),
    },
    "cpu": {
        "oneshot": Cost(100.0, 1.0),
        "twoshot": Cost(130.0, 1.25),
        "twoshot_bulk": Cost(140.0, 1.25),
    },
}
FORMULA: Mapping[str, str] = {
    where: f"bytes sent / {GB_PER_S[where]:g} GB/s and fixed parts of "
    + ", ".join(f"{cost.fixed:g} ({name})" for name, cost in costs.items())
    + " us, estimates"
    for where, costs in COSTS.items()
}


def sent_bytes(backend: str, tokens: int, row_bytes: int, ranks: int) -> int:
    """Bytes that leave the busiest rank."""
    if backend == "oneshot":
        return (ranks - 1) * tokens * row_bytes
    owned = -(-tokens // ranks)
    return 2 * (ranks - 1) * owned * row_bytes


def formula_us(backend: str, tokens: int, row_bytes: int, ranks: int, *, cpu: bool) -> float:
    """The estimate in us for `tokens` rows on each of `ranks` ranks."""
    where = "cpu" if cpu else "gpu"
    cost = COSTS[where][backend]
    return cost.fixed + cost.factor * sent_bytes(backend, tokens, row_bytes, ranks) / (
        GB_PER_S[where] * 1e3
    )
