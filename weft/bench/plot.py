"""The picture of a run: us over tokens, and how many times the floor that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench.machine import machine_line
from weft.bench.report import Row
from weft.bench.style import BASELINES, COLOURS, INK, QUIET, matplotlib_pyplot, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHES = (0, (4, 3))


def plot(path: Path, rows: Sequence[Row], title: str, machine: Mapping[str, Any]) -> None:
    """Write the picture of the rows that hold the whole; the suffix of `path` chooses the format.

    Raises InvalidArgument where matplotlib is missing or cannot write there.
    """
    pyplot = matplotlib_pyplot()
    wholes = [row for row in rows if row.phase in ("pair", "call")]
    floors: dict[int, float] = {}  # the least, where variants send different bytes
    for row in wholes:
        if row.floor is not None:
            floors[row.tokens] = min(row.floor, floors.get(row.tokens, row.floor))
    panels = 2 if floors else 1
    figure, grid = pyplot.subplots(
        1, panels, figsize=(6.5 * panels, 5.0), dpi=160, layout="constrained", squeeze=False
    )
    left, right = grid[0][0], grid[0][-1]
    draw_times(left, wholes)
    left.set_ylabel("us")
    if floors:
        left.plot(*line(floors), color=INK, lw=1.1, ls=DASHES, label="floor")
        _draw(right, [row for row in wholes if row.floor], over_floor=True)
        right.axhline(1.0, color=INK, lw=1.1, ls=DASHES)
        right.set_ylabel("weft's time over its floor")  # others may send other bytes
    for each in grid[0]:
        scale(each, sorted({row.tokens for row in wholes}), pyplot)
        plain(each)
    if all(row.us.median < 5 * row.floor for row in wholes if row.floor) and floors:
        right.set_yscale("linear")
        right.yaxis.set_major_locator(pyplot.matplotlib.ticker.MaxNLocator(6))
        right.yaxis.set_major_formatter(pyplot.matplotlib.ticker.ScalarFormatter())
    left.legend(frameon=False, loc="upper left", labelcolor=INK, fontsize=8)
    left.set_title(title, loc="left", fontsize=11, color=INK, pad=12)
    figure.text(0.012, -0.035, machine_line(dict(machine)), fontsize=7.5, color=QUIET)
    save(figure, path)
    pyplot.close(figure)


def draw_times(axes: Axes, rows: Sequence[Row]) -> None:
    """Every variant, from the least to the 99th percentile around the median; every baseline."""
    for index, name in enumerate(dict.fromkeys(name for row in rows for name in row.baselines)):
        baseline = {row.tokens: row.baselines[name] for row in rows if name in row.baselines}
        colour = BASELINES[index % len(BASELINES)]
        axes.plot(*line(baseline), color=colour, lw=1.4, marker="s", ms=3.5, label=name)
    for colour, name, mine in _variants(rows):
        tokens = [row.tokens for row in mine]
        low, high = [row.us.min for row in mine], [row.us.p99 for row in mine]
        axes.fill_between(tokens, low, high, color=colour, alpha=0.15, lw=0)
        cold = {row.tokens: row.cold for row in mine if row.cold is not None}
        corun = {row.tokens: row.corun.call for row in mine if row.corun is not None}
        others = ((cold, "cold caches", ":"), (corun, "co-run with matmul", "-."))
        for points, kind, style in others:
            if points:
                label = f"{name}, {kind}"
                axes.plot(*line(points), color=colour, lw=1.2, ls=style, marker="o", label=label)
    _draw(axes, rows, over_floor=False)


def _draw(axes: Axes, rows: Sequence[Row], *, over_floor: bool) -> None:
    """The medians of every variant in us, or over its own floor."""
    for colour, name, mine in _variants(rows):
        unit = {row.tokens: row.floor or 1.0 if over_floor else 1.0 for row in mine}
        points = {row.tokens: row.us.median / unit[row.tokens] for row in mine}
        axes.plot(*line(points), color=colour, lw=2.0, marker="o", ms=4, label=name)


def _variants(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """(colour, name, rows) of each."""
    names = list(dict.fromkeys(row.variant for row in rows))
    return [
        (
            COLOURS[index % len(COLOURS)],
            "weft" if names == ["default"] else f"weft, {name}",
            [row for row in rows if row.variant == name],
        )
        for index, name in enumerate(names)
    ]


def scale(axes: Axes, sizes: Sequence[int], pyplot: Any) -> None:
    """Both logarithmic, named by plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.set_xlabel("tokens per rank")


def line(points: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Points as what matplotlib draws."""
    return list(points), list(points.values())
