"""What was measured inside SGLang: stock, weft, and weft's share of stock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.tables.sources import Tables

RECORD = Path(__file__).parents[1] / "sglang-2xH200-2026-11-23.jsonl"


def decode(variant: str, key: str) -> float:
    """A number of `run.sh decode` at 64 requests a rank."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in RECORD.read_text().splitlines()]
    (found,) = (
        line["result"][key]
        for line in lines
        if (line["bench"], line["variant"], line.get("requests")) == ("decode", variant, 64)
    )
    return float(found)


def beside(key: str) -> list[float]:
    """Stock, weft, and weft's share of stock."""
    stock, weft = decode("stock", key), decode("weft", key)
    return [stock, weft, weft / stock]


TABLES: Tables = {
    "sglang-decode": [
        ("ms between tokens, median", beside("median_itl_ms")),
        ("ms between tokens, 99 %", beside("p99_itl_ms")),
        ("output tokens/s", beside("output_throughput")),
    ]
}
