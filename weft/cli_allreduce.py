"""The commands of the fused all-reduce: `weft bench allreduce` and `weft tune allreduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.bench.allreduce_cases import BACKENDS
from weft.bench.cases import DTYPES, parse_backends, parse_tokens
from weft.cli_options import (
    DEVICE,
    ITERS,
    PDL,
    chosen_device,
    chosen_samples,
    everyone,
    stop_at,
    wide_console,
)
from weft.ops.allreduce_curve import EPILOGUES
from weft.ops.allreduce_table import BACKENDS as TUNED

_BACKENDS = ", ".join(BACKENDS)
_EPILOGUE = f"{', '.join(EPILOGUES)}: what follows the sum"
_ROWS = "tokens, the same on every rank: 1,8,64 or 1..2048 (doubling)"
_PEERS = "also measure torch, its symmetric memory and FlashInfer, where installed"
_TABLE = "table of `weft tune allreduce` that auto reads [the one that came with weft]"


def bench_allreduce(
    ranks: Annotated[int, typer.Option(help="ranks, 2..8; 0: every GPU, or 4 on the CPU")] = 0,
    device: Annotated[str, typer.Option(help=DEVICE)] = "auto",
    tokens: Annotated[str, typer.Option(help=_ROWS)] = "1,8,64",
    hidden: Annotated[int, typer.Option(help="elements of a row")] = 7168,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bf16",
    backend: Annotated[str, typer.Option(help=_BACKENDS)] = "auto",
    epilogue: Annotated[str, typer.Option(help=_EPILOGUE)] = "norm",
    max_tokens: Annotated[int | None, typer.Option(help="capacity of the workspace")] = None,
    table: Annotated[Path | None, typer.Option(help=_TABLE)] = None,
    graph: Annotated[bool, typer.Option("--graph/--eager", help="CUDA graphs or calls")] = True,
    pdl: Annotated[bool, typer.Option("--pdl/--no-pdl", help=PDL)] = True,
    iters: Annotated[int, typer.Option(help=ITERS)] = 0,
    seed: Annotated[int, typer.Option(help="of the rows")] = 0,
    peers: Annotated[bool, typer.Option("--peers", help=_PEERS)] = False,
    recorded: Annotated[Path | None, typer.Option(help="recorded figures to show beside")] = None,
    json: Annotated[Path | None, typer.Option(help="write all samples here")] = None,
    plot: Annotated[Path | None, typer.Option(help="write a picture here (.png, .svg)")] = None,
    quiet: Annotated[bool, typer.Option(help="no progress bar")] = False,
) -> None:
    """Time the fused all-reduce, after checking every bit of it."""
    from weft.bench.allreduce_cases import ReduceSettings
    from weft.bench.allreduce_session import ReduceOutputs, run_reduce

    where = chosen_device(device)
    settings = ReduceSettings(
        ranks=everyone(ranks, where),
        device=where,
        tokens=parse_tokens(tokens),
        hidden=hidden,
        dtype=dtype,
        epilogue=epilogue,
        backends=parse_backends(backend),
        graph=graph,
        samples=chosen_samples(iters, where, graph=graph),
        seed=seed,
        max_tokens=max_tokens,
        table=str(table) if table else None,
        programmatic_launch=pdl,
    )
    outputs = ReduceOutputs(json, plot, recorded)
    stop_at(run_reduce(wide_console(), settings, outputs, peers=peers, quiet=quiet))


def tune_allreduce(
    output: Annotated[Path, typer.Argument(help="file to write; AllReduce(table=...) reads it")],
    ranks: Annotated[int, typer.Option(help="ranks, 2..8; 0: every GPU, or 4 on the CPU")] = 0,
    device: Annotated[str, typer.Option(help=DEVICE)] = "auto",
    tokens: Annotated[str, typer.Option(help=_ROWS)] = "1..2048",
    hidden: Annotated[str, typer.Option(help="elements of a row: 7168,4096")] = "7168,4096",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bf16",
    epilogue: Annotated[str, typer.Option(help=_EPILOGUE)] = "norm,none",
    backend: Annotated[str, typer.Option(help=", ".join(TUNED))] = ",".join(TUNED),
    pdl: Annotated[bool, typer.Option("--pdl/--no-pdl", help=PDL)] = True,
    iters: Annotated[int, typer.Option(help=ITERS)] = 0,
    quiet: Annotated[bool, typer.Option(help="no progress bar")] = False,
) -> None:
    """Measure every backend of the all-reduce here, and write the table that auto chooses by."""
    from weft.bench.allreduce_tune import print_table, tune, tuning_plan, write_table

    where = chosen_device(device)
    plan = tuning_plan(
        ranks=everyone(ranks, where),
        device=where,
        tokens=parse_tokens(tokens),
        hiddens=parse_tokens(hidden),
        dtype=dtype,
        epilogues=parse_backends(epilogue),
        backends=parse_backends(backend),
        samples=chosen_samples(iters, where, graph=True),
        programmatic_launch=pdl,
    )
    found = tune(plan, quiet=quiet)
    stop_at(found.problem)
    if found.table is not None:
        write_table(output, found.table)
        print_table(wide_console(), found.table)
