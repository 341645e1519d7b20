# SPDX-License-Identifier: Apache-2.0
"""Kernel times of a step, from a trace of torch's profiler."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANY = 40  # number of kernels that are listed; the rest are summed


@dataclass(frozen=True)
class Trace:
    """The kernels of one rank.

    Attributes:
        us: Microseconds of each kernel.
        span: Microseconds from the first kernel's start to the last one's end.
        steps: Number of passes by the engine's annotation.
    """

    us: Counter[str]
    span: float
    steps: Counter[str]


def kernels(trace: Path) -> Trace:
    """Read a trace."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    steps = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
    events = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    us: Counter[str] = Counter()
    for event in events:
        us[event["name"]] += event["dur"]
    ends = [event["ts"] + event["dur"] for event in events]
    first = min((event["ts"] for event in events), default=0.0)
    return Trace(us, max(ends, default=0.0) - first, steps)


def summed(trace: Trace, steps: int) -> dict[str, Any]:
    """Return us per step: of the longest kernels, of all, and from the first to the last."""
    top = {name: us / steps for name, us in trace.us.most_common(MANY) if us > 0}
    total = sum(trace.us.values()) / steps
    return {
        "us": total,
        "rest": total - sum(top.values()),
        "kernels": top,
        "span": trace.span / steps,
    }
