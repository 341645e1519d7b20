# SPDX-License-Identifier: Apache-2.0
"""Plot of a run: us over tokens, with the floor and other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench.machine import machine_line
from weft.bench.report import Row
from weft.distribution import install_hint
from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET, FAINT = "#1f2933", "#6b7785", "#d9dee4"
COLOURS = ("#c2410c", "#2563a6", "#0f766e", "#6d28d9", "#a16207")
BASELINES = ("#64748b", "#94a3b8", "#a8a29e", "#475569", "#78716c", "#cbd5e1")


def plot(path: Path, rows: Sequence[Row], title: str, machine: dict[str, Any]) -> None:
    """Plot the rows of whole calls. The suffix of `path` selects the format.

    Raises InvalidArgument if matplotlib is missing or cannot write the file.
    """
    pyplot = matplotlib_pyplot()
    wholes = [row for row in rows if row.phase in ("pair", "call")]
    figure, axes = pyplot.subplots(figsize=(7.5, 5.0), dpi=160, layout="constrained")
    for index, name in enumerate(dict.fromkeys(name for row in wholes for name in row.baselines)):
        points = {row.tokens: row.baselines[name] for row in wholes if name in row.baselines}
        style = {"lw": 1.4, "marker": "s", "ms": 3.5, "color": BASELINES[index % len(BASELINES)]}
        axes.plot(*zip(*points.items(), strict=True), label=name, **style)
    for index, name in enumerate(dict.fromkeys(row.variant for row in wholes)):
        own, colour = [row for row in wholes if row.variant == name], COLOURS[index % len(COLOURS)]
        tokens = [row.tokens for row in own]
        low, high = [row.us.min for row in own], [row.us.p99 for row in own]
        band = "fastest to 99 %" if not index else None
        axes.fill_between(tokens, low, high, color=colour, alpha=0.15, lw=0, label=band)
        label = "weft" if name == "default" else f"weft, {name}"
        medians = [row.us.median for row in own]
        axes.plot(tokens, medians, color=colour, lw=2.0, marker="o", ms=4, label=label)
    floors: dict[int, float] = {}  # the least, because variants send different bytes
    for row in wholes:
        if row.floor is not None:
            floors[row.tokens] = min(row.floor, floors.get(row.tokens, row.floor))
    if floors:
        dashes = (0, (4, 3))
        axes.plot(*zip(*floors.items(), strict=True), color=INK, lw=1.1, ls=dashes, label="floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row.tokens for row in wholes})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel("us")
    style_axes(axes)
    axes.legend(frameon=False, loc="upper left", labelcolor=INK, fontsize=8)
    axes.set_title(title, loc="left", fontsize=9, color=INK, pad=12, wrap=True)
    figure.text(0.012, -0.035, machine_line(machine), fontsize=7.5, color=QUIET)
    save(figure, path)
    pyplot.close(figure)


def style_axes(axes: Axes) -> None:
    """Style axes: two spines, a faint grid below the data."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.grid(visible=True, which="major", color=FAINT, lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, length=0, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def matplotlib_pyplot() -> Any:
    """Return matplotlib.pyplot with a backend for files.

    Raises InvalidArgument if it is not installed.
    """
    try:
        import matplotlib.ticker
    except ImportError as error:
        raise InvalidArgument(
            f"pictures need matplotlib: {error}; {install_hint('plot')}"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write a figure on white, and create its folder if needed.

    Raises InvalidArgument if the suffix is unknown or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight", pad_inches=0.18, facecolor="white")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot write the picture {path}: {error}") from error
