"""How pictures look, and what they need of matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET, FAINT = "#1f2933", "#6b7785", "#d9dee4"
COLOURS = ("#c2410c", "#2563a6", "#0f766e", "#6d28d9", "#a16207")
BASELINES = ("#64748b", "#94a3b8", "#a8a29e", "#475569", "#78716c", "#cbd5e1")


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
            f"pictures need matplotlib: {error}; pip install 'weft[plot]'"
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
