"""What a run prints and writes: the table, and JSON with every sample."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.bench.baselines import MEASURED, BaselineRun
from weft.bench.limits import why_no_floor
from weft.bench.machine import machine_line
from weft.bench.peers import Peer
from weft.bench.run import Measurement, Report, SamplesOfRank
from weft.errors import InvalidArgument

STDOUT = Path("-")


@dataclass(frozen=True, slots=True)
class Spread:
    """us per call: each statistic is taken over a rank's samples, then the slowest rank counts."""

    min: float
    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples_of_rank: Sequence[Sequence[float]]) -> Spread:
        """From every rank's samples."""
        return cls(
            min=max(min(samples) for samples in samples_of_rank),
            median=max(statistics.median(samples) for samples in samples_of_rank),
            p99=max(_p99(samples) for samples in samples_of_rank),
            max=max(max(samples) for samples in samples_of_rank),
        )


@dataclass(frozen=True, slots=True)
class CoRun:
    """A call together with a matmul, medians in us, slowest rank.

    matmul: during the calls; limited: alone on the SMs left to it; alone: alone on all SMs.
    slower, slower_limited: the matmul against each of these, on the rank where it is worst.
    """

    call: float
    matmul: float
    limited: float
    alone: float
    slower: float
    slower_limited: float

    @classmethod
    def of(cls, times: SamplesOfRank) -> CoRun | None:
        """From every rank's times (`bench.corun`), or None where there are none."""
        if not times:
            return None
        ranks = {name: [statistics.median(each) for each in times[name]] for name in times}
        matmul, alone = ranks["matmul"], ranks["matmul_alone"]
        limited = ranks["matmul_limited"]
        return cls(
            call=max(ranks["call"]),
            matmul=max(matmul),
            limited=max(limited),
            alone=max(alone),
            slower=max(a / b for a, b in zip(matmul, alone, strict=True)),
            slower_limited=max(a / b for a, b in zip(matmul, limited, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One phase of one variant at one size.

    logical: GB/s of the rows as if every expert or rank were sent its own.
    moved: bytes that leave or enter the busiest rank; wire: the GB/s they make.
    floor: least us on this hardware, ratio: median / floor; None where unknown.
    baselines: library -> us of the whole at this size.
    cold: median us with flushed caches, or None.  corun: with a matmul, or None.
    more: the operator's own columns.
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
    cold: float | None = None
    corun: CoRun | None = None
    more: dict[str, float | str] = field(default_factory=dict)


def rows_of(report: Report, peers: Sequence[Peer] = ()) -> list[Row]:
    """Return a row for each phase of each measurement; recorded peers only beside GPUs."""
    shown = [peer for peer in peers if report.machine["gpus"] or peer.measured]
    rows = []
    for found in sorted(report.measurements, key=lambda each: each.tokens):
        for phase in found.samples_us:
            rows.append(_row(report, found, phase, shown))
    return rows


def _row(report: Report, found: Measurement, phase: str, peers: Sequence[Peer]) -> Row:
    case, whole = report.case, phase == report.case.whole
    us = Spread.of(found.samples_us[phase])
    logical, moved = case.bytes_of(found, phase)
    floor = case.floor_us(found, report.machine["gpus"]) if whole else None
    return Row(
        variant=found.variant,
        tokens=found.tokens,
        phase=phase,
        us=us,
        logical=logical / us.median / 1e3,
        moved=moved,
        wire=moved / us.median / 1e3,
        floor=floor,
        ratio=None if floor is None else us.median / floor,
        baselines={p.label: p.us[found.tokens] for p in peers if whole and found.tokens in p.us},
        cold=Spread.of(found.cold_us[phase]).median if phase in found.cold_us else None,
        corun=CoRun.of(found.corun_us) if whole else None,
        more=case.columns(found, report) if whole else {},
    )


def print_report(
    console: Console, report: Report, peers: Sequence[Peer], runs: Sequence[BaselineRun] = ()
) -> None:
    """Print the table of a run, and below it how the figures were taken.

    peers: what stands beside ours.  runs: what became of the libraries that were looked for.
    """
    rows, case = rows_of(report, peers), report.case
    title = Text.assemble((f"weft bench {case.operator}  ", "bold"), case.title())
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    cells = [_cells(row) for row in rows]
    baselines = dict.fromkeys(name for row in rows for name in row.baselines)
    own = dict.fromkeys(name for row in cells for name in row if name not in baselines)
    for name in (*own, *baselines):
        left = name in ("variant", "us")
        text = name.replace(", ", ",\n")
        table.add_column(text, justify="left" if left else "right", no_wrap=left)
        for texts in cells:
            texts.setdefault(name, "")
    names = [str(column.header).replace(",\n", ", ") for column in table.columns]
    for row, texts in zip(rows, cells, strict=True):
        whole = row.phase == case.whole
        several = any(each.phase != case.whole for each in rows)
        style = "bold" if whole and several else ""
        table.add_row(*(texts[name] for name in names), style=style, end_section=whole and several)
    console.print(table)
    console.print(Text("\n".join(_caption(report, rows, peers, runs)), style="dim"))


def _cells(row: Row) -> dict[str, str]:
    """Texts by column; a column that no row has is left out."""
    us = row.us
    cells = {"tokens": str(row.tokens), "variant": row.variant, "us": row.phase}
    for name, value in (("min", us.min), ("median", us.median), ("p99", us.p99), ("max", us.max)):
        cells[name] = us_text(value)
    if row.cold is not None:
        cells["cold median"] = us_text(row.cold)
    for name, rate in (("logical GB/s", row.logical), ("wire GB/s", row.wire)):
        if rate >= 0.01:
            cells[name] = f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"
    if row.floor is not None and row.ratio is not None:
        cells |= {"floor us": us_text(row.floor), "x floor": f"{row.ratio:.2f}"}
    if row.corun:
        cells["us co-run"] = us_text(row.corun.call)
        cells["matmul x alone"] = f"{row.corun.slower:.2f}"
        cells["matmul x its SMs"] = f"{row.corun.slower_limited:.2f}"
    for name, extra in row.more.items():
        cells[name] = extra if isinstance(extra, str) else f"{extra:.2f}"
    return cells | {name: us_text(value) for name, value in row.baselines.items()}


def _caption(
    report: Report, rows: Sequence[Row], peers: Sequence[Peer], runs: Sequence[BaselineRun]
) -> list[str]:
    case = report.case
    methods = dict.fromkeys(
        text
        for each in report.measurements
        for text in (each.method, each.cold_method, each.corun_method)
        if text
    )
    lines = [
        machine_line(report.machine),
        f"Checked before timing and after it, memory poisoned before: {case.checked}.",
        *(f"us a call. {method}." for method in methods),
        "Statistics over a rank's samples, slowest rank shown.",
    ]
    if any(row.moved for row in rows):
        lines.append("logical: bytes of the rows as asked for; wire: off the busiest rank.")
    if any(row.floor is not None for row in rows):
        lines.append(f"floor: {case.floor_text()}, measured on H200 (weft/bench/limits.py).")
    lines += [text for text in (why_no_floor(report.machine["gpus"]),) if text]
    lines += case.notes(report)
    lines += [
        f"{row.tokens} tokens, co-run: the matmul takes {row.corun.matmul:.0f} us, alone "
        f"{row.corun.alone:.0f} us, alone on the SMs left to it {row.corun.limited:.0f} us."
        for row in rows
        if row.corun
    ]
    lines += [f"Refused: {text}" for text in report.refused]
    if recorded := [peer for peer in peers if not peer.measured]:
        lines.append(f"Recorded figures: {recorded[0].date} on {recorded[0].machine}.")
    for run in runs:
        how = f" in this run, {run.method}; checked within a tolerance"
        lines.append(f"{run.library}: {run.status}{how if run.status == MEASURED else ''}.")
    return lines


def times_grid(
    tokens: Iterable[int], times: Mapping[str, Sequence[float | None]], title: str | None = None
) -> Table:
    """A table of us: a column for each number of tokens, a row for each name; gaps are blank."""
    grid = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    grid.add_column("us")
    for size in tokens:
        grid.add_column(str(size), justify="right")
    for name, several in times.items():
        grid.add_row(name, *("" if us is None else us_text(us) for us in several))
    return grid


def us_text(value: float) -> str:
    """A time in us, as tables show it."""
    return f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def as_json(
    report: Report, peers: Sequence[Peer] = (), runs: Sequence[BaselineRun] = ()
) -> dict[str, Any]:
    """Settings, machine, every sample and the table's figures."""
    from weft import __version__

    return {
        "weft": __version__,
        "operator": report.case.operator,
        "settings": asdict(report.case),
        "machine": report.machine,
        "facts": report.facts,
        "checked": f"{report.case.checked}, before and after timing",
        "results": [asdict(found) for found in report.measurements],
        "refused": report.refused,
        "problem": report.problem,
        "peers": [asdict(run) for run in runs],
        "rows": [asdict(row) for row in rows_of(report, peers)],
    }


def read_rows(data: Any) -> list[Row]:
    """Rows of the JSON of a run, also of those that were recorded before all operators had one
    format: all-to-all with `backend`, layers with `overlap`, low latency with a `us` by phase,
    and other libraries' times as `rivals`.

    Raises InvalidArgument where it holds none.
    """
    rows = list(_read(data))
    if not rows:
        raise InvalidArgument("no rows of a benchmark: give a file that weft bench --json wrote")
    return rows


def _read(data: Any) -> Iterable[Row]:
    if isinstance(data, list):
        for each in data:
            yield from _read(each)
    elif isinstance(data, dict):
        if "settings" in data:
            for row in data.get("rows", ()):
                yield from _read_row(row)
            for rung in data.get("rungs", ()):  # variants of low latency, with samples alone
                us = {name: asdict(Spread.of(each)) for name, each in rung["samples"].items()}
                yield from _read_row({**rung, "us": us})
        yield from _read(data.get("runs", []))


def _read_row(row: dict[str, Any]) -> Iterable[Row]:
    try:
        variant = row.get("variant") or row.get("overlap") or row.get("backend") or "default"
        several = "min" not in row["us"]
        phases = row["us"] if several else {row.get("phase", "call"): row["us"]}
        for phase, us in phases.items():
            whole = phase in ("pair", "call")
            floor = row.get("floor") if whole else None
            yield Row(
                variant=variant,
                tokens=row["tokens"],
                phase=phase,
                us=Spread(**us),
                logical=0.0 if several else row.get("logical", 0.0),
                moved=row.get("moved", 0.0),
                wire=0.0 if several else row.get("wire", 0.0),
                floor=max(floor["memory"], floor["links"]) if isinstance(floor, dict) else floor,
                ratio=row.get("ratio") if whole else None,
                baselines=row.get("baselines", row.get("rivals", {})) if whole else {},
                cold=row.get("cold"),
                more=row.get("more", {}),
            )
    except (KeyError, TypeError) as error:
        raise InvalidArgument(f"a row is none of a benchmark's: {error!r} in {row}") from error


def write_json(path: Path, data: Any) -> None:
    """Write JSON into a file, whose directory is made if needed, or to stdout for `-`.

    Raises InvalidArgument naming the path where that fails.
    """
    text = json.dumps(data, indent=1) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write a result file; its directory is made if needed. Raises InvalidArgument naming it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error}") from error


def _p99(samples: Sequence[float]) -> float:
    """The 99th percentile, between the two nearest samples in proportion."""
    ordered = sorted(samples)
    place = 0.99 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
