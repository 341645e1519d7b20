"""The commands of `weft bench`: from options to a case, a report, and its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from weft.bench import allreduce, allreduce_baselines, layer, lowlatency, moe, moe_baselines
from weft.bench.baselines import Baseline, measure_baselines, merge_peers
from weft.bench.case import Case
from weft.bench.layer_trace import check_traced, trace_layers
from weft.bench.peers import matching
from weft.bench.routing import ROUTINGS
from weft.bench.trace import trace_pairs
from weft.cli.bench_options import (
    BenchOptions,
    Cold,
    CombineDtype,
    Dtype,
    File,
    LayerOptions,
    MaxTokens,
    Number,
    NumSms,
    PairOptions,
    Text,
    flat,
)
from weft.cli.options import STDOUT, choice, stop_at, wide_console, words
from weft.lowlatency.config import REDUCES, SCALES
from weft.moe import MODES

bench = typer.Typer(
    add_completion=False, help="Check, then time, weft's operations; without a name, moe."
)

Tokens = Annotated[str, typer.Option(help="tokens per rank: 1,8,64 or 1..512 (doubling)")]
Routing = Annotated[
    str,
    choice(ROUTINGS, "{}, zipf:EXPONENT, or a .npy / .json file of ids [rows, top_k]", free=True),
]
Peers = Annotated[bool, typer.Option("--peers", help="also measure installed libraries")]
Trace = Annotated[
    File, typer.Option(help="run the largest size again, profiled; write it for Perfetto")
]
_EPILOGUE = "{}: what follows the sum"


@bench.command("moe")
@flat
def bench_moe(
    *,
    tokens: Tokens = "1,8,64",
    pairs: PairOptions,
    routing: Routing = "uniform",
    backend: Annotated[str, choice(moe.BACKENDS, "some of {}", several=True)] = "onesided",
    payload: Annotated[
        str, choice(moe.PAYLOADS, "{}: rows of --dtype, or float8 rows and scales")
    ] = "bf16",
    combine: Annotated[Text, choice(moe.COMBINES, "{}: who moves one-sided rows back")] = None,
    quantize: Annotated[
        Text, choice(moe.QUANTIZE, "{}: the one-sided dispatch quantises rows of --dtype")
    ] = None,
    corun: Annotated[
        Text, typer.Option(help="matmul or matmul:SIZE on the other SMs (with --num-sms)")
    ] = None,
    peers: Peers = False,
    options: BenchOptions,
    trace: Trace = None,
) -> None:
    """Time dispatch and combine of an MoE layer, after checking every byte of them."""
    case = moe.MoECase(
        **options.case(tokens),
        **pairs.case(),
        routing=routing,
        backends=words(f"{backend},collective" if peers else backend),
        payload=payload,
        combine=combine,
        quantize=quantize,
        corun=corun,
    )
    _run(case, options, trace=trace, baselines=moe_baselines.BASELINES if peers else ())
    if trace is not None:
        stop_at(trace_pairs(trace, case))


@bench.command("lowlatency")
@flat
def bench_lowlatency(
    *,
    tokens: Tokens = "128",
    pairs: PairOptions,
    routing: Routing = "perfect",
    quantize: Annotated[str, choice(("none", *lowlatency.QUANTIZE), "{}: rows out")] = "fp8",
    scale: Annotated[str, choice(SCALES, "{}: where scales lie")] = "fp32_row",
    reduce: Annotated[str, choice(REDUCES, "{}: who adds a token's rows")] = "receiver",
    options: BenchOptions,
    trace: Trace = None,
) -> None:
    """Time the low-latency all-to-all, after checking every bit of it."""
    case = lowlatency.LowCase(
        **options.case(tokens),
        **pairs.case(),
        routing=routing,
        quantize=None if quantize == "none" else quantize,
        scale=scale,
        reduce=reduce,
    )
    _run(case, options, trace=trace)
    if trace is not None:
        stop_at(lowlatency.trace_rounds(trace, case))


@bench.command("allreduce")
@flat
def bench_allreduce(
    *,
    tokens: Tokens = "1,8,64",
    hidden: Annotated[int, typer.Option(help="elements of a row")] = 7168,
    max_tokens: MaxTokens = None,
    dtype: Dtype = "bf16",
    backend: Annotated[str, choice(allreduce.BACKENDS, "some of {}", several=True)] = "auto",
    epilogue: Annotated[str, choice(allreduce.EPILOGUES, _EPILOGUE)] = "norm",
    cold: Cold = False,
    peers: Peers = False,
    options: BenchOptions,
) -> None:
    """Time the fused all-reduce, after checking every bit of it."""
    case = allreduce.ReduceCase(
        **options.case(tokens),
        hidden=hidden,
        max_tokens=max_tokens,
        dtype=dtype,
        backends=words(backend),
        epilogue=epilogue,
        cold=cold,
    )
    _run(case, options, baselines=allreduce_baselines.BASELINES if peers else ())


@bench.command("layer")
@flat
def bench_layer(
    *,
    tokens: Tokens = "8,64,128",
    layers: LayerOptions,
    mode: Annotated[str, choice(MODES, "{}: rank-major rows, or expert-major")] = "throughput",
    max_rows: Annotated[Number, typer.Option(help="as in MoE; default: worst case")] = None,
    quantize: Annotated[Text, choice(moe.QUANTIZE, "{}; fp8 experts make FP8 rows")] = None,
    combine_dtype: CombineDtype = None,
    num_sms: NumSms = None,
    stages: Annotated[
        bool, typer.Option("--stages", help="also time the parts, each alone (overlap none)")
    ] = False,
    options: BenchOptions,
    trace: Trace = None,
) -> None:
    """Time whole MoE layers, from router logits to output, after checking them."""
    case = layer.LayerCase(
        **options.case(tokens),
        **layers.case(),
        mode=mode,
        max_rows=max_rows,
        quantize=quantize,
        combine_dtype=combine_dtype,
        num_sms=num_sms,
        stages=stages,
    )
    if trace is not None:
        check_traced(case)
    _run(case, options, trace=trace)
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


def _run(
    case: Case,
    options: BenchOptions,
    *,
    trace: Path | None = None,
    baselines: Sequence[Baseline] = (),
) -> None:
    """Measure, print, and write what was asked for: the samples first, so that none are lost."""
    from weft.bench.plot import plot
    from weft.bench.report import as_json, print_report, rows_of, write_json
    from weft.bench.run import run

    outputs = options.outputs(trace)
    outputs.check()
    recorded = matching(case, options.recorded)
    report = run(case, quiet=options.quiet)
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
