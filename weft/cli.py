"""The command `weft`: bench, tune, doctor, demo, cache."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft import __version__
from weft.bench.cases import (
    ALL,
    BACKENDS,
    CASES,
    DTYPES,
    PAYLOADS,
    QUANTIZE,
    ROUTERS,
    WAYS,
    parse_backends,
    parse_tokens,
    plans_of,
)
from weft.cli_allreduce import bench_allreduce, tune_allreduce
from weft.cli_layer import bench_layer, tune_layer
from weft.cli_lowlatency import bench_lowlatency
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
from weft.errors import RankFailed, WeftError

app = typer.Typer(
    help="One-sided NVLink communication for MoE inference, and the same on CPU ranks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Check, then time, weft's operations; without a name, moe.")
cache = typer.Typer(help="The disk cache of compiled kernels.", no_args_is_help=True)
tuning = typer.Typer(
    help="Measure this machine, so that weft chooses right on it.", no_args_is_help=True
)
app.add_typer(bench, name="bench")
app.add_typer(tuning, name="tune")
bench.command("allreduce")(bench_allreduce)
bench.command("layer")(bench_layer)
bench.command("lowlatency")(bench_lowlatency)
tuning.command("allreduce")(tune_allreduce)
tuning.command("layer")(tune_layer)
app.add_typer(cache, name="cache")


def main() -> None:
    """Run the command line; a WeftError becomes its text in red and exit code 1."""
    try:
        app()
    except WeftError as error:
        # What a rank refused says more than that the rank failed, and needs no traceback.
        cause = error.__cause__ if isinstance(error, RankFailed) else None
        told = cause if isinstance(cause, WeftError) else error
        Console(stderr=True).print(Text(f"{type(told).__name__}: {told}", style="red"))
        sys.exit(1)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Answer `weft --version`."""
    if show:
        print(f"weft {__version__}, torch {torch.__version__}")
        raise typer.Exit


_CASE = f"sizes of a model: {', '.join(CASES)}, or {ALL} of them; options given beside it win"
_TOKENS = "tokens per rank: 1,8,64 or 1..4096 (doubling)"
_ROUTER = f"{', '.join(ROUTERS)}, or a .npy / .json file of ids [rows, top_k]"
_PAYLOAD = f"{', '.join(PAYLOADS)}: bf16 sends rows of --dtype; fp8 sends float8 rows + scales"
_PEERS = "also measure NCCL's collectives and the libraries that are installed"
_TRACE = "run the largest size once more, profiled; write its timeline here (Perfetto)"
_WAY = f"{', '.join(WAYS)}: how one-sided rows come home"
_QUANTIZE = f"{', '.join(QUANTIZE)}: the one-sided dispatch quantises rows of --dtype"
_HALVES = "also time dispatch_send, dispatch_recv, combine_send, combine_recv"
_BESIDE = "matmul or matmul:SIZE: also time the pair beside a matrix product (with --num-sms)"
_Path: TypeAlias = Path | None
_Options: TypeAlias = dict[str, Any]


@bench.command("moe")
def bench_moe(
    ranks: Annotated[int, typer.Option(help="ranks; 0: every GPU, or 4 on the CPU")] = 0,
    device: Annotated[str, typer.Option(help=DEVICE)] = "auto",
    case: Annotated[str | None, typer.Option(help=_CASE)] = None,
    tokens: Annotated[str, typer.Option(help=_TOKENS)] = "1,8,64",
    hidden: Annotated[int | None, typer.Option(help="elements of a row [7168]")] = None,
    top_k: Annotated[int | None, typer.Option(help="experts per token [8]")] = None,
    experts: Annotated[int | None, typer.Option(help="experts on all ranks [256]")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="capacity of the workspace")] = None,
    router: Annotated[str, typer.Option(help=_ROUTER)] = "random",
    backend: Annotated[str, typer.Option(help=", ".join(BACKENDS))] = "onesided",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bf16",
    payload: Annotated[str, typer.Option(help=_PAYLOAD)] = "bf16",
    combine_by: Annotated[str, typer.Option(help=_WAY)] = "pull",
    quantize: Annotated[str | None, typer.Option(help=_QUANTIZE)] = None,
    halves: Annotated[bool, typer.Option("--halves", help=_HALVES)] = False,
    graph: Annotated[bool, typer.Option("--graph/--eager", help="CUDA graphs or calls")] = True,
    cold: Annotated[bool, typer.Option(help="also time calls after a flush of the L2")] = False,
    num_sms: Annotated[int | None, typer.Option(help="SMs of the one-sided kernels")] = None,
    beside: Annotated[str | None, typer.Option(help=_BESIDE)] = None,
    pdl: Annotated[bool, typer.Option("--pdl/--no-pdl", help=PDL)] = True,
    iters: Annotated[int, typer.Option(help=ITERS)] = 0,
    seed: Annotated[int, typer.Option(help="of inputs and routing")] = 0,
    peers: Annotated[bool, typer.Option("--peers", help=_PEERS)] = False,
    recorded: Annotated[_Path, typer.Option(help="recorded figures to show beside")] = None,
    json: Annotated[_Path, typer.Option(help="write all samples here")] = None,
    plot: Annotated[_Path, typer.Option(help="write a picture here (.png, .svg)")] = None,
    trtllm_json: Annotated[_Path, typer.Option(help="write bench_moe_comm's schema here")] = None,
    trace: Annotated[_Path, typer.Option(help=_TRACE)] = None,
    quiet: Annotated[bool, typer.Option(help="no progress bar")] = False,
) -> None:
    """Time dispatch and combine of an MoE layer, after checking every byte of them."""
    from weft.bench.session import Outputs, run_cases

    where = chosen_device(device)
    backends = parse_backends(f"{backend},collective" if peers else backend)
    samples = chosen_samples(iters, where, graph=graph)
    sizes: _Options = dict(hidden=hidden, top_k=top_k, experts=experts, max_tokens=max_tokens)
    rows: _Options = dict(dtype=dtype, payload=payload, combine_by=combine_by, quantize=quantize)
    timing: _Options = dict(graph=graph, samples=samples, cold=cold, halves=halves, beside=beside)
    kernels: _Options = dict(backends=backends, num_sms=num_sms, programmatic_launch=pdl)
    routing: _Options = dict(tokens=parse_tokens(tokens), router=router, seed=seed)
    place: _Options = dict(ranks=everyone(ranks, where), device=where)
    plans = plans_of(case, **sizes, **rows, **timing, **kernels, **routing, **place)
    outputs = Outputs(json, plot, trtllm_json, recorded, trace)
    stop_at(run_cases(wide_console(), plans, outputs, peers=peers, quiet=quiet))


@bench.callback(invoke_without_command=True)
def bench_default(context: typer.Context) -> None:
    """Run `moe` with its defaults when no benchmark is named."""
    if context.invoked_subcommand is None:
        bench_moe()


_REPORT = "write what a bug report needs here (- for stdout, .json for JSON); it names nobody"


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    report: Annotated[str | None, typer.Option(help=_REPORT)] = None,
) -> None:
    """Say whether this machine has what weft needs, and what to do where it has not."""
    from weft.doctor import examine, print_findings, to_json

    findings = examine()
    if report is not None:
        from weft.doctor_report import write

        write(report, findings, as_json=json)
    elif json:
        print(to_json(findings))
    else:
        print_findings(wide_console(), findings)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="ranks, 2..16")] = 4,
    device: Annotated[str, typer.Option(help=DEVICE)] = "auto",
    tokens: Annotated[int, typer.Option(help="tokens of the fullest rank")] = 48,
    picture: Annotated[Path | None, typer.Option(help="write who sent what (.png)")] = None,
) -> None:
    """Run an expert-parallel MoE layer and compare it with one process."""
    from weft.demo import run
    from weft.demo_ranks import Plan
    from weft.demo_report import print_verdict, save_picture

    verdict = run(Plan.of(ranks, tokens), chosen_device(device))
    print_verdict(wide_console(), verdict)
    if picture:
        save_picture(picture, verdict)
    if not verdict.right:
        raise typer.Exit(1)


@cache.command("list")
def cache_list() -> None:
    """Show what was compiled, newest last."""
    from weft.jit.cache import Cache

    store = Cache()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("name", "kind", "arch", "KiB", "made", "last used", "key"):
        table.add_column(name, justify="right" if name == "KiB" else "left")
    entries = store.entries()
    for entry in entries:
        times = (_clock(entry.created), _clock(entry.last_used))
        size = f"{entry.bytes / 1024:.1f}"
        table.add_row(entry.name, entry.kind, entry.arch, size, *times, entry.key[:12])
    console = Console()
    if entries:
        console.print(table)
    total = sum(entry.bytes for entry in entries) / 1024
    console.print(f"{_entries(len(entries))}, {total:.1f} KiB in {store.path}")


@cache.command("clear")
def cache_clear() -> None:
    """Remove every entry that nobody is building."""
    from weft.jit.cache import Cache

    store = Cache()
    Console().print(f"removed {_entries(store.clear())} from {store.path}")


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"
