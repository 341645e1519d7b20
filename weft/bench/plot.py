# SPDX-License-Identifier: Apache-2.0
"""Plots of the us over tokens of a run, with the floor and other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench.machine import format_machine
from weft.bench.report import Row
from weft.distribution import install_hint
from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEXT_COLOR, MUTED_COLOR, GRID_COLOR = "#1f2933", "#6b7785", "#d9dee4"
WEFT_COLORS = ("#c2410c", "#2563a6", "#0f766e", "#6d28d9", "#a16207")
BASELINE_COLORS = ("#64748b", "#94a3b8", "#a8a29e", "#475569", "#78716c", "#cbd5e1")


def plot(path: Path, rows: Sequence[Row], title: str, machine: dict[str, Any]) -> None:
    """Plot the times of whole calls. The suffix of `path` selects the format.

    Raises InvalidArgument if matplotlib is missing or cannot write the file.
    """
    pyplot = import_pyplot()
    rows = [row for row in rows if row.phase in ("pair", "call")]
    figure, axes = pyplot.subplots(figsize=(7.5, 5.0), dpi=160, layout="constrained")
    for index, name in enumerate(dict.fromkeys(name for row in rows for name in row.baselines)):
        points = {row.tokens: row.baselines[name] for row in rows if name in row.baselines}
        style = {
            "lw": 1.4,
            "marker": "s",
            "ms": 3.5,
            "color": BASELINE_COLORS[index % len(BASELINE_COLORS)],
        }
        axes.plot(*zip(*points.items(), strict=True), label=name, **style)
    for index, name in enumerate(dict.fromkeys(row.variant for row in rows)):
        variant_rows = [row for row in rows if row.variant == name]
        color = WEFT_COLORS[index % len(WEFT_COLORS)]
        tokens = [row.tokens for row in variant_rows]
        low = [row.us.min for row in variant_rows]
        high = [row.us.p99 for row in variant_rows]
        band = "fastest to 99 %" if not index else None
        axes.fill_between(tokens, low, high, color=color, alpha=0.15, lw=0, label=band)
        label = "weft" if name == "default" else f"weft, {name}"
        medians = [row.us.median for row in variant_rows]
        axes.plot(tokens, medians, color=color, lw=2.0, marker="o", ms=4, label=label)
    floors: dict[int, float] = {}  # the minimum by size: variants send different numbers of bytes
    for row in rows:
        if row.floor is not None:
            floors[row.tokens] = min(row.floor, floors.get(row.tokens, row.floor))
    if floors:
        dashes = (0, (4, 3))
        axes.plot(
            *zip(*floors.items(), strict=True), color=TEXT_COLOR, lw=1.1, ls=dashes, label="floor"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row.tokens for row in rows})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel("us")
    style_axes(axes)
    axes.legend(frameon=False, loc="upper left", labelcolor=TEXT_COLOR, fontsize=8)
    axes.set_title(title, loc="left", fontsize=9, color=TEXT_COLOR, pad=12, wrap=True)
    figure.text(0.012, -0.035, format_machine(machine), fontsize=7.5, color=MUTED_COLOR)
    save_figure(figure, path)
    pyplot.close(figure)


def style_axes(axes: Axes) -> None:
    """Apply the common style: two spines, and a light grid below the data."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID_COLOR)
    axes.grid(visible=True, which="major", color=GRID_COLOR, lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED_COLOR, length=0, labelsize=9)
    axes.xaxis.label.set_color(TEXT_COLOR)
    axes.yaxis.label.set_color(TEXT_COLOR)


def import_pyplot() -> Any:
    """Import matplotlib.pyplot with a backend that needs no display.

    Raises InvalidArgument if it is not installed.
    """
    try:
        import matplotlib.ticker
    except ImportError as error:
        raise InvalidArgument(f"plots need matplotlib: {error}; {install_hint('plot')}") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a file, whose folder is created if needed.

    Raises InvalidArgument if the suffix is unknown or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight", pad_inches=0.18, facecolor="white")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot write the plot {path}: {error}") from error
