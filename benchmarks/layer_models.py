"""Time MoE layers of several models in one go: a table of models by tokens, within a time budget.

    python benchmarks/layer_models.py [--out FILE] [--tables DIR] [--ranks N] [--device cpu]
        [--tokens 8 64 128 512] [--cases qwen3-30b-a3b:bf16 ...] [--routings uniform zipf]
        [--overlaps none shared push] [--samples N] [--budget SECONDS]

Each case is what `weft bench layer` measures, with tiled products: checked before and after, in
CUDA graphs. The ranks are started once. No case begins after the budget; what was not run is said.
--out has all samples and is written anew after every case, --tables what `weft tune layer` writes,
of each uniform case that was measured.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from weft.bench.layer import LayerReport, rank_body, report_of
from weft.bench.layer_cases import LayerSettings
from weft.bench.layer_report import as_json, layer_rows
from weft.bench.layer_tune import table_of, write_table
from weft.bench.machine import machine_line
from weft.bench.report import write_text
from weft.errors import CreationFailed, InvalidArgument
from weft.memory import Group, launch
from weft.moe import OVERLAPS

# DeepSeek-V3 with 32 experts a rank, as 8 ranks have of 256; the others with all of theirs.
CASES = (
    "qwen3-30b-a3b:bf16",
    "glm-4.5-air:bf16",
    "gpt-oss-120b:bf16",
    "qwen3-30b-a3b:fp8",
    "glm-4.5-air:fp8",
    "deepseek-v3:fp8",
)
EXPERTS_A_RANK = {"deepseek-v3": 32}
LIMIT_SECONDS = 600.0


def settings_of(case: str, routing: str, given: argparse.Namespace) -> LayerSettings:
    """One case; modes without a shared expert where the model has none."""
    model, _, dtype = case.partition(":")
    few = EXPERTS_A_RANK.get(model) if given.device == "cuda" else None
    settings = LayerSettings(
        ranks=given.ranks,
        device=given.device,
        model=model,
        tokens=tuple(sorted(set(given.tokens))),
        overlaps=tuple(given.overlaps),
        routing=routing,
        dtype=dtype or "bf16",
        experts=few * given.ranks if few else None,
        gemm="tiled",
        samples=given.samples,
    )
    words = tuple(word for word in settings.overlaps if word != "shared" or settings.config.shared)
    return replace(settings, overlaps=words or ("none",))


def body(
    group: Group, cases: list[LayerSettings], budget: float, out: Path | None
) -> list[dict[str, Any]]:
    """What every rank does: case after case, while there is time on rank 0."""
    began, found = time.monotonic(), []
    for settings in cases:
        start = time.monotonic()
        if group.all_gather(start - began > budget)[0]:
            break
        try:
            result = rank_body(group, settings, True)
        except (CreationFailed, InvalidArgument) as error:  # on every rank: the others go on
            result = {"problem": str(error), "measurements": [], "refused": [], "choices": {}}
            result |= {"machine": {"gpus": [], "date": ""}, "gemm": ""}
        found.append(result)
        if group.device.type == "cuda":
            torch.cuda.empty_cache()
        if group.rank == 0:
            state = result["problem"] or "ok"
            print(f"{time.monotonic() - start:6.1f} s  {title(settings)}: {state}", flush=True)
            write(out, [report_of(*pair) for pair in zip(cases, found, strict=False)])
    return found


def title(settings: LayerSettings) -> str:
    """A case in words."""
    return f"{settings.model} {settings.dtype} {settings.routing}"


def write(out: Path | None, reports: list[LayerReport]) -> None:
    """All that was measured so far."""
    if out is not None:
        data = [as_json(report, []) | {"problem": report.problem} for report in reports]
        write_text(out, json.dumps(data, indent=1) + "\n")


def show(console: Console, reports: list[LayerReport], tokens: list[int]) -> None:
    """Models by tokens: the fastest mode, its us and its ratio to the floor; auto's, if another."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "experts", "routing", *map(str, tokens)):
        table.add_column(name)
    for report in reports:
        rows, config = layer_rows(report, []), report.settings.config
        texts = []
        for size in tokens:
            found = [row for row in rows if row.tokens == size]
            best = min(found, key=lambda row: row.us.median, default=None)
            if best is None:
                texts.append("")
                continue
            floor = "" if best.ratio is None else f" {best.ratio:.2f} x floor"
            auto = report.choices[size].auto
            other = "" if auto == best.overlap else f", auto {auto}"
            texts.append(f"{best.us.median:.1f} {best.overlap}{floor}{other}")
        experts = f"{config.routing.num_experts} {report.settings.dtype}"
        table.add_row(report.settings.model, experts, report.settings.routing, *texts)
    console.print("us of a layer, fastest mode, slowest rank, by tokens a rank")
    console.print(table)


def write_tables(folder: Path, reports: list[LayerReport]) -> None:
    """A table of each uniform case that is good."""
    folder.mkdir(parents=True, exist_ok=True)
    for report in reports:
        settings = report.settings
        if settings.routing == "uniform" and report.problem is None:
            found = table_of([report])
            gpu = (found.sizes.gpu.split() or ["cpu"])[-1].lower()
            name = f"{settings.model}-{settings.dtype}-{settings.ranks}x{gpu}.json"
            write_table(folder / name, found)


def main() -> None:
    """Measure, show, and say what was not run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpus = torch.cuda.device_count()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpus else "cpu")
    parser.add_argument("--ranks", type=int, default=gpus or 4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64, 128, 512])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--routings", nargs="+", default=["uniform", "zipf"])
    words = ["none", "shared", "push"]
    parser.add_argument("--overlaps", nargs="+", choices=OVERLAPS, default=words)
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--budget", type=float, default=160.0)
    given = parser.parse_args()
    cases, skipped = [], []
    for routing in given.routings:
        for case in given.cases:
            try:
                cases.append(settings_of(case, routing, given))
            except InvalidArgument as error:
                skipped.append(f"{case} {routing}: {error}")
    pairs: list[tuple[LayerSettings, dict[str, Any]]] = []
    if cases:
        results = launch(
            body,
            cases,
            given.budget,
            given.out,
            ranks=given.ranks,
            device=given.device,
            timeout=LIMIT_SECONDS,
        )
        pairs = list(zip(cases, results[0], strict=False))
    reports = [report_of(*pair) for pair in pairs]
    good = [report for report in reports if report.measurements]
    console = Console(width=200)
    show(console, good, sorted(set(given.tokens)))
    if good:
        console.print(machine_line(good[0].machine), *{m.method for m in good[0].measurements})
    for text in skipped:
        console.print(f"refused: {text}")
    for report in reports:
        if report.problem is not None:
            console.print(f"FAILED: {title(report.settings)}: {report.problem}")
    for settings in cases[len(reports) :]:
        console.print(f"not run, the budget of {given.budget:g} s was spent: {title(settings)}")
    if given.tables:
        write_tables(given.tables, good)
    raise SystemExit(any(report.problem is not None for report in reports))


if __name__ == "__main__":
    main()
