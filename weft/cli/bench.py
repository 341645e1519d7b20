# SPDX-License-Identifier: Apache-2.0
"""The commands of `weft bench`: parse options, run a case, and write its report."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from weft.bench import allreduce, baselines, layer, lowlatency, moe
from weft.bench.harness import DTYPES, Case, run
from weft.bench.plot import matplotlib_pyplot, plot
from weft.bench.report import STDOUT, as_json, print_report, rows_of, write_json
from weft.bench.routing import ROUTINGS
from weft.bench.trace import trace
from weft.cli.options import DEVICES, choice, chosen_device, wide_console, words
from weft.errors import InvalidArgument
from weft.lowlatency.config import REDUCES, SCALES
from weft.moe import MODELS, MODES, OVERLAPS
from weft.moe.layer.config import GEMMS

bench = typer.Typer(
    add_completion=False, help="Check, then time, weft's operations; without a name, moe."
)


# Options shared by several commands.
Tokens = Annotated[str, typer.Option(help="tokens per rank: 1,8,64 or 1..512 (doubling)")]
Model = Annotated[str, choice(tuple(MODELS), "whose sizes are the defaults")]
Hidden = Annotated[int | None, typer.Option(help="elements of a row [the model's]")]
TopK = Annotated[int | None, typer.Option(help="experts per token [the model's]")]
Experts = Annotated[int | None, typer.Option(min=1, help="experts on all ranks [the model's]")]
Dtype = Annotated[str, choice(tuple(DTYPES), "of combined rows")]
CombineDtype = Annotated[str | None, choice(("fp8",), "of rows that combine sends")]
Quantize = Annotated[str | None, choice(("fp8", "mxfp8"), "quantization by dispatch")]
NumSms = Annotated[int | None, typer.Option(min=1, help="SMs that the kernels may fill")]
Routing = Annotated[str, typer.Option(help=f"{', '.join(ROUTINGS)} or zipf:EXPONENT")]
Peers = Annotated[bool, typer.Option("--peers", help="also measure installed libraries")]
Ranks = Annotated[int, typer.Option(min=0, help="ranks; 0: every GPU, or 4 on the CPU")]
Device = Annotated[str, choice(DEVICES, "auto: cuda where there are GPUs")]
Pdl = Annotated[bool, typer.Option("--pdl/--no-pdl", help="programmatic dependent launch")]
_ITERS = "samples; 0: 15 replays of a graph (at least 11), or 20 calls on CPU"
Iters = Annotated[int, typer.Option(min=0, help=_ITERS)]
Graph = Annotated[bool, typer.Option("--graph/--eager", help="CUDA graphs or calls")]
Seed = Annotated[int, typer.Option(help="of inputs and routing")]
Quiet = Annotated[bool, typer.Option("--quiet", help="do not print progress")]
Json = Annotated[Path | None, typer.Option(help="write all samples here; -: to stdout")]
Plot = Annotated[Path | None, typer.Option(help="write a picture here (.png, .svg, .pdf)")]
_TRACE = "run the largest size again, profiled; write it for Perfetto"
Trace = Annotated[Path | None, typer.Option(help=_TRACE)]


@bench.command("moe")
def bench_moe(
    *,
    tokens: Tokens = "1,8,64",
    model: Model = "deepseek-v3",
    hidden: Hidden = None,
    top_k: TopK = None,
    experts: Experts = None,
    dtype: Dtype = "bf16",
    routing: Routing = "uniform",
    payload: Annotated[str, choice(("bf16", "fp8"), "rows of --dtype, or fp8 and scales")] = "bf16",
    combine: Annotated[str | None, choice(("pull", "push"), "who moves combined rows")] = None,
    combine_dtype: CombineDtype = None,
    quantize: Quantize = None,
    num_sms: NumSms = None,
    peers: Peers = False,
    ranks: Ranks = 0,
    device: Device = "auto",
    pdl: Pdl = True,
    iters: Iters = 0,
    graph: Graph = True,
    seed: Seed = 0,
    quiet: Quiet = False,
    json: Json = None,
    plot: Plot = None,
    trace: Trace = None,
) -> None:
    """Time dispatch and combine of an MoE layer, after checking every byte."""
    args = locals()
    options = _select(args, "routing", "payload", "combine", "quantize")
    _run(moe.MoECase(**_pair_options(args), **options), args, baselines.PAIRS if peers else ())


@bench.command("lowlatency")
def bench_lowlatency(
    *,
    tokens: Tokens = "128",
    model: Model = "deepseek-v3",
    hidden: Hidden = None,
    top_k: TopK = None,
    experts: Experts = None,
    dtype: Dtype = "bf16",
    routing: Routing = "perfect",
    quantize: Annotated[str, choice(("none", "fp8"), "dispatched rows")] = "fp8",
    scale: Annotated[str, choice(SCALES, "layout of scales")] = "fp32_row",
    reduce: Annotated[str, choice(REDUCES, "who adds a token's rows")] = "receiver",
    combine_dtype: CombineDtype = None,
    num_sms: NumSms = None,
    ranks: Ranks = 0,
    device: Device = "auto",
    pdl: Pdl = True,
    iters: Iters = 0,
    graph: Graph = True,
    seed: Seed = 0,
    quiet: Quiet = False,
    json: Json = None,
    plot: Plot = None,
    trace: Trace = None,
) -> None:
    """Time the low-latency all-to-all, after checking every bit."""
    args = locals()
    quantized = None if quantize == "none" else quantize
    options = _select(args, "routing", "scale", "reduce")
    _run(lowlatency.LowCase(**_pair_options(args), **options, quantize=quantized), args)


@bench.command("allreduce")
def bench_allreduce(
    *,
    tokens: Tokens = "1,8,64",
    hidden: Annotated[int, typer.Option(help="elements of a row")] = 7168,
    dtype: Dtype = "bf16",
    backend: Annotated[str, choice(allreduce.BACKENDS, "backends", several=True)] = "auto",
    epilogue: Annotated[str, choice(tuple(allreduce.EPILOGUES), "what follows the sum")] = "norm",
    peers: Peers = False,
    ranks: Ranks = 0,
    device: Device = "auto",
    pdl: Pdl = True,
    iters: Iters = 0,
    graph: Graph = True,
    seed: Seed = 0,
    quiet: Quiet = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Time the fused all-reduce, after checking every bit."""
    args = locals()
    options = _select(args, "hidden", "dtype", "epilogue")
    case = allreduce.ReduceCase(**_case_options(args), **options, backends=words(backend))
    _run(case, args, baselines.REDUCES if peers else ())


@bench.command("layer")
def bench_layer(
    *,
    tokens: Tokens = "8,64,128",
    model: Annotated[str, choice(layer.LAYER_MODELS, "scaled down on CPU ranks")] = "deepseek-v3",
    dtype: Annotated[str, choice(layer.WEIGHT_DTYPES, "of the experts' weights")] = "bf16",
    overlap: Annotated[str, choice(OVERLAPS, "default: all", several=True)] = "",
    mode: Annotated[str, choice(MODES, "rank-major or expert-major rows")] = "throughput",
    routing: Annotated[str, typer.Option(help="uniform, zipf or zipf:EXPONENT")] = "uniform",
    experts: Experts = None,
    shared: Annotated[bool, typer.Option(help="with the model's shared expert")] = True,
    gemm: Annotated[str, choice(GEMMS, "how the experts multiply")] = "auto",
    quantize: Quantize = None,
    combine_dtype: CombineDtype = None,
    num_sms: NumSms = None,
    ranks: Ranks = 0,
    device: Device = "auto",
    pdl: Pdl = True,
    iters: Iters = 0,
    graph: Graph = True,
    seed: Seed = 0,
    quiet: Quiet = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Time whole MoE layers, from router logits to output, after checking them."""
    args = locals()
    names = ("model", "dtype", "mode", "routing", "experts", "shared", "gemm", "quantize")
    options = _select(args, *names, "combine_dtype", "num_sms")
    _run(layer.LayerCase(**_case_options(args), **options, overlaps=words(overlap)), args)


@bench.callback(invoke_without_command=True)
def bench_default(context: typer.Context) -> None:
    """Run `moe` with its defaults when no benchmark is named."""
    if context.invoked_subcommand is None:
        bench_moe()


def _select(args: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: args[name] for name in names}


def _case_options(args: dict[str, Any]) -> dict[str, Any]:
    """Return the options of every case."""
    device = chosen_device(args["device"])
    return {
        "ranks": args["ranks"] or (torch.cuda.device_count() if device == "cuda" else 4),
        "device": device,
        "tokens": parse_sizes(args["tokens"]),
        "samples": args["iters"] or (15 if device == "cuda" else 20),
        "programmatic_launch": args["pdl"],
        **_select(args, "graph", "seed"),
    }


def _pair_options(args: dict[str, Any]) -> dict[str, Any]:
    """Return the options of both all-to-alls; sizes default to the model's."""
    config = MODELS[args["model"]]
    sizes = {"hidden": config.hidden, "top_k": config.routing.top_k}
    sizes["experts"] = config.routing.num_experts
    sizes = {name: size if args[name] is None else args[name] for name, size in sizes.items()}
    names = ("model", "dtype", "combine_dtype", "num_sms")
    return {**_case_options(args), **sizes, **_select(args, *names)}


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes named by `"1,8,64"`, by `"1..4096"` (doubling), or by a mix of both.

    Raises InvalidArgument for anything else.
    """
    sizes: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part)
        if match is None:
            raise InvalidArgument(f"{part!r} is not a size; write 1,8,64 or 1..4096")
        size, last = int(match[1]), int(match[2] or match[1])
        if match[2] and (size < 1 or last < size):
            raise InvalidArgument(f"{part!r} is empty; write e.g. 1..4096")
        sizes.append(size)
        while match[2] and (size := 2 * size) <= last:
            sizes.append(size)
    return tuple(dict.fromkeys(sizes))


def _run(case: Case, args: dict[str, Any], libraries: Sequence[baselines.Baseline] = ()) -> None:
    """Run a case, and print and write its report. Samples are written first, so none are lost."""
    json, picture, timeline = args["json"], args["plot"], args.get("trace")
    _check_outputs(json, picture, timeline)
    report = run(case, quiet=args["quiet"])
    _exit_on(report.problem)
    if json and json != STDOUT:
        write_json(json, as_json(report))
    runs = baselines.measure_baselines(case, libraries)
    if json and (runs or json == STDOUT):
        write_json(json, as_json(report, runs))
    print_report(wide_console(stderr=json == STDOUT), report, runs)
    if picture:
        plot(picture, rows_of(report, runs), case.title(), report.machine)
    if timeline:
        assert isinstance(case, moe.MoECase | lowlatency.LowCase)
        _exit_on(trace(timeline, case))


def _check_outputs(json: Path | None, picture: Path | None, timeline: Path | None) -> None:
    """Raise InvalidArgument before the run if an output cannot be written."""
    for path in (json, picture, timeline):
        if path is None or path == STDOUT:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                path.open("ab").close()
            else:
                tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise InvalidArgument(f"cannot write {path}: {error}") from error
    if STDOUT in (picture, timeline):
        raise InvalidArgument("only --json writes to stdout: name a file for --plot and --trace")
    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidArgument(
            f"--plot is {picture}; its suffix chooses the format: .png, .svg, .pdf"
        )
    if picture is not None:
        matplotlib_pyplot()


def _exit_on(problem: str | None) -> None:
    """Exit with code 1 after printing a failed check's problem, if any."""
    if problem is not None:
        Console(stderr=True).print(Text(f"check failed, nothing timed: {problem}", "red"))
        raise typer.Exit(1)
