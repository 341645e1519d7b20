# SPDX-License-Identifier: Apache-2.0
"""Output of a run: the table, and JSON with every sample."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft import __version__
from weft.bench.baselines import MEASURED, BaselineRun
from weft.bench.harness import Measurement, Report
from weft.bench.limits import why_no_floor
from weft.bench.machine import machine_line
from weft.errors import InvalidArgument

STDOUT = Path("-")


@dataclass(frozen=True, slots=True)
class Spread:
    """us per call. Each statistic is taken per rank; the slowest rank counts."""

    min: float
    median: float
    p99: float
    max: float

    @classmethod
    def from_samples(cls, samples_of_rank: Sequence[Sequence[float]]) -> Spread:
        """Compute the statistics of every rank's samples."""
        return cls(
            min=max(min(samples) for samples in samples_of_rank),
            median=max(statistics.median(samples) for samples in samples_of_rank),
            p99=max(float(np.percentile(samples, 99)) for samples in samples_of_rank),
            max=max(max(samples) for samples in samples_of_rank),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One phase of one variant at one size.

    Attributes:
        logical: GB/s if every expert or rank were sent its own rows.
        moved: Bytes that leave or enter the busiest rank.
        wire: GB/s of `moved`.
        floor: Least us on this hardware, or None if unknown.
        ratio: median / floor.
        baselines: us of the whole call at this size, by other library.
        more: The operator's own columns.
    """

    variant: str
    tokens: int
    phase: str
    us: Spread
    logical: float = 0.0
    moved: float = 0.0
    wire: float = 0.0
    floor: float | None = None
    ratio: float | None = None
    baselines: dict[str, float] = field(default_factory=dict)
    more: dict[str, float | str] = field(default_factory=dict)


def rows_of(report: Report, baselines: Sequence[BaselineRun] = ()) -> list[Row]:
    """Return a row per phase of each measurement, by size."""
    results = sorted(report.measured, key=lambda each: each.tokens)
    return [_row(report, each, phase, baselines) for each in results for phase in each.samples_us]


def _row(
    report: Report, measured: Measurement, phase: str, baselines: Sequence[BaselineRun]
) -> Row:
    case, us = report.case, Spread.from_samples(measured.samples_us[phase])
    logical, moved = case.bytes_of(measured, phase)
    unit = us.median * 1e3  # bytes / unit are GB/s
    row = Row(measured.variant, measured.tokens, phase, us, logical / unit, moved, moved / unit)
    if phase != case.whole:
        return row
    floor = case.floor_us(measured, report.machine["gpus"])
    others = {
        run.library: Spread.from_samples(run.samples_us[measured.tokens][phase]).median
        for run in baselines
        if measured.tokens in run.samples_us
    }
    ratio = None if floor is None else us.median / floor
    return replace(row, floor=floor, ratio=ratio, baselines=others, more=case.columns(measured))


def print_report(console: Console, report: Report, baselines: Sequence[BaselineRun] = ()) -> None:
    """Print the table of a run, and how it was measured."""
    rows, case = rows_of(report, baselines), report.case
    console.print(Text.assemble((f"weft bench {case.operator}  ", "bold"), case.title()))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    cells = [_cells(row) for row in rows]
    others = dict.fromkeys(name for row in rows for name in row.baselines)
    own = dict.fromkeys(name for row in cells for name in row if name not in others)
    names = (*own, *others)
    for name in names:
        left = name in ("variant", "us")
        table.add_column(name, justify="left" if left else "right", no_wrap=left)
    several = any(row.phase != case.whole for row in rows)
    for row, texts in zip(rows, cells, strict=True):
        last = several and row.phase == case.whole
        values = (texts.get(name, "") for name in names)
        table.add_row(*values, style="bold" if last else "", end_section=last)
    console.print(table)
    console.print(Text("\n".join(_caption(report, rows, baselines)), style="dim"))


def _cells(row: Row) -> dict[str, str]:
    """Return texts by column; a column without values is omitted."""
    cells = {"tokens": str(row.tokens), "variant": row.variant, "us": row.phase}
    cells |= {name: us_text(value) for name, value in asdict(row.us).items()}
    for name, rate in (("logical GB/s", row.logical), ("wire GB/s", row.wire)):
        if rate >= 0.01:
            cells[name] = f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"
    if row.floor is not None and row.ratio is not None:
        cells |= {"floor us": us_text(row.floor), "x floor": f"{row.ratio:.2f}"}
    for name, extra in row.more.items():
        cells[name] = extra if isinstance(extra, str) else f"{extra:.2f}"
    return cells | {name: us_text(value) for name, value in row.baselines.items()}


def _caption(report: Report, rows: Sequence[Row], baselines: Sequence[BaselineRun]) -> list[str]:
    case = report.case
    lines = [
        machine_line(report.machine),
        f"Checked before and after timing, over poisoned memory: {case.checked}.",
        *(f"us a call. {text}." for text in dict.fromkeys(each.method for each in report.measured)),
        "Statistics over a rank's samples, slowest rank shown.",
    ]
    if any(row.moved for row in rows):
        lines.append("logical: bytes of requested rows; wire: bytes of the busiest rank.")
    if any(row.floor is not None for row in rows):
        lines.append(f"floor: {case.floor_text()}, measured on H200 (weft/bench/limits.py).")
    lines += [text for text in (why_no_floor(report.machine["gpus"]),) if text]
    lines += case.notes(report.measured)
    lines += [f"Refused: {text}" for text in report.refused]
    for run in baselines:
        how = f" in this run, {run.method}; checked within a tolerance"
        lines.append(f"{run.library}: {run.status}{how if run.status == MEASURED else ''}.")
    return lines


def us_text(value: float) -> str:
    """Format a time in us."""
    return f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def as_json(report: Report, baselines: Sequence[BaselineRun] = ()) -> dict[str, Any]:
    """Return settings, machine, every sample and the table as JSON values."""
    return {
        "weft": __version__,
        "operator": report.case.operator,
        "settings": asdict(report.case),
        "machine": report.machine,
        "checked": f"{report.case.checked}, before and after timing",
        "results": [asdict(measured) for measured in report.measured],
        "refused": report.refused,
        "problem": report.problem,
        "peers": [asdict(run) for run in baselines],
        "rows": [asdict(row) for row in rows_of(report, baselines)],
    }


def write_json(path: Path, data: Any) -> None:
    """Write JSON to a file, or to stdout for `-`. Raises InvalidArgument naming the path."""
    text = json.dumps(data, indent=1) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error}") from error
