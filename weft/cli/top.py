# SPDX-License-Identifier: Apache-2.0
"""`weft top`: waits of the ranks of running jobs of this user on this machine."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weft.group.status import read_all
from weft.group.waits import CONTROL

Totals = Mapping[tuple[int, str], float]  # seconds by peer and cause


@dataclass(frozen=True, slots=True)
class Row:
    """Counters of one phase of one operator on one rank.

    Attributes:
        key: Process, number of the group in it, operator and phase.
        rank: Rank in the group.
        size: Number of ranks.
        rounds: Finished rounds or control calls.
        seconds: Mean duration of the last rounds; None for control calls.
        between_seconds: Mean time before them; None for control calls.
        waits: Seconds waited by peer and cause.
    """

    key: tuple[int, int, str, str]
    rank: int
    size: int
    rounds: int
    seconds: float | None
    between_seconds: float | None
    waits: Totals


def read_json() -> str:
    """Return the counters of all processes as JSON, with the processes that do not answer."""
    errors: list[str] = []
    processes = list(read_all(errors.append))
    return json.dumps({"processes": processes, "errors": errors}, indent=1)


def print_totals(console: Console) -> None:
    """Print the counters since the operators were created."""
    rows, errors = read_rows()
    console.print(_render(rows, {}, errors))


def show(console: Console, interval: float) -> None:
    """Show the changes of each interval until the user interrupts."""
    before, errors = read_rows()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(_render(before, {}, errors), console=console, auto_refresh=False) as live,
    ):
        while True:
            time.sleep(interval)
            rows, errors = read_rows()
            live.update(_render(rows, {row.key: row for row in before}, errors), refresh=True)
            before = rows


def read_rows() -> tuple[list[Row], list[str]]:
    """Return the rows of all processes, and texts on those that failed."""
    errors: list[str] = []
    rows: list[Row] = []
    for process in read_all(errors.append):
        try:
            rows += _process_rows(process, errors)
        except (LookupError, TypeError, ValueError, AttributeError):
            errors.append(
                f"process {process['pid']} runs a version of weft that this one cannot read"
            )
    rows.sort(key=lambda row: (row.size, row.rank, *row.key))
    return rows, errors


def _process_rows(process: Mapping[str, Any], errors: list[str]) -> list[Row]:
    rows: list[Row] = []
    for group in process["groups"]:
        if "error" in group:
            errors.append(f"process {process['pid']}, rank {group['rank']}: {group['error']}")
        for name, waits in group.get("waits", {}).items():
            rows += _phase_rows((process["pid"], int(group["number"])), group, name, waits)
    return rows


def _phase_rows(
    place: tuple[int, int], group: Mapping[str, Any], name: str, waits: Mapping[str, Any]
) -> Iterator[Row]:
    phases = {times["phase"]: times for times in waits["phases"]}
    for phase in phases or {entry["phase"]: None for entry in waits["peers"]}:
        entries = [entry for entry in waits["peers"] if entry["phase"] == phase]
        totals = {
            (entry["peer"], cause): entry[cause]["total_seconds"]
            for entry in entries
            for cause in ("skew", "transfer")
        }
        times = phases.get(phase)
        calls = max((sum(entry["skew"]["counts"]) for entry in entries), default=0)
        yield Row(
            (*place, name, phase),
            int(group["rank"]),
            int(group["size"]),
            calls if times is None else times["rounds"],
            None if times is None else times["seconds"],
            None if times is None else times["between_seconds"],
            totals,
        )


def _render(rows: list[Row], before: Mapping[Any, Row], errors: list[str]) -> Group:
    if not rows:
        lines = [Text("No process of this user runs ranks of weft in this network namespace.")]
        return Group(*lines, *map(Text, errors))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ("rank", "pid", "operator", "phase", "rounds", "round", "before it", "waits for")
    for name in (*columns, "skew", "transfer"):
        table.add_column(name, justify="left" if name in ("operator", "phase") else "right")
    for row in rows:
        old = before.get(row.key)
        rounds = max(1, row.rounds - (old.rounds if old else 0))
        waits = {
            key: seconds - (old.waits.get(key, 0.0) if old else 0.0)
            for key, seconds in row.waits.items()
        }
        late = max((peer for peer, _ in waits), key=lambda p: _sum_for(waits, p), default=None)
        name, times = "", ["", ""]
        if late is not None and _sum_for(waits, late) > 0:
            name = f"rank {late}"
            times = [_format_us(waits[late, cause] / rounds) for cause in ("skew", "transfer")]
        table.add_row(
            f"{row.rank}/{row.size}",
            str(row.key[0]),
            "" if row.key[2] == CONTROL else row.key[2],
            row.key[3],
            str(row.rounds),
            _format_us(row.seconds),
            _format_us(row.between_seconds),
            name,
            *times,
        )
    return Group(table, Text("Times are means per round in us."), *map(Text, errors))


def _sum_for(waits: Totals, peer: int) -> float:
    return waits[peer, "skew"] + waits[peer, "transfer"]


def _format_us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"
