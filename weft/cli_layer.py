"""The command of whole MoE layers: `weft bench layer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from weft.bench.cases import parse_tokens
from weft.bench.layer_cases import LAYER_MODELS, WEIGHT_DTYPES
from weft.cli_options import (
    DEVICE,
    ITERS,
    chosen_device,
    chosen_samples,
    everyone,
    stop_at,
    wide_console,
)
from weft.moe import EXCHANGES, OVERLAPS

_Options: TypeAlias = dict[str, Any]
_MODEL = f"{', '.join(LAYER_MODELS)}; on CPU ranks its rules with few numbers"
_DTYPE = f"{', '.join(WEIGHT_DTYPES)}: the experts' weights"
_TOKENS = "tokens per rank: 8,64,128 or 1..512 (doubling)"
_OVERLAP = f"any of {', '.join(OVERLAPS)}, with commas; default: all"
_EXCHANGE = f"{', '.join(EXCHANGES)}: rows by rank (AllToAll) or by expert (LowLatencyAllToAll)"
_ROUTING = "uniform, perfect, zipf or zipf:EXPONENT: what the logits make the router choose"
_EXPERTS = "experts of the layer; 0: the model's. 128 on 4 ranks leave each as many as 256 on 8"
_QUANTIZE = "as in MoE; fp8 experts make FP8 rows"
_TRACE = "write one call of each mode, every kernel of all ranks, for ui.perfetto.dev"
_TABLE = "table of `weft tune layer` that auto reads [the nearest that came with weft]"
_STAGES = "also time the parts of the layer, each alone"


def bench_layer(
    model: Annotated[str, typer.Option(help=_MODEL)] = "deepseek-v3",
    dtype: Annotated[str, typer.Option(help=_DTYPE)] = "bf16",
    tokens: Annotated[str, typer.Option(help=_TOKENS)] = "8,64,128",
    exchange: Annotated[str, typer.Option(help=_EXCHANGE)] = "rank",
    overlap: Annotated[str, typer.Option(help=_OVERLAP)] = "",
    routing: Annotated[str, typer.Option(help=_ROUTING)] = "uniform",
    ranks: Annotated[int, typer.Option(help="ranks; 0: every GPU, or 4 on the CPU")] = 0,
    device: Annotated[str, typer.Option(help=DEVICE)] = "auto",
    experts: Annotated[int, typer.Option(help=_EXPERTS)] = 0,
    shared: Annotated[bool, typer.Option(help="the model's shared expert")] = True,
    gemm: Annotated[str, typer.Option(help="how the experts multiply, as in MoE")] = "auto",
    max_rows: Annotated[int | None, typer.Option(help="as in MoE; default: worst case")] = None,
    quantize: Annotated[str | None, typer.Option(help=_QUANTIZE)] = None,
    combine_by: Annotated[str | None, typer.Option(help="as in MoE; default: its own")] = None,
    table: Annotated[Path | None, typer.Option(help=_TABLE)] = None,
    graph: Annotated[bool, typer.Option("--graph/--eager", help="CUDA graphs or calls")] = True,
    stages: Annotated[bool, typer.Option("--stages", help=_STAGES)] = False,
    iters: Annotated[int, typer.Option(help=ITERS)] = 0,
    seed: Annotated[int, typer.Option(help="of weights, tokens and logits")] = 0,
    out: Annotated[Path | None, typer.Option(help="write all samples here (JSON)")] = None,
    plot: Annotated[Path | None, typer.Option(help="write a picture here (.png, .svg)")] = None,
    trace: Annotated[Path | None, typer.Option(help=_TRACE)] = None,
    quiet: Annotated[bool, typer.Option(help="no progress bar")] = False,
) -> None:
    """Time whole MoE layers, from router logits to output, after checking them."""
    from weft.bench.layer import run
    from weft.bench.layer_cases import LayerSettings
    from weft.bench.layer_plot import plot_layer
    from weft.bench.layer_report import print_layer, write_layer_json
    from weft.bench.layer_trace import trace_layers
    from weft.bench.peers import matching_layers

    where = chosen_device(device)
    layer: _Options = dict(model=model, dtype=dtype, experts=experts or None, shared=shared)
    ways: _Options = dict(exchange=exchange, overlaps=_words(overlap), gemm=gemm)
    rows: _Options = dict(max_rows=max_rows, quantize=quantize, combine_by=combine_by)
    inputs: _Options = dict(tokens=parse_tokens(tokens), routing=routing, seed=seed)
    timing: _Options = dict(graph=graph, stages=stages, traced=trace is not None)
    settings = LayerSettings(
        ranks=everyone(ranks, where),
        device=where,
        table=str(table) if table else None,
        samples=chosen_samples(iters, where, graph=graph),
        **layer,
        **ways,
        **rows,
        **inputs,
        **timing,
    )
    found, peers = run(settings, quiet=quiet), matching_layers(settings)
    stop_at(found.problem)
    print_layer(wide_console(), found, peers)
    if out:
        write_layer_json(out, found, peers)
    if plot:
        plot_layer(plot, found, peers)
    if trace:
        stop_at(trace_layers(trace, settings))


def tune_layer(
    output: Annotated[Path | None, typer.Argument(help="file to write, for MoE(table=...)")] = None,
    model: Annotated[str, typer.Option(help=_MODEL)] = "deepseek-v3",
    dtype: Annotated[str, typer.Option(help=_DTYPE)] = "bf16",
    tokens: Annotated[str, typer.Option(help=_TOKENS)] = "8,16,32,64,128,256,512",
    exchange: Annotated[str, typer.Option(help=f"some of {', '.join(EXCHANGES)}")] = "rank,expert",
    overlap: Annotated[str, typer.Option(help=_OVERLAP)] = "",
    routing: Annotated[str, typer.Option(help=_ROUTING)] = "uniform",
    ranks: Annotated[int, typer.Option(help="ranks; 0: every GPU, or 4 on the CPU")] = 0,
    device: Annotated[str, typer.Option(help=DEVICE)] = "auto",
    experts: Annotated[int, typer.Option(help=_EXPERTS)] = 0,
    shared: Annotated[bool, typer.Option(help="the model's shared expert")] = True,
    gemm: Annotated[str, typer.Option(help="how the experts multiply, as in MoE")] = "auto",
    iters: Annotated[int, typer.Option(help=ITERS)] = 0,
    seed: Annotated[int, typer.Option(help="of weights, tokens and logits")] = 0,
    quiet: Annotated[bool, typer.Option(help="no progress bar")] = False,
) -> None:
    """Measure every overlap of a layer here, and write the table that auto chooses by."""
    from weft.bench.layer_cases import LayerSettings
    from weft.bench.layer_tune import print_table, tune, write_table

    where = chosen_device(device)
    settings = LayerSettings(
        ranks=everyone(ranks, where),
        device=where,
        model=model,
        tokens=tuple(sorted(set(parse_tokens(tokens)))),
        overlaps=_words(overlap),
        routing=routing,
        dtype=dtype,
        experts=experts or None,
        shared=shared,
        gemm=gemm,
        seed=seed,
        samples=chosen_samples(iters, where, graph=True),
    )
    found = tune(settings, _words(exchange), quiet=quiet)
    stop_at(found.problem)
    if found.table is not None:
        print_table(wide_console(), found.table, found.refused)
        if output:
            write_table(output, found.table)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)
