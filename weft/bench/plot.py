"""The picture of a run: µs of dispatch + combine over tokens, with the floor and rivals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench.machine import machine_line
from weft.bench.moe import Report
from weft.bench.peers import Peer
from weft.bench.summary import Row, rows_of
from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET, FAINT = "#1f2933", "#6b7785", "#d9dee4"
COLOURS = {"onesided": "#c2410c", "collective": "#2563a6"}
NAMES = {"onesided": "weft, one-sided", "collective": "weft, collectives"}
RIVALS = ("#64748b", "#94a3b8", "#a8a29e")


def plot(path: Path, report: Report, peers: Sequence[Peer]) -> None:
    """Write the picture; the suffix of `path` chooses the format.

    Raises InvalidArgument where matplotlib is missing or cannot write there.
    """
    pyplot = matplotlib_pyplot()
    pairs = [row for row in rows_of(report, peers) if row.phase == "pair"]
    figure, axes = pyplot.subplots(figsize=(8.0, 5.0), dpi=160, layout="constrained")
    _draw_lines(axes, report, pairs)
    sizes = sorted({row.tokens for row in pairs})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel("dispatch + combine, µs")
    axes.legend(frameon=False, loc="upper left", labelcolor=INK)
    settings = report.settings
    title = (
        f"{settings.ranks} ranks, hidden {settings.hidden}, top {settings.top_k} of "
        f"{settings.experts} experts, {settings.router} routing, {settings.payload} out"
    )
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=12)
    figure.text(0.012, -0.035, machine_line(report.machine), fontsize=7.5, color=QUIET)
    plain(axes)
    save(figure, path)
    pyplot.close(figure)


def _draw_lines(axes: Axes, report: Report, pairs: Sequence[Row]) -> None:
    names = list(dict.fromkeys(name for row in pairs for name in row.rivals))
    for index, name in enumerate(names):
        points = {row.tokens: row.rivals[name] for row in pairs if name in row.rivals}
        colour = RIVALS[index % len(RIVALS)]
        axes.plot(
            list(points),
            list(points.values()),
            color=colour,
            lw=1.4,
            marker="s",
            ms=3.5,
            label=name,
        )
    for backend in report.settings.backends:
        rows = [row for row in pairs if row.backend == backend]
        if not rows:
            continue
        tokens = [row.tokens for row in rows]
        low, high = [row.us.min for row in rows], [row.us.p99 for row in rows]
        axes.fill_between(tokens, low, high, color=COLOURS[backend], alpha=0.15, lw=0)
        medians = [row.us.median for row in rows]
        axes.plot(
            tokens, medians, color=COLOURS[backend], lw=2.2, marker="o", ms=5, label=NAMES[backend]
        )
    floors = {row.tokens: row.floor for row in pairs if row.floor is not None}
    if floors:
        axes.plot(
            list(floors),
            list(floors.values()),
            color=INK,
            lw=1.1,
            ls=(0, (4, 3)),
            label="floor: NVLink bytes + 5 µs",
        )


def plain(axes: Axes) -> None:
    """Quiet axes: two spines, a faint grid behind the data."""
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
    """Return matplotlib.pyplot, drawing into files only.

    Raises InvalidArgument where it is not installed.
    """
    try:
        import matplotlib.ticker
    except ImportError as error:
        raise InvalidArgument(
            f"pictures need matplotlib: {error}; pip install matplotlib"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write a figure on white; its directory is made if needed.

    Raises InvalidArgument for a suffix or a place that cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight", pad_inches=0.18, facecolor="white")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot write the picture {path}: {error}") from error
