"""Which backend an all-reduce of so many tokens takes, by the bytes that each would move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.ops.reduction import Reduction

GIGABYTES = 334.0  # bytes a ns that one GPU pushes with stores from all SMs (8 x H200, 2026-11-20)
# What a backend takes beside its bytes, in us: launch, trips over NVLink, statistics.
FIXED = {"oneshot": 5.0, "twoshot": 6.6, "twoshot_bulk": 12.0}
BULK_BYTES = 256 * 7168 * 2  # from here on two shots gain by overlapping their halves


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend of a call, and why.

    source: "measured", "nearest", "formula" or "only one".   text: one sentence for a reader.
    """

    backend: str
    source: str
    text: str


def able(reduction: Reduction, backends: Sequence[str], tokens: int) -> list[str]:
    """The backends that have slots for so many tokens, without the collective one."""
    return [
        name
        for name in backends
        if name != "collective" and (name != "oneshot" or tokens <= reduction.direct)
    ]


def choose(reduction: Reduction, backends: Sequence[str], tokens: int) -> Choice:
    """The cheapest of `backends` by fixed cost plus bytes at 334 GB/s; equal on all ranks."""
    names = able(reduction, backends, tokens)
    if not names:
        return Choice(backends[0], "only one", f"{backends[0]} is the only backend that was built")
    if len(names) == 1:
        return Choice(names[0], "only one", f"{names[0]} is the only backend for {tokens} tokens")
    size = tokens * reduction.row_bytes
    cost = {name: _microseconds(name, reduction.ranks, size) for name in names}
    best = min(names, key=lambda name: cost[name])
    others = ", ".join(f"{name} {us:.1f}" for name, us in cost.items())
    return Choice(best, "formula", f"{best} by the formula of fixed cost and bytes (us: {others})")


def _microseconds(name: str, ranks: int, size: int) -> float:
    sent = (ranks - 1) * size if name == "oneshot" else 2 * (ranks - 1) / ranks * size
    late = 4.0 if name == "twoshot" and size >= BULK_BYTES else 0.0
    slow = 1.0 if name != "twoshot" else 1.0 + min(0.3, size / BULK_BYTES * 0.15)
    return FIXED[name] + late + slow * sent / GIGABYTES / 1e3
