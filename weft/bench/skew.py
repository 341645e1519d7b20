"""All ranks' times on one clock: `weft.ops.skew`, under the name that benchmarks know."""

from __future__ import annotations

from weft.ops.skew import Skew, clock_tick, estimate_skew

__all__ = ["Skew", "clock_tick", "estimate_skew"]
