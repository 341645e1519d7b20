"""`weft bench allreduce`: the fused all-reduce, checked bit by bit first, then timed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

import weft
from weft.bench.allreduce_cases import AUTO, ReduceSettings
from weft.bench.allreduce_trial import ReduceTrial, make_reduce
from weft.bench.clock import measure_call
from weft.bench.machine import describe_machine
from weft.bench.moe import LIMIT_SECONDS, first_problem
from weft.bench.progress import progress
from weft.errors import UsageError
from weft.memory import Group, launch


@dataclass(frozen=True, slots=True)
class ReduceMeasurement:
    """One size of one backend.

    chosen: the backend that ran; another than `backend` for "auto" alone.  why: what it chose by.
    samples: for each rank, us per call of each sample.  method: how they were taken.
    """

    backend: str
    tokens: int
    chosen: str
    why: str
    method: str
    samples: list[list[float]]


@dataclass(frozen=True, slots=True)
class ReduceReport:
    """A whole run. problem: what the check found wrong; nothing is timed from there on.

    refused: sizes that a backend does not serve, in words.
    """

    settings: ReduceSettings
    machine: dict[str, Any]
    measurements: list[ReduceMeasurement]
    refused: list[str]
    memory_bytes: int
    problem: str | None = None


def run(settings: ReduceSettings, *, quiet: bool = False) -> ReduceReport:
    """Start the ranks, check and time every size, and return the report.

    Raises what `weft.launch` raises.
    """
    results: list[dict[str, Any]] = launch(
        rank_body,
        settings,
        quiet,
        ranks=settings.ranks,
        device=settings.device,
        timeout=LIMIT_SECONDS,
    )
    first = results[0]
    measurements = [ReduceMeasurement(**found) for found in first.pop("measurements")]
    return ReduceReport(settings, measurements=measurements, **first)


def rank_body(group: Group, settings: ReduceSettings, quiet: bool) -> dict[str, Any]:
    """What every rank does; rank 0's result is complete."""
    result: dict[str, Any] = {
        "machine": describe_machine(gpu_names(group)),
        "measurements": [],
        "refused": [],
        "problem": None,
    }
    work = [(backend, tokens) for tokens in settings.tokens for backend in settings.backends]
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(progress(len(work), quiet=quiet or group.rank != 0))
        reduce = stack.enter_context(make_reduce(group, settings))
        result["memory_bytes"] = reduce.reduction.share_bytes
        trial = None
        for backend, tokens in work:
            step(f"{backend}, {tokens} tokens")
            if trial is None or trial.tokens != tokens:
                trial = ReduceTrial(group, settings, reduce, tokens)
            found, problem = _measure(group, settings, trial, backend)
            if problem is not None:
                result["problem"] = f"{backend}, {tokens} tokens: {problem}"
                return result
            if isinstance(found, str):
                result["refused"].append(f"{backend}, {tokens} tokens: {found}")
            else:
                result["measurements"].append({"backend": backend, "tokens": tokens, **found})
    return result


def gpu_names(group: Group) -> list[str]:
    """The name of each rank's GPU; empty for CPU ranks. Collective."""
    name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else ""
    return [gpu for gpu in group.all_gather(name) if gpu]


def _measure(
    group: Group, settings: ReduceSettings, trial: ReduceTrial, backend: str
) -> tuple[dict[str, Any] | str, str | None]:
    """Check, time, check again; return the measurement, or why the backend refuses the size; and
    what any rank found wrong."""
    try:
        trial.prepare(backend)
    except UsageError as error:  # of sizes that are equal on all ranks: all of them refuse
        return str(error), None
    if problem := first_problem(group, trial.check(backend)):
        return "", problem
    trial.poison()  # so that calls which write nothing are noticed after timing
    method, times = measure_call(
        group, lambda: trial.call(backend), samples=settings.samples, graph=settings.graph
    )
    if problem := first_problem(group, trial.compare()):
        return "", f"after timing, {problem}"
    trial.reduce.check()
    choice = explain(trial.reduce, settings, trial) if backend == AUTO else None
    return {
        "chosen": choice.backend if choice else backend,
        "why": choice.text if choice else "",
        "method": method,
        "samples": group.all_gather(times),
    }, None


def explain(reduce: weft.AllReduce, settings: ReduceSettings, trial: ReduceTrial) -> Any:
    """What "auto" takes for this size, and why."""
    quant, norm = trial.arguments.get("quant"), settings.epilogue != "none"
    return reduce.explain(trial.tokens, quant=quant, norm=norm)
