"""Variants of the low-latency all-to-all side by side: in the same ranks, in turn, all checked.

All variants are alive at once and are timed in turn, several rounds, so that whatever changes
during a run meets all of them. Each is checked before its first timing and after its last.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.bench.allreduce import gpu_names
from weft.bench.clock import PHASES, measure
from weft.bench.limits import pair_floor_us
from weft.bench.lowlatency_cases import LowSettings
from weft.bench.lowlatency_trial import LowTrial, low_traffic, make_low
from weft.bench.machine import describe_machine, machine_line
from weft.bench.moe import LIMIT_SECONDS, first_problem, gather_samples
from weft.bench.progress import progress
from weft.bench.report import us_text, write_text
from weft.bench.summary import Spread
from weft.errors import InvalidArgument
from weft.memory import Group, launch

# What each variant changes of the settings that the command was given.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "halves": {"halves": True},
    "fp8-home": {"combine_by": "fp8"},
    "sender": {"reduce": "sender"},
    "lean": {"reduce": "sender", "combine_by": "fp8"},
    "plain": {"quant": "none"},
    "no-pdl": {"programmatic_launch": False},
    "profile": {"profile": True},
}
ROUNDS = 3  # times that each variant has its turn at each size


@dataclass(frozen=True, slots=True)
class Rung:
    """One variant at one size. samples: phase -> for each rank, us per call of each sample."""

    variant: str
    tokens: int
    method: str
    floor: float | None
    samples: dict[str, list[list[float]]]


@dataclass(frozen=True, slots=True)
class Ladder:
    """A whole run. problems: variant -> what the check found wrong; it is not timed from there.

    memory: variant -> bytes of a rank by kind.
    """

    settings: LowSettings
    machine: dict[str, Any]
    memory: dict[str, dict[str, int]]
    rungs: list[Rung]
    problems: dict[str, str]


def parse_variants(text: str) -> tuple[str, ...]:
    """Names of VARIANTS, separated by commas; "all" for all of them. Raises InvalidArgument."""
    names = tuple(VARIANTS) if text == "all" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in VARIANTS:
            raise InvalidArgument(
                f"variants has {name!r}; choose of {', '.join(VARIANTS)}, or all of them"
            )
    return names


def climb(settings: LowSettings, variants: Sequence[str], *, quiet: bool = False) -> Ladder:
    """Start the ranks, check and time every variant at every size. Raises as `weft.launch`."""
    for name in variants:
        replace(settings, **VARIANTS[name])  # refuses what cannot be before any rank is started
    results: list[dict[str, Any]] = launch(
        climb_body,
        settings,
        tuple(variants),
        quiet,
        ranks=settings.ranks,
        device=settings.device,
        timeout=LIMIT_SECONDS,
    )
    return Ladder(settings, **results[0])


def climb_body(
    group: Group, settings: LowSettings, variants: tuple[str, ...], quiet: bool
) -> dict[str, Any]:
    """What every rank does; rank 0's result is complete."""
    rungs: list[Rung] = []
    problems: dict[str, str] = {}
    of_variant = {name: replace(settings, **VARIANTS[name]) for name in variants}
    with contextlib.ExitStack() as stack:
        steps = len(settings.tokens) * len(variants)
        step = stack.enter_context(progress(steps, quiet=quiet or group.rank != 0))
        made = {name: stack.enter_context(make_low(group, of_variant[name])) for name in variants}
        stack.callback(group.barrier)  # a peer may still be reading what is about to go
        for tokens in settings.tokens:
            trials = {
                name: LowTrial(group, of_variant[name], made[name], tokens)
                for name in variants
                if name not in problems
            }
            for name in trials:
                step(f"{name}, {tokens} tokens")
            rungs += _turns(group, trials, problems)
        memory = {name: asdict(a2a.memory) for name, a2a in made.items()}
    return {
        "machine": describe_machine(gpu_names(group)),
        "memory": memory,
        "rungs": rungs,
        "problems": problems,
    }


def _turns(group: Group, trials: dict[str, LowTrial], problems: dict[str, str]) -> list[Rung]:
    """Check all variants at one size, time them in turn, check them again."""

    def note(name: str, found: str | None, when: str) -> None:
        problem = first_problem(group, found)
        if problem is not None:
            problems[name] = f"{trials[name].tokens} tokens, {when}: {problem}"

    samples: dict[str, dict[str, list[list[float]]]] = {}
    methods: dict[str, str] = {}
    for name, trial in trials.items():
        note(name, trial.check(), "before timing")
        trial.out.fill_(float("nan"))  # so that calls which write nothing are noticed
    for _ in range(ROUNDS):
        for name, trial in trials.items():
            if name in problems:
                continue
            given = trial.settings
            found = measure(group, trial.phases(), samples=given.samples, graph=given.graph)
            methods[name] = f"{found.method}, {ROUNDS} turns"
            for phase, ranks in gather_samples(group, found).items():
                every = samples.setdefault(name, {}).setdefault(phase, [[] for _ in ranks])
                for mine, more in zip(every, ranks, strict=True):
                    mine.extend(more)
    for name in samples:
        note(name, trials[name].compare(), "after timing")
        trials[name].a2a.check()
    return [
        Rung(name, trials[name].tokens, methods[name], _floor(group, trials[name]), samples[name])
        for name in samples
        if name not in problems
    ]


def _floor(group: Group, trial: LowTrial) -> float | None:
    """us that the bytes of a pair take at least; None where there is no GPU."""
    traffic, shape = low_traffic(trial.settings, trial.ids), trial.settings.geometry.shape
    gpus = gpu_names(group)
    return pair_floor_us(traffic.out * shape.sent_bytes, traffic.back * shape.back_bytes, gpus)


def print_ladder(console: Console, ladder: Ladder) -> None:
    """Print a table with a line for each size and variant, and below it what failed."""
    settings = ladder.settings
    title = (
        f"low-latency variants  {settings.ranks} ranks, hidden {settings.hidden}, top "
        f"{settings.top_k} of {settings.experts}, {settings.router}, for {settings.capacity} tokens"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("tokens", justify="right")
    table.add_column("variant")
    for name in (*PHASES, "pair min", "pair p99", "floor", "MB"):
        table.add_column(name, justify="right")
    for rung in ladder.rungs:
        us = {phase: Spread.of(rung.samples[phase]) for phase in PHASES}
        memory = ladder.memory[rung.variant]
        table.add_row(
            str(rung.tokens),
            rung.variant,
            *(us_text(us[phase].median) for phase in PHASES),
            us_text(us["pair"].min),
            us_text(us["pair"].p99),
            "" if rung.floor is None else us_text(rung.floor),
            f"{(memory['shared'] + memory['results']) / 1e6:.1f}",
        )
    console.print(table)
    how = "\n".join(dict.fromkeys(rung.method for rung in ladder.rungs))
    console.print(Text(f"{machine_line(ladder.machine)}\nus a call, median, {how}", style="dim"))
    for name, problem in ladder.problems.items():
        console.print(Text(f"{name}: {problem}", style="red"))


def write_ladder_json(path: Path, ladder: Ladder) -> None:
    """Write settings, machine, every sample, and the medians."""
    from weft import __version__

    medians = [
        {
            "variant": rung.variant,
            "tokens": rung.tokens,
            **{phase: Spread.of(rung.samples[phase]).median for phase in PHASES},
        }
        for rung in ladder.rungs
    ]
    data = {"weft": __version__, "medians": medians, **asdict(ladder)}
    write_text(path, json.dumps(data, indent=1) + "\n")
