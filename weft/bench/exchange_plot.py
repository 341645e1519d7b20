"""A picture of one exchange: who sent how many token rows to whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.bench.style import FAINT, INK, QUIET, matplotlib_pyplot, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WARM = ("#fff7ed", "#fed7aa", "#fba45c", "#dd5f1c", "#9a3412")


def draw_exchange(
    path: Path, rows: torch.Tensor, *, tokens: Sequence[int], row_bytes: int, title: str
) -> None:
    """Write the matrix of token rows, beside it the bytes that left and reached each rank.

    rows: int64 `[ranks, ranks]`, from rank i to rank j.   tokens: each rank's own.

    Raises InvalidArgument where matplotlib is missing or cannot write there.
    """
    pyplot = matplotlib_pyplot()
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9.6, 4.6), dpi=160, width_ratios=(1.0, 0.9), layout="constrained"
    )
    colours = pyplot.matplotlib.colors.LinearSegmentedColormap.from_list("weft", _WARM)
    _matrix(left, rows, tokens, colours)
    _bars(right, rows, row_bytes)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, color=INK)
    save(figure, path)
    pyplot.close(figure)


def _matrix(axes: Axes, rows: torch.Tensor, tokens: Sequence[int], colours: Any) -> None:
    most = max(int(rows.max()), 1)
    axes.imshow(rows.numpy(), cmap=colours, vmin=0, vmax=most)
    for source, line in enumerate(rows.tolist()):
        for target, count in enumerate(line):
            axes.text(
                target,
                source,
                str(count),
                ha="center",
                va="center",
                fontsize=12,
                color="white" if count > 0.6 * most else INK,
                alpha=0.45 if source == target else 1.0,
            )
    ranks = range(len(rows))
    axes.set_xticks(ranks, [f"rank {rank}" for rank in ranks])
    names = [f"rank {rank}\n{tokens[rank]} tokens" for rank in ranks]
    axes.set_yticks(ranks, names)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, colors=QUIET, labelsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for edge in range(1, len(rows)):  # white gaps between the cells
        axes.axhline(edge - 0.5, color="white", lw=3)
        axes.axvline(edge - 0.5, color="white", lw=3)
    axes.set_xlabel(
        "token rows from rank (down) to rank (across); faint: stays on its rank",
        color=QUIET,
        labelpad=10,
    )


def _bars(axes: Axes, rows: torch.Tensor, row_bytes: int) -> None:
    """KiB of rows that left and reached each rank; a rank's rows for itself cross no link."""
    kib = row_bytes / 1024
    remote = rows.clone().fill_diagonal_(0)
    out = [float(total) * kib for total in remote.sum(dim=1)]
    into = [float(total) * kib for total in remote.sum(dim=0)]
    ranks = range(len(out))
    axes.barh([r - 0.19 for r in ranks], out, height=0.34, color="#c2410c", label="sent")
    axes.barh([r + 0.19 for r in ranks], into, height=0.34, color="#94a3b8", label="received")
    most = max([*out, *into, 1.0])
    for rank in ranks:
        for offset, value in ((-0.19, out[rank]), (0.19, into[rank])):
            axes.text(
                value + most * 0.015,
                rank + offset,
                f"{value:.0f}",
                va="center",
                fontsize=9,
                color=QUIET,
            )
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.12)
    axes.set_xticks([])
    axes.tick_params(length=0, colors=QUIET, labelsize=9)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(FAINT)
    axes.set_xlabel("KiB between ranks in dispatch", color=QUIET, labelpad=10)
    axes.legend(
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=2,
        labelcolor=INK,
        fontsize=9,
        handlelength=1.0,
        handleheight=1.0,
    )
