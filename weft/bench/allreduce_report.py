"""What an all-reduce run prints and writes: the table, and the samples as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.bench.allreduce import ReduceReport
from weft.bench.allreduce_summary import ReduceRow, reduce_rows
from weft.bench.limits import ONE_WAY_FIXED_US, TWO_WAY_FIXED_US, link_rate, why_no_floor
from weft.bench.machine import machine_line
from weft.bench.peers import Peer
from weft.bench.report import rate_text, us_text, write_text
from weft.bench.rivals import MEASURED, RivalRun

_MIB = 1 << 20


def print_reduce(
    console: Console, report: ReduceReport, peers: Sequence[Peer], runs: Sequence[RivalRun] = ()
) -> None:
    """Print the table of a run, and below it how the figures were taken.

    peers: what stands beside ours.  runs: what became of the libraries that were looked for.
    """
    rows = reduce_rows(report, peers)
    rivals = list(dict.fromkeys(name for row in rows for name in row.rivals))
    floor = any(row.floor is not None for row in rows)
    table = Table(box=box.SIMPLE_HEAD, title=_title(report), title_justify="left", pad_edge=False)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for name in ("min", "median", "p99", "max", "logical\nGB/s", "wire\nGB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("floor\nus", "x floor") * floor:
        table.add_column(name, justify="right")
    for name in rivals:
        table.add_column(f"{name}\nus", justify="right", style="dim")
    last = [after.tokens != row.tokens for row, after in zip(rows, rows[1:], strict=False)]
    best = {row.tokens: min(r.us.median for r in rows if r.tokens == row.tokens) for row in rows}
    for place, (row, ends) in enumerate(zip(rows, [*last, True], strict=True)):
        first = place == 0 or rows[place - 1].tokens != row.tokens
        fastest = len(report.settings.backends) > 1 and row.us.median == best[row.tokens]
        table.add_row(
            *_cells(row, rivals, first=first, floor=floor),
            style="bold" if fastest else "",
            end_section=ends and len(report.settings.backends) > 1,
        )
    console.print(table)
    console.print(Text(_caption(report, peers if rivals else [], runs, floor), style="dim"))


def _cells(row: ReduceRow, rivals: Sequence[str], *, first: bool, floor: bool) -> list[str]:
    us = row.us
    name = row.backend if row.chosen == row.backend else f"{row.backend}: {row.chosen}"
    texts = [str(row.tokens) if first else "", name]
    texts += [us_text(value) for value in (us.min, us.median, us.p99, us.max)]
    texts += [rate_text(row.logical), rate_text(row.wire)]
    if floor:
        texts += ["" if row.floor is None else us_text(row.floor)]
        texts += ["" if row.ratio is None else f"{row.ratio:.2f}"]
    known = row.rivals if first else {}
    return texts + [us_text(known[name]) if name in known else "" for name in rivals]


def _title(report: ReduceReport) -> Text:
    settings = report.settings
    early = "" if settings.programmatic_launch else ", no programmatic launch"
    return Text.assemble(
        ("weft bench allreduce  ", "bold"),
        f"{settings.ranks} ranks, hidden {settings.hidden}, {settings.dtype}, {settings.what}",
        early,
    )


def _caption(
    report: ReduceReport, peers: Sequence[Peer], runs: Sequence[RivalRun], floor: bool
) -> str:
    lines = [
        machine_line(report.machine),
        "Checked before timing and after it: every output equals weft.reference bit by bit, "
        "memory poisoned before.",
        *(
            f"us a call. {method}."
            for method in dict.fromkeys(m.method for m in report.measurements)
        ),
        "Statistics over a rank's samples, slowest rank shown. logical: bytes of one rank's rows; "
        "wire: bytes that the backend sends off a rank.",
        f"Memory of the workspace: {report.memory_bytes / _MIB:.1f} MiB a rank for "
        f"{report.settings.capacity} tokens.",
    ]
    if floor:
        speed = f"{link_rate(report.settings.ranks):g} GB/s"
        lines.append(
            f"floor: the lesser of (N-1) S / {speed} + {ONE_WAY_FIXED_US:g} us and 2 (N-1)/N S / "
            f"{speed} + {TWO_WAY_FIXED_US:g} us, measured on H200 (weft/bench/limits.py)."
        )
    lines += list(dict.fromkeys(found.why for found in report.measurements if found.why))[:1]
    lines += [f"Refused: {text}" for text in report.refused]
    lines += [text for text in (why_no_floor(report.machine["gpus"]),) if text]
    recorded = [peer for peer in peers if not peer.measured]
    if recorded:
        lines.append(f"Recorded figures: {recorded[0].date} on {recorded[0].machine}.")
    for run in runs:
        how = f" in this run, {run.method}; checked within a tolerance"
        lines.append(f"{run.library}: {run.status}{how if run.status == MEASURED else ''}.")
    return "\n".join(lines)


def write_reduce_json(
    path: Path, report: ReduceReport, peers: Sequence[Peer], runs: Sequence[RivalRun] = ()
) -> None:
    """Write settings, machine, every sample and the table's figures."""
    from weft import __version__

    results = []
    for found in report.measurements:
        entry = asdict(found)
        entry["samples_us"] = entry.pop("samples")
        results.append(entry)
    data = {
        "weft": __version__,
        "settings": asdict(report.settings),
        "machine": report.machine,
        "memory_bytes": report.memory_bytes,
        "checked": "bitwise against weft.reference, before and after timing",
        "results": results,
        "refused": report.refused,
        "peers": [asdict(run) for run in runs],
        "rows": [asdict(row) for row in reduce_rows(report, peers)],
    }
    write_text(path, json.dumps(data, indent=1) + "\n")
