"""What a layer run prints and writes: the table, and the samples as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.bench.layer import LayerReport
from weft.bench.layer_arrival import FIRST, LAST, STORED
from weft.bench.layer_overlap import ALONE, TOGETHER
from weft.bench.layer_stages import STAGES
from weft.bench.limits import (
    HBM_READ_TB_PER_S,
    HBM_SHEET_TB_PER_S,
    LayerFloor,
    layer_floor_us,
    link_rate,
    why_no_floor,
)
from weft.bench.machine import machine_line
from weft.bench.peers import Peer
from weft.bench.report import us_text, write_text
from weft.bench.summary import Spread


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One size in one mode.

    gain: us without overlap / us of this one, None where that was not measured.
    floor: least us, None where unknown.   ratio: us / the largest floor.
    imbalance: rows of the fullest expert over the mean.
    rivals: others' us.   stages: part -> median us, slowest rank.
    hiding: together / (product + send) of the stages, None where they were not measured.
    """

    tokens: int
    overlap: str
    us: Spread
    gain: float | None
    floor: LayerFloor | None
    ratio: float | None
    imbalance: float
    rivals: dict[str, float]
    stages: dict[str, float]
    hiding: float | None


def layer_rows(report: LayerReport, peers: Sequence[Peer]) -> list[LayerRow]:
    """A row for each measurement; rivals only beside GPUs."""
    rows: list[LayerRow] = []
    base: dict[int, float] = {}
    gpus = report.machine["gpus"]
    for found in report.measurements:
        us, load = Spread.of(found.samples), report.loads[found.tokens]
        floor = layer_floor_us(load.hbm_bytes, load.wire_bytes, gpus)
        if found.overlap == "none":
            base[found.tokens] = us.median
        first = base.get(found.tokens)
        stages = {
            name: max(median(samples) for samples in each) for name, each in found.stages.items()
        }
        rows.append(
            LayerRow(
                tokens=found.tokens,
                overlap=found.overlap,
                us=us,
                gain=None if first is None else first / us.median,
                floor=floor,
                ratio=None if floor is None else us.median / floor.least,
                imbalance=load.imbalance,
                rivals={p.label: p.us[found.tokens] for p in peers if found.tokens in p.us}
                if gpus
                else {},
                stages=stages,
                hiding=stages[TOGETHER] / sum(stages[name] for name in ALONE)
                if TOGETHER in stages
                else None,
            )
        )
    return rows


def print_layer(console: Console, report: LayerReport, peers: Sequence[Peer]) -> None:
    """Print the table of a run, the stages if they were timed, and how the figures were taken."""
    rows = layer_rows(report, peers)
    rivals = list(dict.fromkeys(name for row in rows for name in row.rivals))
    floor = any(row.floor is not None for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = ["tokens", "overlap", "min", "median", "p99", "x none", "max / mean\nrows"]
    names += ["HBM\nmeasured", "HBM\nsheet", "NVLink", "x floor"] * floor
    for name in names + [f"{name}\nus" for name in rivals]:
        table.add_column(name, justify="left" if name == "overlap" else "right")
    for row in rows:
        taken = row.tokens in report.choices and report.choices[row.tokens].auto == row.overlap
        texts = [str(row.tokens), f"{row.overlap}, auto" if taken else row.overlap]
        texts += [us_text(value) for value in (row.us.min, row.us.median, row.us.p99)]
        texts += ["" if row.gain is None else f"{row.gain:.3f}", f"{row.imbalance:.2f}"]
        if row.floor is not None and row.ratio is not None:
            figures = (row.floor.memory, row.floor.memory_sheet, row.floor.links)
            texts += [*(us_text(value) for value in figures), f"{row.ratio:.2f}"]
        texts += [us_text(row.rivals[name]) if name in row.rivals else "" for name in rivals]
        table.add_row(*texts)
    console.print(_title(report))
    console.print(table)
    if staged := [row for row in rows if row.stages and row.hiding is None]:
        console.print(_stage_table(staged))
    if hidden := [row for row in rows if row.hiding is not None]:
        console.print(_hiding_table(hidden))
    console.print(Text(_choices(report)))
    console.print(Text(_caption(report, peers if rivals else [], floor=floor), style="dim"))


def _stage_table(rows: Sequence[LayerRow]) -> Table:
    """us of each part alone, medians, slowest rank."""
    title = Text("parts of the layer, each alone, us", "bold")
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    names = [name for name in STAGES if any(name in row.stages for row in rows)]
    for name in ("tokens", *names):
        table.add_column(name, justify="right")
    for row in rows:
        texts = [us_text(row.stages[name]) if name in row.stages else "" for name in names]
        table.add_row(str(row.tokens), *texts)
    return table


def _hiding_table(rows: Sequence[LayerRow]) -> Table:
    """The second product and sending, each alone and together; medians, slowest rank."""
    title = Text("the second product and sending, us", "bold")
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    watched = [name for name in (STORED, FIRST, LAST) if any(name in row.stages for row in rows)]
    names = ("tokens", "overlap", *ALONE, "sum", TOGETHER, "together\n/ sum", *watched)
    for name in names:
        table.add_column(name, justify="left" if name == "overlap" else "right")
    for row in rows:
        alone = [row.stages[name] for name in ALONE]
        figures = [*alone, sum(alone), row.stages[TOGETHER]]
        texts = [us_text(value) for value in figures] + [f"{row.hiding:.3f}"]
        texts += [us_text(row.stages[name]) if name in row.stages else "" for name in watched]
        table.add_row(str(row.tokens), row.overlap, *texts)
    return table


def _title(report: LayerReport) -> Text:
    settings, config = report.settings, report.settings.config
    wire = f"{settings.wire or 'bf16'} out, back by {settings.combine_by or 'default'}"
    shared = "with its shared expert" if config.shared else "no shared expert"
    return Text.assemble(
        ("weft bench layer  ", "bold"),
        f"{settings.model}: {settings.ranks} ranks, hidden {config.hidden}, intermediate "
        f"{config.intermediate}, top {config.routing.top_k} of {config.routing.num_experts}, "
        f"{settings.dtype} experts ({report.gemm}), {shared}, routing {settings.routing}, "
        f"rows by {settings.exchange}, {wire}",
    )


def _choices(report: LayerReport) -> str:
    """What "auto" takes at each size and why, and which tables say so."""
    found = report.choices
    lines = [f"auto, {tokens} tokens: {choice.reason}" for tokens, choice in found.items()]
    return "\n".join(
        lines + [text for text in dict.fromkeys(c.origin for c in found.values()) if text]
    )


def _caption(report: LayerReport, peers: Sequence[Peer], *, floor: bool) -> str:
    lines = [
        machine_line(report.machine),
        "us of one layer, from router logits to output. Checked before timing and after it against "
        "weft.reference.moe_layer in float32 (bounds: docs/moe.md), output poisoned before.",
        *(f"{how}." for how in dict.fromkeys(m.method for m in report.measurements)),
        "Statistics over a rank's samples, slowest rank shown.",
    ]
    if any(TOGETHER in found.stages for found in report.measurements):
        lines.append(
            "Product, send, together: steps of a round with an event behind each, which they hold. "
            "Rows at a peer: us from the product's start, read over NVLink while it runs."
        )
    if report.settings.device == "cpu":
        lines.append("CPU ranks: the model's rules with few numbers, a rehearsal.")
    if floor:
        lines.append(
            "HBM: weights of experts that have rows, and each row that arrives in and out once, on "
            f"the busiest rank, at {HBM_READ_TB_PER_S:g} TB/s (measured) and "
            f"{HBM_SHEET_TB_PER_S:g}. NVLink: bytes of the busiest rank / "
            f"{link_rate(report.settings.ranks):g} GB/s."
        )
    lines += [text for text in (why_no_floor(report.machine["gpus"]),) if text]
    if peers:
        lines.append(
            f"Published figures: {peers[0].machine}; FP8 experts, 8 ranks, uniform routing, "
            "neither router nor shared expert, as far as they say."
        )
    return "\n".join(lines + [f"Refused: {text}" for text in report.refused])


def write_layer_json(path: Path, report: LayerReport, peers: Sequence[Peer]) -> None:
    """Write settings, machine, every sample and the table's figures."""
    write_text(path, json.dumps(as_json(report, peers), indent=1) + "\n")


def as_json(report: LayerReport, peers: Sequence[Peer]) -> dict[str, Any]:
    """A run as JSON values."""
    from weft import __version__

    return {
        "weft": __version__,
        "settings": asdict(report.settings),
        "machine": report.machine,
        "gemm": report.gemm,
        "checked": "against weft.reference.moe_layer in float32, before and after timing",
        "loads": {str(tokens): asdict(load) for tokens, load in report.loads.items()},
        "refused": report.refused,
        "auto": {str(tokens): asdict(choice) for tokens, choice in report.choices.items()},
        "results": [asdict(found) for found in report.measurements],
        "rows": [asdict(row) for row in layer_rows(report, peers)],
    }
