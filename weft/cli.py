"""The command `weft`: bench, doctor, demo, cache."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft import __version__
from weft.bench.cases import (
    BACKENDS,
    CASES,
    DTYPES,
    PAYLOADS,
    ROUTERS,
    Settings,
    parse_backends,
    parse_tokens,
)
from weft.errors import InvalidArgument, RankFailed, WeftError

app = typer.Typer(
    help="One-sided NVLink communication for MoE inference, and the same on CPU ranks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Check, then time, weft's operations; without a name, moe.")
cache = typer.Typer(help="The disk cache of compiled kernels.", no_args_is_help=True)
app.add_typer(bench, name="bench")
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


_DEVICE = "cpu, cuda or auto: cuda where there are GPUs"
_CASE = f"sizes of a model: {', '.join(CASES)}; options given beside it win"
_TOKENS = "tokens per rank: 1,8,64 or 1..4096 (doubling)"
_ROUTER = f"{', '.join(ROUTERS)}, or a .npy / .json file of ids [rows, top_k]"
_PAYLOAD = f"{', '.join(PAYLOADS)}: bf16 sends rows of --dtype; fp8 sends float8 rows + scales"


@bench.command("moe")
def bench_moe(
    ranks: Annotated[int, typer.Option(help="ranks; 0: every GPU, or 4 on the CPU")] = 0,
    device: Annotated[str, typer.Option(help=_DEVICE)] = "auto",
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
    graph: Annotated[bool, typer.Option("--graph/--eager", help="CUDA graphs or calls")] = True,
    iters: Annotated[int, typer.Option(help="samples; 0: 15 replays, or 20 calls on CPU")] = 0,
    seed: Annotated[int, typer.Option(help="of inputs and routing")] = 0,
    json: Annotated[Path | None, typer.Option(help="write all samples here")] = None,
    plot: Annotated[Path | None, typer.Option(help="write a picture here (.png, .svg)")] = None,
    trtllm_json: Annotated[
        Path | None, typer.Option(help="write TensorRT-LLM's bench_moe_comm schema here")
    ] = None,
    peers: Annotated[Path | None, typer.Option(help="recorded figures to show beside")] = None,
    quiet: Annotated[bool, typer.Option(help="no progress bar")] = False,
) -> None:
    """Time dispatch and combine of an MoE layer, after checking every byte of them."""
    from weft.bench import report
    from weft.bench.moe import run
    from weft.bench.peers import matching_peers
    from weft.bench.plot import plot as draw

    where = chosen_device(device)
    sizes = CASES[checked_case(case) or "deepseek-v3"]
    settings = Settings(
        ranks=ranks or (torch.cuda.device_count() if where == "cuda" else 4),
        device=where,
        tokens=parse_tokens(tokens),
        max_tokens=max_tokens,
        hidden=sizes.hidden if hidden is None else hidden,
        top_k=sizes.top_k if top_k is None else top_k,
        experts=sizes.experts if experts is None else experts,
        router=router,
        backends=parse_backends(backend),
        dtype=dtype,
        payload=payload,
        graph=graph,
        samples=chosen_samples(iters, where, graph=graph),
        seed=seed,
        case=case,
    )
    rivals = matching_peers(settings, peers)
    found = run(settings, quiet=quiet)
    _stop_at(found.problem)
    report.print_report(wide_console(), found, rivals)
    if json:
        report.write_json(json, found, rivals)
    if trtllm_json:
        report.write_trtllm_json(trtllm_json, found)
    if plot:
        draw(plot, found, rivals)


def _stop_at(problem: str | None) -> None:
    if problem is not None:
        Console(stderr=True).print(Text(f"check failed, nothing timed: {problem}", "red"))
        raise typer.Exit(1)


@bench.callback(invoke_without_command=True)
def bench_default(context: typer.Context) -> None:
    """Run `moe` with its defaults when no benchmark is named."""
    if context.invoked_subcommand is None:
        bench_moe()


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
) -> None:
    """Say whether this machine has what weft needs, and what to do where it has not."""
    from weft.doctor import examine, print_findings, to_json

    findings = examine()
    if json:
        print(to_json(findings))
    else:
        print_findings(wide_console(), findings)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="ranks, 2..16")] = 4,
    device: Annotated[str, typer.Option(help=_DEVICE)] = "auto",
    tokens: Annotated[int, typer.Option(help="tokens of the fullest rank")] = 48,
    picture: Annotated[Path | None, typer.Option(help="write who sent what (.png)")] = None,
) -> None:
    """Run an expert-parallel MoE layer and compare it with one process."""
    from weft.demo import Plan, print_verdict, run, save_picture

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


def wide_console() -> Console:
    """A console for tables: as wide as the terminal, and wide enough where there is none."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)
    return console


def chosen_device(device: str) -> str:
    """Return "cpu" or "cuda".

    Raises InvalidArgument for another name, or for cuda where torch sees no GPU.
    """
    if device not in ("cpu", "cuda", "auto"):
        raise InvalidArgument(f"device is {device!r}; choose {_DEVICE}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(
            f"device is 'cuda', and torch {torch.__version__} sees no GPU; "
            "use --device cpu, or run `weft doctor`"
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def checked_case(case: str | None) -> str | None:
    """Return the name of a case, or None.

    Raises InvalidArgument for an unknown one.
    """
    if case is not None and case not in CASES:
        raise InvalidArgument(f"case is {case!r}; choose one of {', '.join(CASES)}")
    return case


def chosen_samples(iters: int, device: str, *, graph: bool) -> int:
    """Return how many samples to take.

    Raises InvalidArgument for fewer than 11 replays of a graph: their median would say little.
    """
    if iters == 0:
        return 15 if device == "cuda" else 20
    if device == "cuda" and graph and iters < 11:
        raise InvalidArgument(f"{iters} replays of the graph; at least 11 are needed for a median")
    return iters


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"
