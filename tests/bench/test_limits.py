# SPDX-License-Identifier: Apache-2.0
"""Floors: their GPUs, and that no recorded figure is below one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.bench.limits import (
    allreduce_floor_us,
    layer_floor_us,
    missing_floor_reason,
    pair_floor_us,
)

RECORDS = Path(__file__).parents[2] / "benchmarks/results"


def test_only_h200s_have_a_floor():
    for name in ("NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3"):
        gpus = ["NVIDIA H200", name]
        assert pair_floor_us(1, 1, gpus) is None
        assert allreduce_floor_us(1, 2, gpus) is None
        assert layer_floor_us(1, 1, gpus) is None
        assert name in str(missing_floor_reason(gpus))
    gpus = ["NVIDIA H200"] * 4
    assert missing_floor_reason(gpus) is None
    assert (missing_floor_reason([]), pair_floor_us(0, 0, [])) == (None, None), "CPU ranks"
    assert pair_floor_us(340_000, 0, gpus) == pytest.approx(3.96 + 1.0)
    assert pair_floor_us(350_000, 0, gpus[:2]) == pytest.approx(3.96 + 1.0)


def _rows(data: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (settings of a run, one of its rows) from any place in a file."""
    if isinstance(data, list):
        for each in data:
            yield from _rows(each)
    elif isinstance(data, dict):
        for row in data.get("rows", ()) if "settings" in data else ():
            yield {**data["settings"], "loads": data.get("loads")}, row
        yield from _rows(data.get("runs", []))


def _floor(settings: dict[str, Any], row: dict[str, Any]) -> tuple[float, float] | None:
    """Return (floor, us) of a row that has a floor."""
    ranks: int = row.get("ranks") or settings.get("ranks") or 0
    gpus, us = ["NVIDIA H200"] * ranks, row.get("us", 0.0)
    median: float = us["median"] if isinstance(us, dict) else us
    floor: float | None
    if "epilogue" in settings:
        payload = row["tokens"] * settings["hidden"] * 2
        floor = allreduce_floor_us(payload, ranks, gpus)
    elif settings.get("loads"):
        load = settings["loads"][str(row["tokens"])]
        floor = layer_floor_us(load["hbm_bytes"], load["wire_bytes"], gpus)
    elif row.get("phase") == "pair" and row.get("moved"):
        floor = pair_floor_us(row["moved"], 0, gpus)
    else:
        return None
    assert floor is not None
    return floor, median


def test_no_recorded_figure_is_below_its_floor():
    seen = [
        (path.name, row["tokens"], *result)
        for path in sorted(RECORDS.glob("*/*.json"))
        for settings, row in _rows(json.loads(path.read_text()))
        if (result := _floor(settings, row)) is not None
    ]
    assert [each for each in seen if each[3] < each[2]] == []
    assert len(seen) > 400
