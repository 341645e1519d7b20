"""The picture of an all-reduce run: µs over tokens, and what that makes of the wire."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.bench.allreduce import ReduceReport
from weft.bench.allreduce_cases import AUTO, wire_bytes
from weft.bench.allreduce_summary import ReduceRow, reduce_rows
from weft.bench.limits import link_rate
from weft.bench.machine import machine_line
from weft.bench.peers import Peer
from weft.bench.plot import line, scale
from weft.bench.style import INK, QUIET, RIVALS, matplotlib_pyplot, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = (0, (4, 3))
_COLOURS = {
    "auto": "#c2410c",
    "oneshot": "#b45309",
    "twoshot": "#0f766e",
    "twoshot_bulk": "#6d28d9",
    "collective": "#2563a6",
}


def plot_reduce(path: Path, report: ReduceReport, peers: Sequence[Peer]) -> None:
    """Write the picture; the suffix of `path` chooses the format.

    Raises InvalidArgument where matplotlib is missing or cannot write there.
    """
    pyplot = matplotlib_pyplot()
    rows = reduce_rows(report, peers)
    settings = report.settings
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13.0, 5.0), dpi=160, layout="constrained"
    )
    _draw_times(left, rows)
    left.set_ylabel("one call, µs")
    _draw_rates(right, report, rows)
    right.set_ylabel("bytes of a two-shot, GB/s for each GPU")
    for axes, place in ((left, "upper left"), (right, "lower right")):
        scale(axes, sorted({row.tokens for row in rows}), pyplot)
        axes.set_xlabel("tokens")
        axes.legend(frameon=False, loc=place, labelcolor=INK, fontsize=8)
        plain(axes)
    title = f"{settings.ranks} ranks, hidden {settings.hidden}, {settings.dtype}\n{settings.what}"
    left.set_title(title, loc="left", fontsize=11, color=INK, pad=12)
    figure.text(0.012, -0.035, machine_line(report.machine), fontsize=7.5, color=QUIET)
    save(figure, path)
    pyplot.close(figure)


def _draw_times(axes: Axes, rows: Sequence[ReduceRow]) -> None:
    for name, colour, points in _rivals(rows):
        axes.plot(*line(points), color=colour, lw=1.4, marker="s", ms=3.5, label=name)
    for backend in dict.fromkeys(row.backend for row in rows):
        mine, colour = [row for row in rows if row.backend == backend], _COLOURS[backend]
        tokens = [row.tokens for row in mine]
        low, high = [row.us.min for row in mine], [row.us.p99 for row in mine]
        axes.fill_between(tokens, low, high, color=colour, alpha=0.15, lw=0)
        width = 2.2 if backend == AUTO else 1.6
        medians = [row.us.median for row in mine]
        axes.plot(
            tokens, medians, color=colour, lw=width, marker="o", ms=4, label=f"weft, {backend}"
        )
    floors = {row.tokens: row.floor for row in rows if row.floor is not None}
    if floors:
        name = "floor: NVLink bytes and ways"
        axes.plot(*line(floors), color=INK, lw=1.1, ls=_DASHES, label=name)


def _draw_rates(axes: Axes, report: ReduceReport, rows: Sequence[ReduceRow]) -> None:
    """One scale for all: the bytes of a two-shot, whatever a backend really sends."""
    settings = report.settings

    def rates(points: dict[int, float]) -> dict[int, float]:
        return {
            tokens: wire_bytes("twoshot", tokens * settings.row_bytes, settings.ranks) / us / 1e3
            for tokens, us in points.items()
        }

    for name, colour, points in _rivals(rows):
        axes.plot(*line(rates(points)), color=colour, lw=1.4, marker="s", ms=3.5, label=name)
    for backend in dict.fromkeys(row.backend for row in rows):
        points = {row.tokens: row.us.median for row in rows if row.backend == backend}
        colour, name = _COLOURS[backend], f"weft, {backend}"
        axes.plot(*line(rates(points)), color=colour, lw=1.8, marker="o", ms=4, label=name)
    if any(row.floor is not None for row in rows):
        roof = link_rate(settings.ranks)
        name = f"roof: {roof:g} GB/s"
        axes.axhline(roof, color=INK, lw=1.1, ls=_DASHES, label=name)
    axes.set_title("roofline", loc="left", fontsize=11, color=INK, pad=12)


def _rivals(rows: Sequence[ReduceRow]) -> list[tuple[str, str, dict[int, float]]]:
    """Name, colour and us by tokens of each library that stands beside ours."""
    names = list(dict.fromkeys(name for row in rows for name in row.rivals))
    return [
        (
            name,
            RIVALS[index % len(RIVALS)],
            {row.tokens: row.rivals[name] for row in rows if name in row.rivals},
        )
        for index, name in enumerate(names)
    ]
