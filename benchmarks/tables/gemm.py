"""Plans of the grouped GEMM."""

from __future__ import annotations

from benchmarks.series import load
from benchmarks.tables.sources import Tables


def fastest_plan_us(work: str, rows: int) -> float:
    """us of the fastest plan of a grouped product, as many rows for every expert."""
    found = load("gemm-1xH200-2026-11-21.json")["equal_rows"]
    return min(
        float(row["us"])
        for row in found
        if (row["work"], row["dtype"], row["rows"]) == (work, "fp8", rows) and row.get("us")
    )


TABLES: Tables = {
    "gemm-plans": [
        (str(rows), [fastest_plan_us(work, rows) for work in ("quant", "down")])
        for rows in (16, 32, 64, 128, 256)
    ]
}
