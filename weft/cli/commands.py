"""The command `weft`: bench, tune, doctor, demo, cache.

Commands import what they need when they run: help and completion are to be quick.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft.errors import InvalidArgument, RankFailed, WeftError


class _Commands(TyperGroup):
    """Replaces bench and tune by what `weft.cli.bench` has of them when one is run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name in ("bench", "tune"):
            from weft.cli import bench as cli_bench

            command = typer.main.get_command(getattr(cli_bench, name))
        return name, command, rest


app = typer.Typer(
    cls=_Commands,
    help="One-sided NVLink communication for MoE inference, and the same on CPU ranks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
cache = typer.Typer(help="The disk cache of compiled kernels.", no_args_is_help=True)
app.add_typer(cache, name="cache")


def main() -> None:
    """Run the command line; a WeftError becomes its text in red.

    Exit codes: 2 for what was asked for wrongly, before any rank was started; 1 for all else.
    """
    try:
        app(prog_name="weft")
    except WeftError as error:
        from rich.console import Console
        from rich.text import Text

        # What a rank refused says more than that the rank failed, and needs no traceback.
        cause = error.__cause__ if isinstance(error, RankFailed) else None
        told = cause if isinstance(cause, WeftError) else error
        Console(stderr=True).print(Text(f"{type(told).__name__}: {told}", style="red"))
        sys.exit(2 if isinstance(error, InvalidArgument) else 1)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.")
    ] = False,
) -> None:
    """`weft --version`, which `weft.__main__` answers sooner where nothing stands beside it."""
    if version:
        from weft.cli.version import version_text

        print(version_text())
        raise typer.Exit


@app.command("bench")
def bench() -> None:
    """Check, then time, weft's operations; or compare two recorded runs."""


@app.command("tune")
def tune() -> None:
    """Measure this machine, so that weft chooses right on it."""


_REPORT = "write what a bug report needs here (- for stdout, .json for JSON); it names nobody"


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    report: Annotated[str | None, typer.Option(help=_REPORT)] = None,
) -> None:
    """Say whether this machine has what weft needs, and what to do where it has not."""
    from weft.cli.doctor import examine, print_findings, to_json
    from weft.cli.options import wide_console

    findings = examine()
    if report is not None:
        from weft.cli.doctor_report import write

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
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    tokens: Annotated[int, typer.Option(help="tokens of the fullest rank")] = 48,
    plot: Annotated[Path | None, typer.Option(help="write who sent what (.png, .svg)")] = None,
) -> None:
    """Run an expert-parallel MoE layer and compare it with one process."""
    from weft.cli.demo import run
    from weft.cli.demo_ranks import Plan
    from weft.cli.demo_report import print_verdict, save_picture
    from weft.cli.options import Outputs, chosen_device, wide_console

    plan, where = Plan.of(ranks, tokens), chosen_device(device)
    Outputs(plot=plot).check()
    verdict = run(plan, where)
    print_verdict(wide_console(), verdict)
    if plot:
        save_picture(plot, verdict)
    if not verdict.right:
        raise typer.Exit(1)


@cache.command("list")
def cache_list() -> None:
    """Show what was compiled, newest last."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

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
    from rich.console import Console

    from weft.jit.cache import Cache

    store = Cache()
    Console().print(f"removed {_entries(store.clear())} from {store.path}")


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"
