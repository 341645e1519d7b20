"""The command of the low-latency all-to-all: `weft bench lowlatency`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.bench.cases import ROUTERS, parse_tokens
from weft.bench.lowlatency_cases import QUANTS
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
from weft.errors import InvalidArgument
from weft.ops.lowlatency_shape import REDUCES, SCALES

if TYPE_CHECKING:
    from weft.bench.lowlatency_cases import LowSettings

_TOKENS = "tokens per rank: 1,8,64 or 1..512 (doubling)"
_ROUTER = f"{', '.join(ROUTERS)}, or a .npy / .json file of ids [rows, top_k]"
_SCALE = f"{', '.join(SCALES)}: where scales lie"
_REDUCE = f"{', '.join(REDUCES)}: who adds a token's rows"
_VARIANTS = (
    "time these side by side, in turn: default, halves, fp8-home, sender, lean, plain, no-pdl, "
    "profile"
)
_TRACE = "run the largest size once more, profiled; write all ranks' timeline here (Perfetto)"


def bench_lowlatency(
    ranks: Annotated[int, typer.Option(help="ranks; 0: every GPU, or 4 on the CPU")] = 0,
    device: Annotated[str, typer.Option(help=DEVICE)] = "auto",
    tokens: Annotated[str, typer.Option(help=_TOKENS)] = "128",
    max_tokens: Annotated[int | None, typer.Option(help="capacity; default: what fits")] = None,
    hidden: Annotated[int, typer.Option(help="numbers of a token")] = 7168,
    top_k: Annotated[int, typer.Option(help="experts per token")] = 8,
    experts: Annotated[int, typer.Option(help="experts of the layer")] = 256,
    router: Annotated[str, typer.Option(help=_ROUTER)] = "perfect",
    quant: Annotated[str, typer.Option(help=", ".join(QUANTS))] = "fp8",
    scale: Annotated[str, typer.Option(help=_SCALE)] = "fp32_row",
    reduce: Annotated[str, typer.Option(help=_REDUCE)] = "receiver",
    combine_by: Annotated[str, typer.Option(help="push, fp8: how rows come home")] = "push",
    halves: Annotated[bool, typer.Option("--halves", help="build the halves, too")] = False,
    num_sms: Annotated[int | None, typer.Option(help="SMs that the kernels may fill")] = None,
    graph: Annotated[bool, typer.Option("--graph/--eager", help="CUDA graphs or calls")] = True,
    pdl: Annotated[bool, typer.Option("--pdl/--no-pdl", help=PDL)] = True,
    iters: Annotated[int, typer.Option(help=ITERS)] = 0,
    seed: Annotated[int, typer.Option(help="of rows and ids")] = 0,
    json: Annotated[Path | None, typer.Option(help="write all samples here")] = None,
    trace: Annotated[Path | None, typer.Option(help=_TRACE)] = None,
    variants: Annotated[str, typer.Option(help=_VARIANTS)] = "",
    quiet: Annotated[bool, typer.Option(help="no progress bar")] = False,
) -> None:
    """Time the low-latency all-to-all, after checking every bit of it."""
    from weft.bench.lowlatency_cases import LowSettings

    where = chosen_device(device)
    settings = LowSettings(
        ranks=everyone(ranks, where),
        device=where,
        tokens=parse_tokens(tokens),
        max_tokens=max_tokens,
        hidden=hidden,
        top_k=top_k,
        experts=experts,
        router=router,
        quant=quant,
        scale=scale,
        reduce=reduce,
        combine_by=combine_by,
        graph=graph,
        samples=chosen_samples(iters, where, graph=graph),
        seed=seed,
        halves=halves,
        num_sms=num_sms,
        programmatic_launch=pdl,
    )
    if variants:
        if trace:
            raise InvalidArgument("--trace with --variants; trace one variant at a time")
        _bench_variants(settings, variants, json, quiet=quiet)
    else:
        _bench_one(settings, json, trace, quiet=quiet)


def _bench_one(
    settings: LowSettings, json: Path | None, trace: Path | None, *, quiet: bool
) -> None:
    from weft.bench.lowlatency import run
    from weft.bench.lowlatency import trace as write_trace
    from weft.bench.lowlatency_report import print_low, write_low_json
    from weft.bench.peers import matching_peers

    peers = matching_peers(settings.as_moe)
    found = run(settings, quiet=quiet)
    stop_at(found.problem)
    print_low(wide_console(), found, peers)
    if json:
        write_low_json(json, found, peers)
    if trace:
        stop_at(write_trace(trace, settings))


def _bench_variants(
    settings: LowSettings, variants: str, json: Path | None, *, quiet: bool
) -> None:
    from weft.bench.lowlatency_ladder import (
        climb,
        parse_variants,
        print_ladder,
        write_ladder_json,
    )

    ladder = climb(settings, parse_variants(variants), quiet=quiet)
    print_ladder(wide_console(), ladder)
    if json:
        write_ladder_json(json, ladder)
    if ladder.problems:
        raise typer.Exit(1)
