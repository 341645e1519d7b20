"""What was measured inside SGLang: stock and weft, and how far their texts agree."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.series import load
from benchmarks.tables.sources import Tables

ASKED = "sglang-1xH200-2026-11-23.jsonl"


def result(file: str, **sought: Any) -> dict[str, Any]:
    """The one line of a record that says all this of itself."""
    (found,) = (
        line["result"]
        for line in load(file)
        if all(line.get(name) == value for name, value in sought.items())
    )
    assert isinstance(found, dict)
    return found


def texts(other: str) -> list[float]:
    """Of `run.sh outputs`: equal texts, % of tokens before they part, the gaps there."""
    found = result(ASKED, bench="outputs", against=f"stock, one by one / {other}")
    gaps = [gap for _, gap in found["parted"].values()] or [0.0]
    before = 100 * found["tokens_before"]
    return [found["equal"], before, statistics.median_low(gaps), max(gaps)]


TABLES: Tables = {
    "sglang-texts": [
        (other, texts(other))
        for other in ("stock, again", "stock, together", "weft, one by one", "weft, together")
    ],
}
