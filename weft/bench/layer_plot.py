"""The picture of a layer run: µs over tokens by overlap, and how many times the floor that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench.layer import LayerReport
from weft.bench.layer_report import LayerRow, layer_rows
from weft.bench.machine import machine_line
from weft.bench.peers import Peer
from weft.bench.plot import line, scale
from weft.bench.style import INK, QUIET, RIVALS, matplotlib_pyplot, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = (0, (4, 3))
_COLOURS = {
    "none": "#2563a6",
    "shared": "#0f766e",
    "push": "#c2410c",
}


def plot_layer(path: Path, report: LayerReport, peers: Sequence[Peer]) -> None:
    """Write the picture of a run; the suffix of `path` chooses the format.

    Raises InvalidArgument where matplotlib is missing or cannot write there.
    """
    settings = report.settings
    experts = settings.config.routing.num_experts // settings.ranks
    title = (
        f"{settings.model}, {settings.dtype} experts, {settings.ranks} ranks of {experts} experts, "
        f"{settings.routing} routing"
    )
    draw_layer(path, layer_rows(report, peers), title, report.machine)


def draw_layer(
    path: Path, rows: Sequence[LayerRow], title: str, machine: Mapping[str, Any]
) -> None:
    """The same from rows: times on the left; beside them, times over the floor, if it is known."""
    pyplot = matplotlib_pyplot()
    floors = {row.tokens: row.floor.least for row in rows if row.floor is not None}
    panels = 2 if floors else 1
    figure, grid = pyplot.subplots(
        1, panels, figsize=(6.5 * panels, 5.0), dpi=160, layout="constrained", squeeze=False
    )
    left = grid[0][0]
    _draw_rivals(left, rows)
    _draw(left, rows, {})
    left.set_ylabel("one layer, µs")
    if floors:
        left.plot(
            *line(floors),
            color=INK,
            lw=1.1,
            ls=_DASHES,
            label="floor of weft's ranks: memory and links",
        )
        right = grid[0][1]
        _draw(right, rows, floors)
        right.axhline(1.0, color=INK, lw=1.1, ls=_DASHES)
        right.set_ylabel("weft's time over its floor")  # others' had other ranks and other work
    for axes in grid[0]:
        scale(axes, sorted({row.tokens for row in rows}), pyplot)
        axes.set_yscale("linear")
        axes.set_ylim(bottom=0 if axes is left else None)
        axes.yaxis.set_major_locator(pyplot.matplotlib.ticker.MaxNLocator(6))
        axes.yaxis.set_major_formatter(pyplot.matplotlib.ticker.ScalarFormatter())
        plain(axes)
    left.legend(frameon=False, loc="upper left", labelcolor=INK, fontsize=8)
    left.set_title(title, loc="left", fontsize=11, color=INK, pad=12)
    figure.text(0.012, -0.035, machine_line(dict(machine)), fontsize=7.5, color=QUIET)
    save(figure, path)
    pyplot.close(figure)


def _draw(axes: Axes, rows: Sequence[LayerRow], unit: Mapping[int, float]) -> None:
    """Every overlap, over `unit` at its tokens, 1 where it has none."""
    for overlap in dict.fromkeys(row.overlap for row in rows):
        mine = {
            row.tokens: row.us.median / unit.get(row.tokens, 1.0)
            for row in rows
            if row.overlap == overlap
        }
        name, colour = f'weft, overlap "{overlap}"', _COLOURS[overlap]
        axes.plot(*line(mine), color=colour, lw=1.8, marker="o", ms=4, label=name)


def _draw_rivals(axes: Axes, rows: Sequence[LayerRow]) -> None:
    """Every other library's times."""
    for index, name in enumerate(dict.fromkeys(name for row in rows for name in row.rivals)):
        rival = {row.tokens: row.rivals[name] for row in rows if name in row.rivals}
        colour = RIVALS[index % len(RIVALS)]
        axes.plot(*line(rival), color=colour, lw=1.4, marker="s", ms=3.5, label=name)
