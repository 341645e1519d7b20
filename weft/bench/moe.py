"""`weft bench moe`: dispatch and combine of an MoE layer, checked first, then timed."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from weft.bench.beside import measure_beside
from weft.bench.cases import Settings
from weft.bench.clock import Samples, measure
from weft.bench.cold import ColdClock
from weft.bench.machine import describe_machine
from weft.bench.progress import progress
from weft.bench.routing import Traffic, make_ids, traffic_of
from weft.bench.trial import Exchange, Trial, make_exchange
from weft.memory import Group, launch

LIMIT_SECONDS = 3600.0  # of a whole run


@dataclass(frozen=True, slots=True)
class Measurement:
    """One size of one backend.

    samples: phase -> for each rank, us per call of each sample.  method: how they were taken.
    cold, cold_method: the same with flushed caches, or None.
    beside, beside_method: with a matrix product on the other SMs, by the names of
    `bench.beside.Together`; or None.
    """

    backend: str
    tokens: int
    max_tokens: int
    method: str
    traffic: Traffic
    samples: dict[str, list[list[float]]]
    cold: dict[str, list[list[float]]] | None = None
    cold_method: str | None = None
    beside: dict[str, list[list[float]]] | None = None
    beside_method: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. problem: what the check found wrong; nothing is timed from there on."""

    settings: Settings
    machine: dict[str, Any]
    measurements: list[Measurement]
    problem: str | None = None


def run(settings: Settings, *, quiet: bool = False) -> Report:
    """Start the ranks, check and time every size, and return the report.

    Raises InvalidArgument for sizes that do not fit together, and what `weft.launch` raises.
    """
    for tokens in settings.tokens:  # refuse here, in one process, what every rank would refuse
        make_ids(settings, tokens, 0)
    results: list[dict[str, Any]] = launch(
        rank_body,
        settings,
        quiet,
        ranks=settings.ranks,
        device=settings.device,
        timeout=LIMIT_SECONDS,
    )
    first = results[0]
    measurements = [
        Measurement(**{**found, "traffic": Traffic(**found["traffic"])})
        for found in first["measurements"]
    ]
    return Report(settings, first["machine"], measurements, first["problem"])


def rank_body(group: Group, settings: Settings, quiet: bool) -> dict[str, Any]:
    """What every rank does; rank 0's result is complete."""
    name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else ""
    gpus = [gpu for gpu in group.all_gather(name) if gpu]
    result: dict[str, Any] = {
        "machine": describe_machine(gpus),
        "measurements": [],
        "problem": None,
    }
    work = [(backend, tokens) for backend in settings.backends for tokens in settings.tokens]
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(progress(len(work), quiet=quiet or group.rank != 0))
        built = stack.enter_context(_Exchanges(group))
        cold = stack.enter_context(ColdClock(group)) if settings.cold else None
        for backend, tokens in work:
            step(f"{backend}, {tokens} tokens")
            exchange = built.get(settings, backend, tokens)
            plan = settings.of_backend(backend)
            found, problem = _measure(group, plan, exchange, tokens, cold)
            if found is None:
                result["problem"] = f"{backend}, {tokens} tokens: {problem}"
                return result
            result["measurements"].append({"backend": backend, **found})
    return result


def _measure(
    group: Group,
    settings: Settings,
    exchange: Exchange,
    tokens: int,
    cold: ColdClock | None,
) -> tuple[dict[str, Any] | None, str | None]:
    """Check, time, check again; return the measurement, or None and what any rank found wrong."""
    trial = Trial(group, settings, exchange, tokens)
    if problem := first_problem(group, trial.check()):
        return None, problem
    trial.poison_out()  # so that calls which write nothing are noticed after timing
    samples = measure(group, trial.phases(), samples=settings.samples, graph=settings.graph)
    chilled = cold.measure(trial.phases(), samples=settings.samples) if cold else None
    together = None
    if settings.beside:
        pair_us = max(group.all_gather(median(samples.pair)))
        together = measure_beside(
            group, trial.phases(), settings, samples=settings.samples, pair_us=pair_us
        )
    if problem := first_problem(group, trial.check_out()):
        return None, f"after timing, {problem}"
    exchange.check()
    traffic = traffic_of([source.ids.cpu() for source in trial.sources], settings.experts)
    return {
        "tokens": tokens,
        "max_tokens": exchange.max_tokens,
        "method": samples.method,
        "traffic": asdict(traffic),
        "samples": gather_samples(group, samples),
        "cold": gather_samples(group, chilled) if chilled else None,
        "cold_method": chilled.method if chilled else None,
        "beside": _gather(group, together.times) if together else None,
        "beside_method": together.method if together else None,
    }, None


def gather_samples(group: Group, samples: Samples) -> dict[str, list[list[float]]]:
    """Return phase -> for each rank, its samples. Collective."""
    return _gather(group, samples.by_phase())


def _gather(group: Group, times: dict[str, list[float]]) -> dict[str, list[list[float]]]:
    gathered: list[Any] = group.all_gather(times)
    return {name: [each[name] for each in gathered] for name in times}


def first_problem(group: Group, problem: str | None) -> str | None:
    """Every rank learns what any rank found, so that all of them stop at the same place."""
    return next((found for found in group.all_gather(problem) if found), None)


class _Exchanges:
    """The exchange that is being measured; asking for another one closes it.

    The one-sided exchange costs the same whatever its capacity, so one of the largest size serves
    the whole sweep, as it would in a server. A collective moves its capacity in every call, so it
    gets one that fits each size exactly. `--max-tokens` sets both.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._key: tuple[str, int] | None = None
        self._exchange: Exchange | None = None

    def __enter__(self) -> _Exchanges:
        return self

    def __exit__(self, *_: object) -> None:
        if self._exchange is not None:
            self._exchange.close()

    def get(self, settings: Settings, backend: str, tokens: int) -> Exchange:
        """Return an exchange for `tokens` tokens. Collective."""
        fitting = max(settings.tokens) if backend == "onesided" else tokens
        key = (backend, settings.max_tokens or fitting)
        if self._exchange is None or key != self._key:
            if self._exchange is not None:
                self._group.barrier()  # a peer may still be reading what is about to go
                self._exchange.close()
            self._exchange = make_exchange(self._group, settings.of_backend(backend), *key)
            self._key = key
        return self._exchange
