"""The picture of a run: µs of dispatch + combine over tokens, and what that makes of the wire."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench.limits import PAIR_FIXED_US, link_rate
from weft.bench.machine import machine_line
from weft.bench.moe import Report
from weft.bench.peers import Peer
from weft.bench.style import COLOURS, INK, NAMES, QUIET, RIVALS, matplotlib_pyplot, plain, save
from weft.bench.summary import Row, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = (0, (4, 3))


def plot(path: Path, report: Report, peers: Sequence[Peer]) -> None:
    """Write the picture; the suffix of `path` chooses the format.

    Raises InvalidArgument where matplotlib is missing or cannot write there.
    """
    pyplot = matplotlib_pyplot()
    pairs = [row for row in rows_of(report, peers) if row.phase == "pair"]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13.0, 5.0), dpi=160, layout="constrained"
    )
    _draw_times(left, report, pairs, peers)
    left.set_ylabel("dispatch + combine, µs")
    _draw_rates(right, report, pairs, peers)
    right.set_ylabel("rows that the routing sends, GB/s for each GPU")
    for axes, place in ((left, "upper left"), (right, "lower right")):
        scale(axes, sorted({row.tokens for row in pairs}), pyplot)
        axes.legend(frameon=False, loc=place, labelcolor=INK)
        plain(axes)
    settings = report.settings
    title = (
        f"{settings.ranks} ranks, hidden {settings.hidden}, top {settings.top_k} of "
        f"{settings.experts} experts, {settings.router} routing\n{settings.wire}"
    )
    left.set_title(title, loc="left", fontsize=11, color=INK, pad=12)
    figure.text(0.012, -0.035, machine_line(report.machine), fontsize=7.5, color=QUIET)
    save(figure, path)
    pyplot.close(figure)


def scale(axes: Axes, sizes: Sequence[int], pyplot: Any) -> None:
    """Both logarithmic, named by plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.set_xlabel("tokens per rank")


def _draw_times(axes: Axes, report: Report, pairs: Sequence[Row], peers: Sequence[Peer]) -> None:
    exact = {peer.label for peer in peers if not peer.fp8_home}
    home = f" ({report.settings.dtype} back)" if report.settings.combine_by == "fp8" else ""
    for name, colour, points in _rivals(pairs):
        label = name + home if name in exact else name
        axes.plot(*line(points), color=colour, lw=1.4, marker="s", ms=3.5, label=label)
    for backend in report.settings.backends:
        rows = [row for row in pairs if row.backend == backend]
        if not rows:
            continue
        colour, tokens = COLOURS[backend], [row.tokens for row in rows]
        low, high = [row.us.min for row in rows], [row.us.p99 for row in rows]
        axes.fill_between(tokens, low, high, color=colour, alpha=0.15, lw=0)
        medians = [row.us.median for row in rows]
        axes.plot(tokens, medians, color=colour, lw=2.2, marker="o", ms=5, label=NAMES[backend])
        cold = {row.tokens: row.cold for row in rows if row.cold is not None}
        if cold:
            name = f"{NAMES[backend]}, cold L2"
            axes.plot(*line(cold), color=colour, lw=1.2, ls=":", marker="o", ms=3.5, label=name)
        beside = {row.tokens: row.beside.pair for row in rows if row.beside is not None}
        if beside:
            name = f"{NAMES[backend]}, beside matmul {report.settings.product_size}³"
            axes.plot(*line(beside), color=colour, lw=1.2, ls="-.", marker="^", ms=4, label=name)
    floors = {row.tokens: row.floor for row in pairs if row.floor is not None}
    if floors:
        name = f"floor: NVLink bytes + {PAIR_FIXED_US:g} µs"
        axes.plot(*line(floors), color=INK, lw=1.1, ls=_DASHES, label=name)


def _draw_rates(axes: Axes, report: Report, pairs: Sequence[Row], peers: Sequence[Peer]) -> None:
    """The roofline: what the links carry, and what two barriers and two kernels leave of it."""
    plain = report.settings.rival or report.settings
    cast = {peer.label for peer in peers if peer.fp8_home}  # e4m3 without scales
    rows_sent = {found.tokens: found.traffic.wire for found in report.measurements}
    for name, colour, points in _rivals(pairs):
        back = plain.hidden if name in cast else plain.returned_bytes
        moved = plain.sent_bytes + back
        rates = {tokens: rows_sent[tokens] * moved / us / 1e3 for tokens, us in points.items()}
        axes.plot(*line(rates), color=colour, lw=1.4, marker="s", ms=3.5, label=name)
    for backend in report.settings.backends:
        rates = {row.tokens: row.wire for row in pairs if row.backend == backend and row.moved}
        if rates:
            colour, name = COLOURS[backend], NAMES[backend]
            axes.plot(*line(rates), color=colour, lw=2.2, marker="o", ms=5, label=name)
    known = {row.tokens: row.moved for row in pairs if row.floor is not None and row.moved}
    if known:
        roof = link_rate(report.settings.ranks)
        slope = {tokens: moved / PAIR_FIXED_US / 1e3 for tokens, moved in known.items()}
        below = {tokens: rate for tokens, rate in slope.items() if rate < 2 * roof}
        name = f"latency: {PAIR_FIXED_US:g} µs a pair"
        axes.plot(*line(below), color=QUIET, lw=1.1, ls=":", label=name)
        name = f"roof: {roof:g} GB/s"
        axes.axhline(roof, color=INK, lw=1.1, ls=_DASHES, label=name)
    axes.set_title("roofline", loc="left", fontsize=11, color=INK, pad=12)


def _rivals(pairs: Sequence[Row]) -> list[tuple[str, str, dict[int, float]]]:
    """Name, colour and us by tokens of each library that stands beside ours."""
    names = list(dict.fromkeys(name for row in pairs for name in row.rivals))
    return [
        (
            name,
            RIVALS[index % len(RIVALS)],
            {row.tokens: row.rivals[name] for row in pairs if name in row.rivals},
        )
        for index, name in enumerate(names)
    ]


def line(points: dict[int, float]) -> tuple[list[int], list[float]]:
    """Points as what matplotlib draws."""
    return list(points), list(points.values())
