"""Time ways of bringing rows home as FP8, side by side in the same ranks, and check every byte.

    python benchmarks/fp8_home.py [--ranks N] [--tokens 1,8,...] [--variants now,2+1x7,...]
        [--quantize] [--router random] [--json FILE]

All variants are alive at once and take turns at each size; each is checked before its first timing
and after its last. us a call, median of the slowest rank, from graphs of 50 pairs.

now     rows are summed as they come, in the launch shape that weft chooses
P+TxS   the same with P CTAs for each SM that push and T that sum, a warp pushing S strips at a time
pull    bf16 rows back, pulled
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import weft
from weft.bench.allreduce import gpu_names
from weft.bench.cases import SCALE_GROUP, Settings
from weft.bench.clock import PHASES, measure
from weft.bench.machine import describe_machine, machine_line
from weft.bench.moe import LIMIT_SECONDS, first_problem, gather_samples
from weft.bench.trial import Trial
from weft.ops.entry import CudaEntries
from weft.ops.plan import MOST_STRIPS, PIECE, Plan

TURNS = 3  # times that each variant is timed at each size
TOKENS = "1,8,32,64,128,256,512,1024,2048"
VARIANTS = "now,2+1x7,3+1x4,4+1x7,3+2x7,pull"
SHAPE = re.compile(r"(\d+)\+(\d+)x(\d+)")


def settings_of(args: argparse.Namespace) -> Settings:
    """The sizes of DeepSeek-V3, or small ones where there is no GPU."""
    cuda = torch.cuda.is_available()
    return Settings(
        ranks=args.ranks or (torch.cuda.device_count() if cuda else 2),
        device="cuda" if cuda else "cpu",
        tokens=tuple(int(n) for n in args.tokens.split(",")),
        max_tokens=None,
        hidden=7168 if cuda else 1024,
        top_k=8,
        experts=256,
        router=args.router,
        backends=("onesided",),
        dtype="bf16",
        payload="bf16" if args.quantize else "fp8",
        graph=True,
        samples=11,
        seed=0,
        combine_by="fp8",
        quantize="fp8" if args.quantize else None,
    )


def settings_for(settings: Settings, variant: str) -> Settings:
    """What a variant changes of them."""
    return replace(settings, combine_by="pull") if variant == "pull" else settings


def make(group: weft.Group, settings: Settings, variant: str) -> weft.AllToAll:
    """One variant's all-to-all."""
    payloads = None
    if settings.payload == "fp8":
        scales = weft.Payload((settings.hidden // SCALE_GROUP,), torch.float32)
        payloads = (weft.Payload((settings.hidden,), torch.float8_e4m3fn), scales)
    a2a = weft.AllToAll(
        group,
        max_tokens=max(settings.tokens),
        top_k=settings.top_k,
        num_experts=settings.experts,
        hidden=settings.hidden,
        payloads=payloads,
        timeout=10.0,
        quantize=settings.quantize,
        combine_by=settings.combine_by,
    )
    shape, entries = SHAPE.fullmatch(variant), a2a._rounds._entries
    if shape and isinstance(entries, CudaEntries):
        pushers, takers, strips = (int(n) for n in shape.groups())
        pushers, takers = pushers * entries._sms - 1, takers * entries._sms
        for tokens in settings.tokens:
            plan = Plan(1 + pushers + takers, 1, PIECE, pushers, min(strips, MOST_STRIPS))
            entries._plans["combine", tokens] = plan
    return a2a


def body(group: weft.Group, settings: Settings, variants: tuple[str, ...]) -> dict[str, Any]:
    """What every rank does; rank 0's result is complete."""
    rows: list[dict[str, Any]] = []
    problems: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        given = {name: settings_for(settings, name) for name in variants}
        made = {name: stack.enter_context(make(group, given[name], name)) for name in variants}
        stack.callback(group.barrier)
        for tokens in settings.tokens:
            trials = {
                name: Trial(group, given[name], made[name], tokens)
                for name in variants
                if name not in problems
            }
            rows += timed(group, trials, problems)
            if group.rank == 0:
                show(tokens, rows)
    return {"machine": describe_machine(gpu_names(group)), "rows": rows, "problems": problems}


def timed(
    group: weft.Group, trials: dict[str, Trial], problems: dict[str, str]
) -> list[dict[str, Any]]:
    """Check all variants at one size, time them in turn, check them again."""

    def note(name: str, found: str | None) -> None:
        problem = first_problem(group, found)
        if problem is not None:
            problems[name] = f"{trials[name].tokens} tokens: {problem}"

    samples: dict[str, dict[str, list[list[float]]]] = {}
    for name, trial in trials.items():
        note(name, trial.check())
        trial.poison_out()
    for _ in range(TURNS):
        for name, trial in trials.items():
            if name in problems:
                continue
            found = measure(group, trial.phases(), samples=trial.settings.samples, graph=True)
            for phase, ranks in gather_samples(group, found).items():
                every = samples.setdefault(name, {}).setdefault(phase, [[] for _ in ranks])
                for mine, more in zip(every, ranks, strict=True):
                    mine.extend(more)
    for name in samples:
        note(name, trials[name].check_out())
    return [
        {
            "variant": name,
            "tokens": trials[name].tokens,
            **{p: max(statistics.median(rank) for rank in samples[name][p]) for p in PHASES},
            "samples": samples[name],
        }
        for name in samples
        if name not in problems
    ]


def show(tokens: int, rows: list[dict[str, Any]]) -> None:
    """Print the lines of one size."""
    for row in rows:
        if row["tokens"] == tokens:
            times = "  ".join(f"{phase} {row[phase]:7.1f}" for phase in PHASES)
            print(f"{tokens:5} tokens  {row['variant']:7}  {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--quantize", action="store_true", help="bf16 in, quantised in dispatch")
    parser.add_argument("--router", default="perfect")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings, variants = settings_of(args), tuple(args.variants.split(","))
    found = weft.launch(
        body,
        settings,
        variants,
        ranks=settings.ranks,
        device=settings.device,
        timeout=LIMIT_SECONDS,
    )[0]
    print(machine_line(found["machine"]))
    for name, problem in found["problems"].items():
        print(f"WRONG: {name}: {problem}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
