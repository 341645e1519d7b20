"""`weft bench lowlatency`: every row checked bit by bit first, then timed."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.bench.allreduce import gpu_names
from weft.bench.clock import measure, replayed_pairs
from weft.bench.lowlatency_cases import LowSettings
from weft.bench.lowlatency_trial import LowTrial, low_traffic, make_low
from weft.bench.machine import describe_machine
from weft.bench.moe import LIMIT_SECONDS, first_problem, gather_samples
from weft.bench.progress import progress
from weft.memory import Group, launch
from weft.ops.lowlatency_trace import merge

TRACED_ROUNDS = 32  # as many as are kept


@dataclass(frozen=True, slots=True)
class LowMeasurement:
    """One size. samples: phase -> for each rank, us per call of each sample."""

    tokens: int
    method: str
    chosen: int
    out_bytes: int
    back_bytes: int
    samples: dict[str, list[list[float]]]


@dataclass(frozen=True, slots=True)
class LowReport:
    """A whole run. problem: what the check found wrong; nothing is timed from there on.

    memory: bytes of a rank by kind.
    """

    settings: LowSettings
    machine: dict[str, Any]
    measurements: list[LowMeasurement]
    memory: dict[str, int]
    problem: str | None = None


def run(settings: LowSettings, *, quiet: bool = False) -> LowReport:
    """Start the ranks, check and time every size. Raises what `weft.launch` raises."""
    results: list[dict[str, Any]] = launch(
        rank_body,
        settings,
        quiet,
        ranks=settings.ranks,
        device=settings.device,
        timeout=LIMIT_SECONDS,
    )
    first = results[0]
    measurements = [LowMeasurement(**found) for found in first.pop("measurements")]
    return LowReport(settings, measurements=measurements, **first)


def rank_body(group: Group, settings: LowSettings, quiet: bool) -> dict[str, Any]:
    """What every rank does; rank 0's result is complete."""
    result: dict[str, Any] = {
        "machine": describe_machine(gpu_names(group)),
        "measurements": [],
        "problem": None,
    }
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(progress(len(settings.tokens), quiet=quiet or group.rank != 0))
        a2a = stack.enter_context(make_low(group, settings))
        stack.callback(group.barrier)  # a peer may still be reading what is about to go
        result["memory"] = asdict(a2a.memory)
        for tokens in settings.tokens:
            step(f"{tokens} tokens")
            trial = LowTrial(group, settings, a2a, tokens)
            found, problem = _measure(group, settings, trial)
            if problem is not None:
                result["problem"] = f"{tokens} tokens: {problem}"
                return result
            result["measurements"].append({"tokens": tokens, **found})
    return result


def _measure(
    group: Group, settings: LowSettings, trial: LowTrial
) -> tuple[dict[str, Any], str | None]:
    """Check, time, check again; the measurement, and what any rank found wrong."""
    if problem := first_problem(group, trial.check()):
        return {}, problem
    trial.out.fill_(float("nan"))  # so that calls which write nothing are noticed after timing
    samples = measure(group, trial.phases(), samples=settings.samples, graph=settings.graph)
    if problem := first_problem(group, trial.compare()):
        return {}, f"after timing, {problem}"
    trial.a2a.check()
    traffic = low_traffic(settings, trial.ids)
    shape = settings.geometry.shape
    return {
        "method": samples.method,
        "chosen": traffic.chosen,
        "out_bytes": traffic.out * shape.sent_bytes,
        "back_bytes": traffic.back * shape.back_bytes,
        "samples": gather_samples(group, samples),
    }, None


def trace(path: Path, settings: LowSettings) -> str | None:
    """Run the largest size once more, profiled; write all ranks' last rounds, on one clock.

    Returns what the check found wrong, or None.
    """
    with tempfile.TemporaryDirectory() as folder:
        problems = launch(
            trace_body,
            settings,
            folder,
            ranks=settings.ranks,
            device=settings.device,
            timeout=LIMIT_SECONDS,
        )
        problem = next((found for found in problems if found), None)
        if problem is None:
            merge([Path(folder) / f"{rank}.json" for rank in range(settings.ranks)], path)
    return problem


def trace_body(group: Group, settings: LowSettings, folder: str) -> str | None:
    """What every rank does for a trace: check, run, write its file. Collective."""
    with make_low(group, replace(settings, profile=True)) as a2a:
        trial = LowTrial(group, settings, a2a, max(settings.tokens))
        if problem := first_problem(group, trial.check()):
            return problem
        replayed_pairs(group, trial.phases(), TRACED_ROUNDS, graph=settings.graph)
        a2a.check()
        group.barrier()  # all ranks have finished the same rounds
        a2a.dump_trace(Path(folder) / f"{group.rank}.json")
        group.barrier()  # and nobody reads a header any more
    return None
