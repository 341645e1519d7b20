"""What a low-latency run prints and writes: the table, and the samples as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.bench.limits import PAIR_FIXED_US, link_rate, pair_floor_us, why_no_floor
from weft.bench.lowlatency import LowReport
from weft.bench.machine import machine_line
from weft.bench.peers import Peer
from weft.bench.report import us_text, write_text
from weft.bench.summary import Spread

_PHASES = ("dispatch", "combine", "pair")


@dataclass(frozen=True, slots=True)
class LowRow:
    """One size: us by phase; floor of the pair and pair / floor, None where unknown; rivals' us."""

    tokens: int
    us: dict[str, Spread]
    floor: float | None
    ratio: float | None
    rivals: dict[str, float]


def low_rows(report: LowReport, peers: Sequence[Peer]) -> list[LowRow]:
    """A row for each size; recorded rivals only beside GPUs."""
    rows = []
    gpus = report.machine["gpus"]
    for found in report.measurements:
        us = {phase: Spread.of(found.samples[phase]) for phase in _PHASES}
        floor = pair_floor_us(found.out_bytes, found.back_bytes, gpus)
        rows.append(
            LowRow(
                tokens=found.tokens,
                us=us,
                floor=floor,
                ratio=None if floor is None else us["pair"].median / floor,
                rivals={
                    peer.label: peer.us[found.tokens]
                    for peer in peers
                    if found.tokens in peer.us and (gpus or peer.measured)
                },
            )
        )
    return rows


def print_low(console: Console, report: LowReport, peers: Sequence[Peer]) -> None:
    """Print the table of a run, and below it how the figures were taken."""
    settings, rows = report.settings, low_rows(report, peers)
    rivals = list(dict.fromkeys(name for row in rows for name in row.rivals))
    title = Text.assemble(
        ("weft bench lowlatency  ", "bold"),
        f"{settings.ranks} ranks, hidden {settings.hidden}, top {settings.top_k} of "
        f"{settings.experts}, {settings.router}; {settings.wire}",
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    names = ["tokens", "dispatch", "combine", "pair\nmin", "pair\nmedian", "pair\np99"]
    floor = any(row.floor is not None for row in rows)
    for name in names + ["floor\nus", "x floor"] * floor + [f"{name}\nus" for name in rivals]:
        table.add_column(name, justify="right")
    for row in rows:
        pair = row.us["pair"]
        texts = [str(row.tokens), us_text(row.us["dispatch"].median)]
        texts += [us_text(row.us["combine"].median)]
        texts += [us_text(value) for value in (pair.min, pair.median, pair.p99)]
        if floor:
            texts += ["" if row.floor is None else us_text(row.floor)]
            texts += ["" if row.ratio is None else f"{row.ratio:.2f}"]
        texts += [us_text(row.rivals[name]) if name in row.rivals else "" for name in rivals]
        table.add_row(*texts)
    console.print(table)
    console.print(Text(_caption(report, peers if rivals else [], floor=floor), style="dim"))


def _caption(report: LowReport, peers: Sequence[Peer], *, floor: bool) -> str:
    memory = report.memory
    lines = [
        machine_line(report.machine),
        "Checked before timing and after it: every row, scale and sum equals "
        "weft.ops.reference_lowlatency bit by bit, memory poisoned before.",
        *(f"us a call. {how}." for how in dict.fromkeys(m.method for m in report.measurements)),
        "Statistics over a rank's samples, slowest rank shown.",
        f"Memory for {report.settings.capacity} tokens: {memory['shared'] / 1e6:.1f} MB shared, "
        f"{memory['results'] / 1e6:.1f} MB of results a rank.",
    ]
    if floor:
        lines.append(
            f"floor: bytes off the busiest rank / {link_rate(report.settings.ranks):g} GB/s + "
            f"{PAIR_FIXED_US:g} us, measured on H200 (weft/bench/limits.py)."
        )
    lines += [text for text in (why_no_floor(report.machine["gpus"]),) if text]
    recorded = [peer for peer in peers if not peer.measured]
    if recorded:
        lines.append(f"Recorded figures: {recorded[0].date} on {recorded[0].machine}.")
    return "\n".join(lines)


def write_low_json(path: Path, report: LowReport, peers: Sequence[Peer]) -> None:
    """Write settings, machine, every sample and the table's figures."""
    from weft import __version__

    data = {
        "weft": __version__,
        "settings": asdict(report.settings),
        "machine": report.machine,
        "memory": report.memory,
        "checked": "bitwise against weft.ops.reference_lowlatency, before and after timing",
        "results": [asdict(found) for found in report.measurements],
        "rows": [asdict(row) for row in low_rows(report, peers)],
    }
    write_text(path, json.dumps(data, indent=1) + "\n")
