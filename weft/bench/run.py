"""A run of any operator: start the ranks, check each trial, time it, check it again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeAlias

import torch

from weft.bench.case import Case, Refused, Trial
from weft.bench.clock import Samples, measure
from weft.bench.cold import ColdClock
from weft.bench.corun import measure_corun
from weft.bench.machine import describe_machine
from weft.bench.progress import progress
from weft.memory import Group, launch

LIMIT_SECONDS = 3600.0  # of a whole run
SamplesOfRank: TypeAlias = dict[str, list[list[float]]]  # phase -> for each rank, its samples, us


@dataclass(frozen=True, slots=True)
class Measurement:
    """One variant at one size.

    samples_us: of each phase, the whole last.  method: how they were taken.
    facts: what the operator counted.
    cold_us: the same with flushed caches.  corun_us: with a matmul on the other SMs, by
    the names of `measure_corun`.  Empty where not asked for.
    """

    variant: str
    tokens: int
    method: str
    samples_us: SamplesOfRank
    facts: dict[str, Any] = field(default_factory=dict)
    cold_us: SamplesOfRank = field(default_factory=dict)
    cold_method: str = ""
    corun_us: SamplesOfRank = field(default_factory=dict)
    corun_method: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. problem: what a check found wrong; nothing is timed from there on.

    refused: what a variant does not serve, in words.  facts: what the operator counted.
    """

    case: Case
    machine: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @property
    def nothing_served(self) -> bool:
        """Was every variant refused, so that there was nothing to check and to time?"""
        return not self.measurements and self.problem == "; ".join(self.refused)


def run(case: Case, *, quiet: bool = False) -> Report:
    """Start the ranks, check and time every variant at every size. Raises as `weft.launch`."""
    results = launch(
        rank_body, case, quiet, ranks=case.ranks, device=case.device, timeout=LIMIT_SECONDS
    )
    return Report(case, **results[0])


def rank_body(group: Group, case: Case, quiet: bool) -> dict[str, Any]:
    """What every rank does; all ranks return the same, as Report's fields."""
    found: list[Measurement] = []
    refused: list[str] = []
    problem = None
    work = case.work()
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(progress(len(work), quiet=quiet or group.rank != 0))
        session = stack.enter_context(contextlib.closing(case.session(group)))
        cold = stack.enter_context(contextlib.closing(ColdClock(group))) if case.cold else None
        for variant, tokens in work:
            name = f"{variant}, {tokens} tokens"
            step(name)
            try:
                with session.trial(variant, tokens) as trial:
                    result = _measure(group, case, trial, cold)
                    group.barrier()  # a peer may still be reading what is about to go
            except Refused as error:
                refused.append(f"{name}: {error}")
                continue
            if isinstance(result, str):
                problem = f"{name}: {result}"
                break
            found.append(Measurement(variant, tokens, **result))
        facts = session.facts()
        group.barrier()
    if not found and problem is None:
        problem = "; ".join(refused)
    machine = describe_machine(gpu_names(group))
    return {
        "machine": machine,
        "measurements": found,
        "refused": refused,
        "facts": facts,
        "problem": problem,
    }


def _measure(
    group: Group, case: Case, trial: Trial, cold: ColdClock | None
) -> dict[str, Any] | str:
    """Check, time, check again; Measurement's fields, or what any rank found wrong."""
    if problem := first_problem(group, trial.check()):
        return problem
    trial.poison()
    calls, count = trial.calls(), case.samples
    samples = measure(group, calls, samples=count, graph=case.graph)
    found = {"method": samples.method, "samples_us": gather(group, samples)}
    if cold is not None:
        chilled = cold.measure(calls, samples=count)
        found |= {"cold_method": chilled.method, "cold_us": gather(group, chilled)}
    if case.corun:
        us = max(group.all_gather(median(samples.us[calls.whole])))
        together = measure_corun(group, calls, case, samples=count, call_us=us)
        found |= {"corun_method": together.method, "corun_us": gather(group, together)}
    if problem := first_problem(group, trial.compare()):
        return f"after timing, {problem}"
    return {**found, "facts": trial.facts()}


def gather(group: Group, samples: Samples) -> SamplesOfRank:
    """Every rank's samples. Collective."""
    ranks: list[dict[str, list[float]]] = group.all_gather(samples.us)
    return {name: [each[name] for each in ranks] for name in samples.us}


def first_problem(group: Group, problem: str | None) -> str | None:
    """Every rank learns what any rank found, so that all of them stop at the same place."""
    return next((found for found in group.all_gather(problem) if found), None)


def gpu_names(group: Group) -> list[str]:
    """The name of each rank's GPU; empty for CPU ranks. Collective."""
    cuda = group.device.type == "cuda"
    name = torch.cuda.get_device_name(group.device) if cuda else ""
    return [gpu for gpu in group.all_gather(name) if gpu]
