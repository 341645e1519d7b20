"""The commands `weft bench` and `weft tune`: from options to a case, a report, and its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from weft.allreduce.curve import EPILOGUES
from weft.allreduce.table import BACKENDS as TUNED
from weft.bench import allreduce, allreduce_baselines, layer, lowlatency, moe, moe_baselines
from weft.bench.baselines import Baseline, measure_baselines, merge_peers
from weft.bench.case import DTYPES, Case, parse_sizes
from weft.bench.layer_trace import check_traced, trace_layers
from weft.bench.peers import matching
from weft.bench.routing import ROUTINGS
from weft.bench.trace import trace_pairs
from weft.cli.options import (
    DEVICES,
    STDOUT,
    Outputs,
    check_writable,
    choice,
    common,
    stop_at,
    wide_console,
    words,
)
from weft.lowlatency.shape import REDUCES, SCALES
from weft.moe import MODELS, MODES, OVERLAPS
from weft.moe.plan import GEMMS

bench = typer.Typer(
    add_completion=False, help="Check, then time, weft's operations; without a name, moe."
)
tune = typer.Typer(
    add_completion=False,
    help="Measure this machine, so that weft chooses right on it.",
    no_args_is_help=True,
)

_SIZE = "tokens per rank: 1,8,64 or 1..512 (doubling)"
_ROUTE = "{}, zipf:EXPONENT, or a .npy / .json file of ids [rows, top_k]"
_OVERLAP = "some of {}, with commas; all if not given"
_Text: TypeAlias = str | None
Ranks = Annotated[int, typer.Option(min=0, help="ranks; 0: every GPU, or 4 on the CPU")]
Device = Annotated[str, choice(DEVICES, "{}: cuda where there are GPUs")]
Tokens = Annotated[str, typer.Option(help=_SIZE)]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="capacity; default: what fits")]
Model = Annotated[_Text, choice(tuple(MODELS), "sizes of {}; options given beside it win")]
Hidden = Annotated[int | None, typer.Option(help="elements of a row [7168]")]
TopK = Annotated[int | None, typer.Option(help="experts per token [8]")]
Experts = Annotated[int | None, typer.Option(help="experts on all ranks [256]")]
Routing = Annotated[str, choice(ROUTINGS, _ROUTE, free=True)]
Dtype = Annotated[str, choice(tuple(DTYPES), "{}: of rows that come back")]
NumSms = Annotated[int | None, typer.Option(min=1, help="SMs that the kernels may fill")]
Halves = Annotated[bool, typer.Option("--split-phase", help="with send and receive apart")]
Graph = Annotated[bool, typer.Option("--graph/--eager", help="CUDA graphs or calls")]
Pdl = Annotated[bool, typer.Option("--pdl/--no-pdl", help="programmatic dependent launch")]
Cold = Annotated[bool, typer.Option("--cold", help="also time calls after a flush of the caches")]
Iters = Annotated[
    int,
    typer.Option(min=0, help="samples; 0: 15 replays of a graph (at least 11), or 20 calls on CPU"),
]
Seed = Annotated[int, typer.Option(help="of inputs and routing")]
Peers = Annotated[bool, typer.Option("--peers", help="also measure installed libraries")]
Recorded = Annotated[Path | None, typer.Option(help="recorded figures to show beside")]
Json = Annotated[Path | None, typer.Option(help="write all samples here; -: to stdout")]
Plot = Annotated[Path | None, typer.Option(help="write a picture here (.png, .svg, .pdf)")]
Trace = Annotated[
    Path | None, typer.Option(help="run the largest size again, profiled; write it for Perfetto")
]
Table = Annotated[Path | None, typer.Option(help="file of `weft tune` that auto reads")]
Quiet = Annotated[bool, typer.Option("--quiet", help="do not tell progress")]
LayerModel = Annotated[
    str, choice(layer.LAYER_MODELS, "{}; on CPU ranks its rules with few numbers")
]
Weights = Annotated[str, choice(layer.WEIGHT_DTYPES, "{}: the experts' weights")]
LayerRouting = Annotated[str, choice(layer.ROUTINGS, "{} or zipf:EXPONENT", free=True)]
LayerExperts = Annotated[int | None, typer.Option(min=1, help="experts of the layer [the model's]")]
Shared = Annotated[bool, typer.Option(help="with the model's shared expert")]
Gemm = Annotated[str, choice(GEMMS, "how the experts multiply: {}")]
Epilogue = "{}: what follows the sum"


@bench.command("moe")
def bench_moe(
    ranks: Ranks = 0,
    device: Device = "auto",
    model: Model = None,
    tokens: Tokens = "1,8,64",
    hidden: Hidden = None,
    top_k: TopK = None,
    experts: Experts = None,
    max_tokens: MaxTokens = None,
    routing: Routing = "uniform",
    backend: Annotated[str, choice(moe.BACKENDS, "some of {}", several=True)] = "onesided",
    dtype: Dtype = "bf16",
    payload: Annotated[
        str, choice(moe.PAYLOADS, "{}: rows of --dtype, or float8 rows and scales")
    ] = "bf16",
    combine: Annotated[_Text, choice(moe.COMBINES, "{}: who moves one-sided rows back")] = None,
    combine_dtype: Annotated[_Text, choice(("fp8",), "{}: rows travel back as FP8")] = None,
    quantize: Annotated[
        _Text, choice(moe.QUANTIZE, "{}: the one-sided dispatch quantises rows of --dtype")
    ] = None,
    split_phase: Halves = False,
    graph: Graph = True,
    cold: Cold = False,
    num_sms: NumSms = None,
    corun: Annotated[
        _Text, typer.Option(help="matmul or matmul:SIZE on the other SMs (with --num-sms)")
    ] = None,
    pdl: Pdl = True,
    iters: Iters = 0,
    seed: Seed = 0,
    peers: Peers = False,
    recorded: Recorded = None,
    json: Json = None,
    plot: Plot = None,
    trace: Trace = None,
    quiet: Quiet = False,
) -> None:
    """Time dispatch and combine of an MoE layer, after checking every byte of them."""
    given = common(
        ranks=ranks, device=device, tokens=tokens, iters=iters, graph=graph, seed=seed, pdl=pdl
    )
    case = moe.MoECase(
        **given,
        **_sizes(model, hidden, top_k, experts),
        max_tokens=max_tokens,
        routing=routing,
        backends=words(f"{backend},collective" if peers else backend),
        dtype=dtype,
        payload=payload,
        combine=combine,
        combine_dtype=combine_dtype,
        quantize=quantize,
        split_phase=split_phase,
        cold=cold,
        num_sms=num_sms,
        corun=corun,
    )
    baselines = moe_baselines.BASELINES if peers else ()
    _run(case, Outputs(json, plot, trace, recorded), baselines=baselines, quiet=quiet)
    if trace is not None:
        stop_at(trace_pairs(trace, case))


@bench.command("lowlatency")
def bench_lowlatency(
    ranks: Ranks = 0,
    device: Device = "auto",
    model: Model = None,
    tokens: Tokens = "128",
    hidden: Hidden = None,
    top_k: TopK = None,
    experts: Experts = None,
    max_tokens: MaxTokens = None,
    routing: Routing = "perfect",
    dtype: Dtype = "bf16",
    quantize: Annotated[str, choice(("none", *lowlatency.QUANTIZE), "{}: rows out")] = "fp8",
    scale: Annotated[str, choice(SCALES, "{}: where scales lie")] = "fp32_row",
    reduce: Annotated[str, choice(REDUCES, "{}: who adds a token's rows")] = "receiver",
    combine_dtype: Annotated[_Text, choice(("fp8",), "{}: rows travel back as FP8")] = None,
    split_phase: Halves = False,
    graph: Graph = True,
    cold: Cold = False,
    num_sms: NumSms = None,
    pdl: Pdl = True,
    iters: Iters = 0,
    seed: Seed = 0,
    recorded: Recorded = None,
    json: Json = None,
    plot: Plot = None,
    trace: Trace = None,
    quiet: Quiet = False,
) -> None:
    """Time the low-latency all-to-all, after checking every bit of it."""
    given = common(
        ranks=ranks, device=device, tokens=tokens, iters=iters, graph=graph, seed=seed, pdl=pdl
    )
    case = lowlatency.LowCase(
        **given,
        **_sizes(model, hidden, top_k, experts),
        max_tokens=max_tokens,
        routing=routing,
        dtype=dtype,
        quantize=None if quantize == "none" else quantize,
        scale=scale,
        reduce=reduce,
        combine_dtype=combine_dtype,
        split_phase=split_phase,
        cold=cold,
        num_sms=num_sms,
    )
    _run(case, Outputs(json, plot, trace, recorded), quiet=quiet)
    if trace is not None:
        stop_at(lowlatency.trace_rounds(trace, case))


@bench.command("allreduce")
def bench_allreduce(
    ranks: Ranks = 0,
    device: Device = "auto",
    tokens: Tokens = "1,8,64",
    hidden: Annotated[int, typer.Option(help="elements of a row")] = 7168,
    max_tokens: MaxTokens = None,
    dtype: Dtype = "bf16",
    backend: Annotated[str, choice(allreduce.BACKENDS, "some of {}", several=True)] = "auto",
    epilogue: Annotated[str, choice(EPILOGUES, Epilogue)] = "norm",
    table: Table = None,
    graph: Graph = True,
    cold: Cold = False,
    pdl: Pdl = True,
    iters: Iters = 0,
    seed: Seed = 0,
    peers: Peers = False,
    recorded: Recorded = None,
    json: Json = None,
    plot: Plot = None,
    quiet: Quiet = False,
) -> None:
    """Time the fused all-reduce, after checking every bit of it."""
    given = common(
        ranks=ranks, device=device, tokens=tokens, iters=iters, graph=graph, seed=seed, pdl=pdl
    )
    case = allreduce.ReduceCase(
        **given,
        hidden=hidden,
        max_tokens=max_tokens,
        dtype=dtype,
        backends=words(backend),
        epilogue=epilogue,
        table=str(table) if table else None,
        cold=cold,
    )
    baselines = allreduce_baselines.BASELINES if peers else ()
    _run(case, Outputs(json, plot, None, recorded), baselines=baselines, quiet=quiet)


@bench.command("layer")
def bench_layer(
    ranks: Ranks = 0,
    device: Device = "auto",
    model: LayerModel = "deepseek-v3",
    dtype: Weights = "bf16",
    tokens: Tokens = "8,64,128",
    mode: Annotated[str, choice(MODES, "{}: rank-major rows, or expert-major")] = "throughput",
    overlap: Annotated[str, choice(OVERLAPS, _OVERLAP, several=True)] = "",
    routing: LayerRouting = "uniform",
    experts: LayerExperts = None,
    shared: Shared = True,
    gemm: Gemm = "auto",
    max_rows: Annotated[int | None, typer.Option(help="as in MoE; default: worst case")] = None,
    quantize: Annotated[_Text, choice(moe.QUANTIZE, "{}; fp8 experts make FP8 rows")] = None,
    combine_dtype: Annotated[_Text, choice(("fp8",), "{}: rows travel back as FP8")] = None,
    table: Table = None,
    graph: Graph = True,
    num_sms: NumSms = None,
    pdl: Pdl = True,
    stages: Annotated[
        bool, typer.Option("--stages", help="also time the parts, each alone (overlap none)")
    ] = False,
    iters: Iters = 0,
    seed: Seed = 0,
    json: Json = None,
    plot: Plot = None,
    trace: Trace = None,
    quiet: Quiet = False,
) -> None:
    """Time whole MoE layers, from router logits to output, after checking them."""
    given = common(
        ranks=ranks, device=device, tokens=tokens, iters=iters, graph=graph, seed=seed, pdl=pdl
    )
    case = layer.LayerCase(
        **given,
        model=model,
        dtype=dtype,
        mode=mode,
        overlaps=words(overlap),
        routing=routing,
        experts=experts,
        shared=shared,
        gemm=gemm,
        max_rows=max_rows,
        quantize=quantize,
        combine_dtype=combine_dtype,
        table=str(table) if table else None,
        num_sms=num_sms,
        stages=stages,
    )
    if trace is not None:
        check_traced(case)
    _run(case, Outputs(json, plot, trace), quiet=quiet)
    if trace is not None:
        stop_at(trace_layers(trace, case))


@bench.command("compare")
def bench_compare(
    first: Annotated[Path, typer.Argument(help="JSON of a run")],
    second: Annotated[Path, typer.Argument(help="JSON of another")],
    limit: Annotated[
        float | None, typer.Option(min=0, help="exit with 1 where it is slower by more percent")
    ] = None,
) -> None:
    """Show two recorded runs side by side, with the ratio of their medians."""
    from weft.bench.compare import compare, print_pairs

    if print_pairs(wide_console(), compare(first, second), limit):
        raise typer.Exit(1)


@bench.callback(invoke_without_command=True)
def bench_default(context: typer.Context) -> None:
    """Run `moe` with its defaults when no benchmark is named."""
    if context.invoked_subcommand is None:
        bench_moe()


@tune.command("allreduce")
def tune_allreduce(
    output: Annotated[Path, typer.Argument(help="file to write; AllReduce(table=...) reads it")],
    ranks: Ranks = 0,
    device: Device = "auto",
    tokens: Tokens = "1..2048",
    hidden: Annotated[str, typer.Option(help="elements of a row, with commas")] = "7168,4096",
    dtype: Dtype = "bf16",
    epilogue: Annotated[str, choice(EPILOGUES, Epilogue, several=True)] = "norm,none",
    backend: Annotated[str, choice(TUNED, "some of {}", several=True)] = ",".join(TUNED),
    pdl: Pdl = True,
    iters: Iters = 0,
    quiet: Quiet = False,
) -> None:
    """Measure every backend of the all-reduce here, and write the table that auto chooses by."""
    from weft.bench.allreduce_tune import print_table, tune, tuning_cases
    from weft.bench.report import write_text

    check_writable(output)
    given = common(
        ranks=ranks, device=device, tokens=tokens, iters=iters, graph=True, seed=0, pdl=pdl
    )
    case = allreduce.ReduceCase(**given, dtype=dtype, backends=words(backend))
    found = tune(tuning_cases(case, parse_sizes(hidden), words(epilogue)), quiet=quiet)
    stop_at(found.problem)
    if found.table is not None:
        write_text(output, found.table.text())
        print_table(wide_console(), found.table)


@tune.command("layer")
def tune_layer(
    output: Annotated[Path, typer.Argument(help="file to write; MoE(table=...) reads it")],
    ranks: Ranks = 0,
    device: Device = "auto",
    model: LayerModel = "deepseek-v3",
    dtype: Weights = "bf16",
    tokens: Tokens = "8,16,32,64,128,256,512",
    mode: Annotated[str, choice(MODES, "some of {}", several=True)] = "throughput,low_latency",
    overlap: Annotated[str, choice(OVERLAPS, _OVERLAP, several=True)] = "",
    routing: LayerRouting = "uniform",
    experts: LayerExperts = None,
    shared: Shared = True,
    gemm: Gemm = "auto",
    pdl: Pdl = True,
    iters: Iters = 0,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Measure every overlap of a layer here, and write the table that auto chooses by."""
    from weft.bench.layer_tune import print_table, tune
    from weft.bench.report import write_text

    check_writable(output)
    given = common(
        ranks=ranks, device=device, tokens=tokens, iters=iters, graph=True, seed=seed, pdl=pdl
    )
    given["tokens"] = tuple(sorted(given["tokens"]))
    case = layer.LayerCase(
        **given,
        model=model,
        overlaps=words(overlap),
        routing=routing,
        dtype=dtype,
        experts=experts,
        shared=shared,
        gemm=gemm,
    )
    found = tune(case, words(mode), quiet=quiet)
    stop_at(found.problem)
    if found.table is not None:
        write_text(output, found.table.text())
        print_table(wide_console(), found.table, found.refused)


def _sizes(
    model: str | None, hidden: int | None, top_k: int | None, experts: int | None
) -> dict[str, Any]:
    """The sizes of a model, deepseek-v3's if none is named, less those that were given."""
    config = MODELS[model or "deepseek-v3"]
    return {
        "model": model,
        "hidden": config.hidden if hidden is None else hidden,
        "top_k": config.routing.top_k if top_k is None else top_k,
        "experts": config.routing.num_experts if experts is None else experts,
    }


def _run(case: Case, outputs: Outputs, *, quiet: bool, baselines: Sequence[Baseline] = ()) -> None:
    """Measure, print, and write what was asked for: the samples first, so that none are lost."""
    from weft.bench.plot import plot
    from weft.bench.report import as_json, print_report, rows_of, write_json
    from weft.bench.run import run

    outputs.check()
    recorded = matching(case, outputs.recorded)
    report = run(case, quiet=quiet)
    stop_at(report.problem)
    if outputs.json and outputs.json != STDOUT:
        write_json(outputs.json, as_json(report, recorded))
    runs = measure_baselines(case, baselines)
    shown = merge_peers(recorded, runs, str(report.machine["date"])[:10])
    if outputs.json and (runs or outputs.json == STDOUT):
        write_json(outputs.json, as_json(report, shown, runs))
    print_report(outputs.console, report, shown, runs)
    if outputs.plot:
        plot(outputs.plot, rows_of(report, shown), case.title(), report.machine)
