"""`weft tune layer`: measure every overlap of a layer here, and write the table "auto" reads.

The times are those of `weft bench layer`: whole layers, each with room for exactly its tokens,
checked before and after. For "auto" nothing else counts than which overlap takes least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from weft.bench.case import choose
from weft.bench.layer import LayerCase
from weft.bench.machine import measured_on
from weft.bench.report import Spread, times_grid
from weft.bench.run import Report, run
from weft.errors import InvalidArgument
from weft.moe import MODES, LayerTable
from weft.moe.choice import overlap_bands
from weft.moe.table import LayerCurve, LayerSizes


@dataclass(frozen=True, slots=True)
class Tuned:
    """A table, or what a check found wrong.

    refused: what this layer does not offer, in its words.
    """

    table: LayerTable | None
    problem: str | None
    refused: tuple[str, ...]


def tune(case: LayerCase, modes: Sequence[str], *, quiet: bool = False) -> Tuned:
    """Measure every overlap with each mode; case: all but the mode.

    Raises InvalidArgument for an mode that does not exist or options that no table has, and
    what `weft.launch` raises.
    """
    check_tunable(case, modes)
    reports: list[Report] = []
    refused: list[str] = []
    for mode in modes:
        report = run(replace(case, mode=mode), quiet=quiet)
        refused += [f"mode {mode}, {text}" for text in _gathered(report.refused)]
        if report.nothing_served:
            continue  # this layer does not have the mode; the report names why
        if report.problem is not None:
            return Tuned(None, f"mode {mode}, {report.problem}", tuple(refused))
        reports.append(report)
    if not reports:
        return Tuned(None, "; ".join(refused), tuple(refused))
    return Tuned(table_of(reports), None, tuple(refused))


def table_of(reports: Sequence[Report]) -> LayerTable:
    """The table of runs that differ by their mode.

    Raises InvalidArgument where GPUs of several kinds took part.
    """
    case = _case(reports[0])
    gpu, date, where = measured_on(reports[0].machine)
    methods = dict.fromkeys(each.method for report in reports for each in report.measurements)
    return LayerTable(
        sizes=LayerSizes.of(case.config, gpu=gpu, ranks=case.ranks, fp8=case.dtype == "fp8"),
        model=case.model,
        date=date,
        machine=where,
        method=f"{'; '.join(methods)}, median, slowest rank; routing {case.routing}",
        curves=tuple(map(curve_of, reports)),
    )


def curve_of(report: Report) -> LayerCurve:
    """The times of one run: medians, slowest rank."""
    found = {
        (each.variant, each.tokens): round(Spread.of(each.samples_us["call"]).median, 2)
        for each in report.measurements
    }
    words = dict.fromkeys(each.variant for each in report.measurements)
    tokens = tuple(sorted({each.tokens for each in report.measurements}))
    us = {word: tuple(found.get((word, size)) for size in tokens) for word in words}
    gemm = report.measurements[0].facts["gemm"]
    return LayerCurve(_case(report).mode, gemm, tokens, us)


def _case(report: Report) -> LayerCase:
    assert isinstance(report.case, LayerCase)
    return report.case


def print_table(console: Console, table: LayerTable, refused: Sequence[str]) -> None:
    """Print every curve, and below it what "auto" makes of it."""
    console.print(table.origin, style="dim")
    for curve in table.curves:
        console.print(f"\n{table.sizes.text}; mode {curve.mode}, {curve.gemm} GEMM")
        console.print(times_grid(curve.tokens, curve.us))
        console.print(f"auto: {bands_text(curve)}")
    for text in refused:
        console.print(f"Refused: {text}", style="dim")


def bands_text(curve: LayerCurve) -> str:
    """Which overlap serves which tokens of a curve."""
    bands = overlap_bands(curve, tuple(curve.us))
    starts = (1, *bands.starts[1:])
    return ", ".join(
        f"{word} from {start}" for word, start in zip(bands.names, starts, strict=True)
    )


def _gathered(refused: Sequence[str]) -> list[str]:
    """Refusals of a run that differ by their tokens alone, as one."""
    found: dict[tuple[str, str], list[str]] = {}
    for text in refused:
        name, _, why = text.partition(": ")
        overlap, _, tokens = name.removesuffix(" tokens").rpartition(", ")
        found.setdefault((overlap, why), []).append(tokens)
    return [f"{word}, {', '.join(sizes)} tokens: {why}" for (word, why), sizes in found.items()]


def check_tunable(case: LayerCase, modes: Sequence[str]) -> None:
    """Raises InvalidArgument for what no table can say."""
    for mode in modes:
        choose(mode=(mode, MODES))
    if not modes or len(set(modes)) != len(modes):
        raise InvalidArgument(f"modes are {', '.join(modes) or 'none'}: name each once")
    for name in ("quantize", "combine_dtype", "max_rows"):
        if getattr(case, name) is not None:
            raise InvalidArgument(
                f"{name} is {getattr(case, name)!r}; a table is of the default: leave it out"
            )
    if not case.graph and case.device == "cuda":
        raise InvalidArgument("a table is of graphs: leave eager calls out")
