# SPDX-License-Identifier: Apache-2.0
"""Reports of benchmark runs: a table, and JSON with every sample."""

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
from weft.bench.limits import missing_floor_reason
from weft.bench.machine import format_machine
from weft.errors import InvalidArgument

STDOUT = Path("-")


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of the us per call, each the maximum over the ranks."""

    min: float
    median: float
    p99: float
    max: float

    @classmethod
    def from_samples(cls, samples_by_rank: Sequence[Sequence[float]]) -> Spread:
        """Compute the statistics from the samples of every rank."""
        return cls(
            min=max(min(samples) for samples in samples_by_rank),
            median=max(statistics.median(samples) for samples in samples_by_rank),
            p99=max(float(np.percentile(samples, 99)) for samples in samples_by_rank),
            max=max(max(samples) for samples in samples_by_rank),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One phase of one variant at one size.

    Attributes:
        logical: GB/s of the logical bytes, see `Case.phase_bytes`.
        moved: Bytes that the busiest rank sends or receives.
        wire: GB/s of `moved`.
        floor: Minimum us on this hardware, or None if unknown.
        ratio: median / floor.
        baselines: Median us of other libraries at this size.
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


def build_rows(report: Report, baselines: Sequence[BaselineRun] = ()) -> list[Row]:
    """Build one row per measurement and phase, sorted by size."""
    return [
        _build_row(report, measurement, phase, baselines)
        for measurement in sorted(report.measurements, key=lambda m: m.tokens)
        for phase in measurement.samples_us
    ]


def _build_row(
    report: Report, measurement: Measurement, phase: str, baselines: Sequence[BaselineRun]
) -> Row:
    case, us = report.case, Spread.from_samples(measurement.samples_us[phase])
    logical, moved = case.phase_bytes(measurement, phase)
    row = Row(
        measurement.variant,
        measurement.tokens,
        phase,
        us,
        logical=logical / us.median / 1e3,  # bytes per ns are GB/s
        moved=moved,
        wire=moved / us.median / 1e3,
    )
    if phase != case.total_phase:
        return row
    floor = case.floor_us(measurement, report.machine["gpus"])
    baseline_us = {
        run.library: Spread.from_samples(run.samples_us[measurement.tokens][phase]).median
        for run in baselines
        if measurement.tokens in run.samples_us
    }
    ratio = None if floor is None else us.median / floor
    return replace(
        row, floor=floor, ratio=ratio, baselines=baseline_us, more=case.extra_columns(measurement)
    )


def print_report(console: Console, report: Report, baselines: Sequence[BaselineRun] = ()) -> None:
    """Print the table of a run and a description of the method."""
    rows, case = build_rows(report, baselines), report.case
    console.print(Text.assemble((f"weft bench {case.operator}  ", "bold"), case.describe()))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    cells = [_format_cells(row) for row in rows]
    libraries = dict.fromkeys(name for row in rows for name in row.baselines)
    columns = dict.fromkeys(name for row in cells for name in row if name not in libraries)
    names = (*columns, *libraries)
    for name in names:
        is_text = name in ("variant", "us")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=is_text)
    has_steps = any(row.phase != case.total_phase for row in rows)
    for row, texts in zip(rows, cells, strict=True):
        is_total = has_steps and row.phase == case.total_phase
        values = (texts.get(name, "") for name in names)
        table.add_row(*values, style="bold" if is_total else "", end_section=is_total)
    console.print(table)
    console.print(Text("\n".join(_format_caption(report, rows, baselines)), style="dim"))


def _format_cells(row: Row) -> dict[str, str]:
    """Return the text of each column that has a value."""
    cells = {"tokens": str(row.tokens), "variant": row.variant, "us": row.phase}
    cells |= {name: format_us(value) for name, value in asdict(row.us).items()}
    for name, rate in (("logical GB/s", row.logical), ("wire GB/s", row.wire)):
        if rate >= 0.01:
            cells[name] = f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"
    if row.floor is not None and row.ratio is not None:
        cells |= {"floor us": format_us(row.floor), "x floor": f"{row.ratio:.2f}"}
    for name, extra in row.more.items():
        cells[name] = extra if isinstance(extra, str) else f"{extra:.2f}"
    return cells | {name: format_us(value) for name, value in row.baselines.items()}


def _format_caption(
    report: Report, rows: Sequence[Row], baselines: Sequence[BaselineRun]
) -> list[str]:
    case = report.case
    lines = [
        format_machine(report.machine),
        f"Checked before and after timing, over poisoned memory: {case.check_description}.",
        *(f"us per call. {text}." for text in dict.fromkeys(m.method for m in report.measurements)),
        "Statistics over the samples of a rank; the slowest rank is shown.",
    ]
    if any(row.moved for row in rows):
        lines.append("logical: bytes of requested rows; wire: bytes of the busiest rank.")
    if any(row.floor is not None for row in rows):
        lines.append(f"floor: {case.describe_floor()}, measured on H200 (weft/bench/limits.py).")
    lines += [text for text in (missing_floor_reason(report.machine["gpus"]),) if text]
    lines += case.format_notes(report.measurements)
    lines += [f"Skipped: {text}" for text in report.skipped]
    for run in baselines:
        method = f" in this run, {run.method}; checked within a tolerance"
        lines.append(f"{run.library}: {run.status}{method if run.status == MEASURED else ''}.")
    return lines


def format_us(value: float) -> str:
    """Format a time in us."""
    return f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def to_json(report: Report, baselines: Sequence[BaselineRun] = ()) -> dict[str, Any]:
    """Return the settings, the machine, every sample and the table as JSON values."""
    return {
        "weft": __version__,
        "operator": report.case.operator,
        "settings": asdict(report.case),
        "machine": report.machine,
        "checked": f"{report.case.check_description}, before and after timing",
        "results": [_measurement_to_json(measurement) for measurement in report.measurements],
        "refused": report.skipped,
        "problem": report.error,
        "peers": [asdict(run) for run in baselines],
        "rows": [asdict(row) for row in build_rows(report, baselines)],
    }


def _measurement_to_json(measurement: Measurement) -> dict[str, Any]:
    values = asdict(measurement)
    values["facts"] = values.pop("metadata")  # the name in recorded results
    return values


def write_json(path: Path, data: Any) -> None:
    """Write JSON to a file, or to stdout if the path is `-`. Raises InvalidArgument."""
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
