"""`weft tune allreduce`: measure every backend on this machine, and write the table "auto" reads.

Time is taken in a chain, as in a model: an operation that reads the result and writes the next
call's rows stands before every call, so that no call overlaps the next more than it would there.
The time of a chain of these operations alone is taken off.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table as Grid

import weft
from weft.bench.allreduce import gpu_names
from weft.bench.allreduce_cases import ReduceSettings
from weft.bench.allreduce_trial import ReduceTrial, make_reduce
from weft.bench.clock import measure_call
from weft.bench.machine import describe_machine, measured_on
from weft.bench.moe import first_problem
from weft.bench.progress import progress
from weft.bench.report import us_text, write_text
from weft.errors import InvalidArgument, UsageError
from weft.memory import Group, launch
from weft.ops.allreduce_curve import Curve
from weft.ops.allreduce_table import BACKENDS, MEASURED, Table
from weft.shape import NUMBERS

LIMIT_SECONDS = 3600.0  # of a whole run


@dataclass(frozen=True, slots=True)
class TunePlan:
    """What to measure: `settings` for each hidden size and epilogue. Equal on all ranks.

    settings: everything else; its backends are those that are compared.
    """

    settings: ReduceSettings
    hiddens: tuple[int, ...]
    epilogues: tuple[str, ...]

    def settings_of(self, hidden: int, epilogue: str) -> ReduceSettings:
        """The settings of one curve."""
        return replace(self.settings, hidden=hidden, epilogue=epilogue)


def tuning_plan(
    *, hiddens: Sequence[int], epilogues: Sequence[str], backends: Sequence[str], **common: Any
) -> TunePlan:
    """Return what to measure; common: as in ReduceSettings.

    Raises InvalidArgument for sizes that do not fit together, for a backend whose bits are not
    those of the others.
    """
    if strange := [name for name in backends if name not in BACKENDS]:
        raise InvalidArgument(
            f"backend is {strange[0]!r}; auto chooses among {', '.join(BACKENDS)}: leave it out"
        )
    tokens = tuple(sorted(common.pop("tokens")))
    plans = [
        ReduceSettings(
            tokens=tokens,
            hidden=hidden,
            epilogue=epilogue,
            backends=tuple(backends),
            graph=True,
            seed=0,
            **common,
        )
        for hidden in hiddens
        for epilogue in epilogues
    ]
    return TunePlan(plans[0], tuple(hiddens), tuple(epilogues))


@dataclass(frozen=True, slots=True)
class Tuned:
    """A table, or what the check found wrong: nothing is timed from there on."""

    table: Table | None
    problem: str | None


def tune(plan: TunePlan, *, quiet: bool = False) -> Tuned:
    """Start the ranks, check and time every backend, and return the table.

    Raises what `weft.launch` raises, and InvalidArgument where GPUs of several kinds take part.
    """
    settings = plan.settings
    first, *_ = launch(
        tune_body,
        plan,
        quiet,
        ranks=settings.ranks,
        device=settings.device,
        timeout=LIMIT_SECONDS,
    )
    if first["problem"] is not None:
        return Tuned(None, first["problem"])
    gpu, date, where = measured_on(first["machine"])
    curves = tuple(Curve(**{**found, "tokens": settings.tokens}) for found in first["curves"])
    table = Table(
        gpu=gpu,
        ranks=settings.ranks,
        source=MEASURED,
        date=date,
        machine=where,
        method=first["method"],
        curves=curves,
    )
    return Tuned(table, None)


def tune_body(group: Group, plan: TunePlan, quiet: bool) -> dict[str, Any]:
    """What every rank does; all ranks return the same curves."""
    settings = plan.settings
    result: dict[str, Any] = {
        "machine": describe_machine(gpu_names(group)),
        "curves": [],
        "method": "",
        "problem": None,
    }
    count = len(plan.hiddens) * len(plan.epilogues) * len(settings.tokens)
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(progress(count, quiet=quiet or group.rank != 0))
        for hidden in plan.hiddens:
            with make_reduce(group, plan.settings_of(hidden, plan.epilogues[0])) as reduce:
                for epilogue in plan.epilogues:
                    problem = _curve(
                        group, plan.settings_of(hidden, epilogue), reduce, step, result
                    )
                    if problem is not None:
                        result["problem"] = problem
                        return result
                group.barrier()  # a peer may still be reading what is about to go
    return result


def _curve(
    group: Group,
    settings: ReduceSettings,
    reduce: weft.AllReduce,
    step: Callable[[str], None],
    result: dict[str, Any],
) -> str | None:
    """Measure one curve into `result`; return what any rank found wrong, or None."""
    us: dict[str, list[float | None]] = {backend: [] for backend in settings.backends}
    for tokens in settings.tokens:
        step(f"{settings.hidden} x {settings.dtype}, {settings.epilogue}, {tokens} tokens")
        trial = ReduceTrial(group, settings, reduce, tokens)
        for backend, times in us.items():
            try:
                trial.prepare(backend)
            except UsageError:  # of sizes that are equal on all ranks: no rank is served
                times.append(None)
                continue
            if problem := first_problem(group, trial.check(backend)):
                return f"{backend}, {tokens} tokens x {settings.hidden}: {problem}"
            result["method"], found = _in_chain(group, settings, trial, backend)
            slowest = max(group.all_gather(found))
            if slowest <= 0:
                return f"{backend}, {tokens} tokens: {slowest:.1f} us; too noisy: raise --iters"
            times.append(round(slowest, 3))
    kept = {name: tuple(times) for name, times in us.items() if any(t is not None for t in times)}
    names = {"hidden": settings.hidden, "dtype": settings.dtype, "epilogue": settings.epilogue}
    result["curves"].append({**names, "us": kept})
    reduce.check()
    return None


def _in_chain(
    group: Group, settings: ReduceSettings, trial: ReduceTrial, backend: str
) -> tuple[str, float]:
    """How one call was timed, and its median us on this rank. Collective."""
    samples = settings.samples

    def link() -> None:
        torch.mul(trial.answer, 1 / group.size, out=trial.rows.x)

    def both() -> None:
        link()
        trial.call(backend)

    method, chain = measure_call(group, both, samples=samples, graph=True)
    _, links = measure_call(group, link, samples=samples, graph=True)
    us = statistics.median(chain) - statistics.median(links)
    how = (
        "each behind a product that makes its rows of the last result, whose own time is taken off"
    )
    return f"{method}, {how}", us


def write_table(path: Path, table: Table) -> None:
    """Write the file that `AllReduce(table=path)` reads. Raises InvalidArgument naming it."""
    write_text(path, table.text())


def print_table(console: Console, table: Table) -> None:
    """Print every curve, and below it what "auto" makes of it."""
    console.print(table.origin, style="dim")
    for curve in table.curves:
        grid = Grid(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        grid.title = f"{table.ranks} ranks, hidden {curve.hidden}, {curve.dtype}, {curve.epilogue}"
        grid.add_column("us")
        for tokens in curve.tokens:
            grid.add_column(str(tokens), justify="right")
        for backend, times in curve.us.items():
            grid.add_row(backend, *("" if us is None else us_text(us) for us in times))
        console.print(grid)
        console.print(f"auto: {bands_text(table, curve)}\n")


def bands_text(table: Table, curve: Curve) -> str:
    """Which backend serves which tokens of a curve."""
    dtype = next(kind for kind, name in NUMBERS.items() if name == curve.dtype)
    bands = table.bands(
        hidden=curve.hidden, dtype=dtype, epilogue=curve.epilogue, backends=tuple(curve.us)
    )
    starts: Sequence[int] = (1, *bands.starts[1:])
    return ", ".join(
        f"{name} from {start}" for name, start in zip(bands.names, starts, strict=True)
    )
