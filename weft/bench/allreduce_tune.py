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
from typing import Any

import torch
from rich.console import Console

import weft
from weft.allreduce.curve import Curve
from weft.allreduce.table import BACKENDS, MEASURED, Table
from weft.bench.allreduce import ReduceCase, ReduceSession, ReduceTrial
from weft.bench.clock import Calls, measure
from weft.bench.machine import describe_machine, measured_on
from weft.bench.progress import progress
from weft.bench.report import times_grid
from weft.bench.run import LIMIT_SECONDS, first_problem, gpu_names
from weft.errors import InvalidArgument, UsageError
from weft.memory import Group, launch
from weft.shape import DTYPE_NAMES


@dataclass(frozen=True, slots=True)
class Tuned:
    """A table, or what the check found wrong: nothing is timed from there on."""

    table: Table | None
    problem: str | None


def tuning_cases(
    case: ReduceCase, hiddens: Sequence[int], epilogues: Sequence[str]
) -> list[list[ReduceCase]]:
    """The cases of a table: for each hidden size one of each epilogue; case: everything else.

    Raises InvalidArgument for sizes that do not fit together, and for a backend whose bits are not
    those of the others.
    """
    if strange := [name for name in case.backends if name not in BACKENDS]:
        raise InvalidArgument(
            f"backend is {strange[0]!r}; auto chooses among {', '.join(BACKENDS)}: leave it out"
        )
    tokens = tuple(sorted(case.tokens))
    return [
        [replace(case, tokens=tokens, hidden=hidden, epilogue=each) for each in epilogues]
        for hidden in hiddens
    ]


def tune(cases: list[list[ReduceCase]], *, quiet: bool = False) -> Tuned:
    """Start the ranks, check and time every backend, and return the table.

    Raises what `weft.launch` raises, and InvalidArgument where GPUs of several kinds take part.
    """
    case = cases[0][0]
    first, *_ = launch(
        tune_body, cases, quiet, ranks=case.ranks, device=case.device, timeout=LIMIT_SECONDS
    )
    if first["problem"] is not None:
        return Tuned(None, first["problem"])
    gpu, date, where = measured_on(first["machine"])
    table = Table(
        gpu=gpu,
        ranks=case.ranks,
        source=MEASURED,
        date=date,
        machine=where,
        method=first["method"],
        curves=tuple(Curve(tokens=case.tokens, **found) for found in first["curves"]),
    )
    return Tuned(table, None)


def tune_body(group: Group, cases: list[list[ReduceCase]], quiet: bool) -> dict[str, Any]:
    """What every rank does; all ranks return the same curves."""
    result: dict[str, Any] = {
        "machine": describe_machine(gpu_names(group)),
        "curves": [],
        "method": "",
        "problem": None,
    }
    count = sum(len(case.tokens) for several in cases for case in several)
    with progress(count, quiet=quiet or group.rank != 0) as step:
        for several in cases:
            with contextlib.closing(ReduceSession(group, several[0])) as session:
                for case in several:
                    problem = _curve(group, case, session.reduce, step, result)
                    if problem is not None:
                        result["problem"] = problem
                        return result
                group.barrier()  # a peer may still be reading what is about to go
    return result


def _curve(
    group: Group,
    case: ReduceCase,
    reduce: weft.AllReduce,
    step: Callable[[str], None],
    result: dict[str, Any],
) -> str | None:
    """Measure one curve into `result`; return what any rank found wrong, or None."""
    us: dict[str, list[float | None]] = {backend: [] for backend in case.backends}
    for tokens in case.tokens:
        step(f"{case.hidden} x {case.dtype}, {case.epilogue}, {tokens} tokens")
        trial = ReduceTrial(group, case, reduce, tokens)
        for backend, times in us.items():
            try:
                trial.prepare(backend)
            except UsageError:  # of sizes that are equal on all ranks: no rank is served
                times.append(None)
                continue
            if problem := first_problem(group, trial.check()):
                return f"{backend}, {tokens} tokens x {case.hidden}: {problem}"
            result["method"], found = _in_chain(group, case, trial)
            slowest = max(group.all_gather(found))
            if slowest <= 0:
                return f"{backend}, {tokens} tokens: {slowest:.1f} us; too noisy: raise --iters"
            times.append(round(slowest, 3))
    kept = {name: tuple(times) for name, times in us.items() if any(t is not None for t in times)}
    names = {"hidden": case.hidden, "dtype": case.dtype, "epilogue": case.epilogue}
    result["curves"].append({**names, "us": kept})
    reduce.check()
    return None


def _in_chain(group: Group, case: ReduceCase, trial: ReduceTrial) -> tuple[str, float]:
    """How one call was timed, and its median us on this rank. Collective."""
    samples = case.samples

    def link() -> None:
        torch.mul(trial.answer, 1 / group.size, out=trial.rows.x)

    def both() -> None:
        link()
        trial.call()

    chain = measure(group, Calls.of(both), samples=samples, graph=True)
    links = measure(group, Calls.of(link), samples=samples, graph=True)
    us = statistics.median(chain.us["call"]) - statistics.median(links.us["call"])
    how = (
        "each behind a product that makes its rows of the last result, whose own time is taken off"
    )
    return f"{chain.method}, {how}", us


def print_table(console: Console, table: Table) -> None:
    """Print every curve, and below it what "auto" makes of it."""
    console.print(table.origin, style="dim")
    for curve in table.curves:
        title = f"{table.ranks} ranks, hidden {curve.hidden}, {curve.dtype}, {curve.epilogue}"
        console.print(times_grid(curve.tokens, curve.us, title))
        console.print(f"auto: {bands_text(table, curve)}\n")


def bands_text(table: Table, curve: Curve) -> str:
    """Which backend serves which tokens of a curve."""
    dtype = next(kind for kind, name in DTYPE_NAMES.items() if name == curve.dtype)
    bands = table.bands(
        hidden=curve.hidden, dtype=dtype, epilogue=curve.epilogue, backends=tuple(curve.us)
    )
    starts: Sequence[int] = (1, *bands.starts[1:])
    return ", ".join(
        f"{name} from {start}" for name, start in zip(bands.names, starts, strict=True)
    )
