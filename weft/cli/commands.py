# SPDX-License-Identifier: Apache-2.0
"""The command `weft`: bench, doctor, demo, top, cache.

Commands import their modules when they run, so that help and completion are quick.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import weft
from weft.errors import InvalidArgument, RankFailed, TorchTooOld, WeftError


class _Commands(TyperGroup):
    """Imports the commands of `weft.cli.bench` only when `weft bench` runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name in ("bench", "cache", "demo", "top"):
            from weft.cli.findings import require_torch

            require_torch()
        if name == "bench":
            from weft.cli import bench as cli_bench

            command = typer.main.get_command(cli_bench.bench)
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
    """Run the command line. A WeftError is printed in red, without a traceback.

    Exit codes: 2 for invalid arguments, which are detected before ranks start; 1 for other errors.
    """
    try:
        app(prog_name="weft")
    except WeftError as error:
        from rich.console import Console
        from rich.text import Text

        # The error that the rank raised is more specific than RankFailed.
        cause = error.__cause__ if isinstance(error, RankFailed) else None
        printed = cause if isinstance(cause, WeftError) else error
        Console(stderr=True).print(Text(f"{type(printed).__name__}: {printed}", style="red"))
        sys.exit(2 if isinstance(error, InvalidArgument) else 1)


@app.callback(invoke_without_command=True)
def handle_version(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Handle `weft --version`; `weft.__main__` handles it faster if it is the only argument."""
    if version:
        from weft.cli.version import format_versions

        print(format_versions())
        raise typer.Exit
    error = weft.startup_error
    if error is not None and not (
        isinstance(error, TorchTooOld) and ctx.invoked_subcommand == "doctor"
    ):
        raise error  # the doctor reports an old torch with its other findings


@app.command("bench")
def bench() -> None:
    """Check, then time, weft's operations."""


_REPORT = "write a bug report's contents here (- for stdout, .json for JSON), without private names"


@app.command("doctor")
def doctor_command(
    json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    report: Annotated[str | None, typer.Option(help=_REPORT)] = None,
) -> None:
    """Report whether this machine meets weft's requirements, and how to fix what it lacks."""
    from weft.cli.findings import (
        find_torch_error,
        print_findings,
        run_checks_without_torch,
        to_json,
    )
    from weft.cli.options import create_console
    from weft.cli.report import write_report

    torch_error, devices = find_torch_error(), "any ranks"
    if torch_error is not None:
        findings = run_checks_without_torch(torch_error)
    else:
        from weft.cli import doctor

        findings, devices = doctor.run_checks(), doctor.describe_devices()
    if report is not None:
        write_report(report, findings, as_json=json)
    elif json:
        print(to_json(findings))
    else:
        print_findings(create_console(), findings, devices)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command()
def demo(
    ranks: Annotated[
        int | None, typer.Option(help="2 or 4; default: 4, or fewer with fewer GPUs")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    kill: Annotated[int | None, typer.Option(help="a rank to kill while the model writes")] = None,
    hosts: Annotated[int, typer.Option(help="split ranks into this many hosts")] = 1,
) -> None:
    """Run a trained mixture of experts on several ranks, and compare with one process."""
    from weft.arguments import check_int
    from weft.cli import demo as cli_demo
    from weft.cli import demo_kill
    from weft.cli.options import create_console

    count, device = cli_demo.select_ranks(ranks, device)
    cli_demo.check_hosts(hosts, count, kill=kill is not None)
    console = create_console()
    hosts_text = f" of {hosts} hosts" if hosts > 1 else ""
    title = f"A trained mixture of experts on {count} ranks{hosts_text} ({device})."
    console.print(f"[bold]weft demo[/]  {title}", highlight=False)
    if hosts > 1:
        links = "share its loopback"
        if cli_demo.uses_namespaces(hosts, device):
            links = "each have a network namespace, connected by veth"
        console.print(f"All hosts are on this machine and {links}.", highlight=False)
    if kill is None:
        is_identical = cli_demo.print_result(console, cli_demo.run(count, device, hosts=hosts))
    else:
        victim = check_int("kill", kill, 0, count - 1)
        is_identical = demo_kill.print_result(console, demo_kill.run(count, device, victim), victim)
    if not is_identical:
        raise typer.Exit(1)


@app.command()
def top(
    interval: Annotated[float, typer.Option(help="seconds between two readings")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print the totals once")] = False,
    json: Annotated[bool, typer.Option("--json", help="print all counters once")] = False,
) -> None:
    """Show for which rank each rank of your jobs on this machine waits."""
    from weft.arguments import check_seconds
    from weft.cli import top as cli_top
    from weft.cli.options import create_console

    seconds = check_seconds("interval", interval)
    if json:
        print(cli_top.read_json())
    elif once:
        cli_top.print_totals(create_console())
    else:
        cli_top.show(create_console(), seconds)


@cache.command("list")
def cache_list() -> None:
    """List compiled code, newest last."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from weft.jit.cache import Cache

    store = Cache()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("name", "kind", "arch", "KiB", "created", "key"):
        table.add_column(name, justify="right" if name == "KiB" else "left")
    entries = store.entries()
    for entry in entries:
        created, size = _format_time(entry.created), f"{entry.bytes / 1024:.1f}"
        table.add_row(entry.name, entry.kind, entry.arch, size, created, entry.key[:12])
    console = Console()
    if entries:
        console.print(table)
    total = sum(entry.bytes for entry in entries) / 1024
    console.print(f"{_format_entries(len(entries))}, {total:.1f} KiB in {store.path}")


@cache.command("clear")
def cache_clear() -> None:
    """Remove all entries."""
    from rich.console import Console

    from weft.jit.cache import Cache

    store = Cache()
    Console().print(f"removed {_format_entries(store.clear())} from {store.path}")


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _format_entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"
