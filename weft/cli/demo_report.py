"""What `weft demo` prints and draws of its verdict."""

from __future__ import annotations

from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.demo import Verdict
from weft.cli.demo_ranks import DTYPE, ROUNDS

SHADES = ("grey11", "#3b1d0f", "#6b2f12", "#9a4015", "#c2541b", "#ea7a3b")


def print_verdict(console: Console, verdict: Verdict) -> None:
    """Print the sizes, who sent what to whom, the times, and how the result compares."""
    plan = verdict.plan
    console.print(
        f"[bold]weft demo[/]  one MoE layer on {plan.ranks} ranks ({verdict.device}): "
        f"{sum(plan.tokens)} tokens of hidden {plan.hidden}, top {plan.top_k} of {plan.experts} "
        "experts + 1 shared, bf16\n"
    )
    console.print("Token rows from rank (down) to rank (across), each sent once however many")
    console.print("experts it meets there:\n")
    console.print(_heat(verdict.rows))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ("rank", "tokens", "KiB out", "KiB in", "dispatch us", "experts us", "combine us")
    for name in columns:
        table.add_column(name, justify="right")
    kib = plan.hidden * DTYPE.itemsize / 1024
    remote = verdict.rows.clone().fill_diagonal_(0)
    for rank, times in enumerate(verdict.us):
        sent, came = int(remote[rank].sum()) * kib, int(remote[:, rank].sum()) * kib
        cells = (f"{sent:.0f}", f"{came:.0f}", *(f"{us:.0f}" for us in times))
        table.add_row(str(rank), str(plan.tokens[rank]), *cells)
    console.print(table)
    console.print("The whole layer, weft.MoE, by its options overlap and exchange:\n")
    console.print(_modes(verdict))
    console.print(
        Text(f"Median of {ROUNDS} eager rounds, host clock, waiting for peers included.\n", "dim")
    )
    console.print(_sentence(verdict))


def _modes(verdict: Verdict) -> Table:
    """One row for each way to run the layer."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("layer", "call us", "bits", "max abs error\nto one process", "of values\nup to"):
        table.add_column(name, justify="left" if name in ("layer", "bits") else "right")
    for name, mode in verdict.modes.items():
        same = "equal to" if mode.equal else "DIFFER from"
        bits = f"{same} {mode.bits_of}" if mode.bits_of else ""
        figures = (f"{mode.us:.0f}", bits, f"{mode.error:.2g}", f"{mode.largest:.2g}")
        table.add_row(name, *figures, style="" if mode.right else "bold red")
    return table


def _sentence(verdict: Verdict) -> Text:
    exchange = (
        "equal to weft.reference bit by bit" if verdict.exact else "DIFFERENT from the reference"
    )
    wrong = [name for name, mode in verdict.modes.items() if not mode.right]
    layers = f"layer WRONG: {', '.join(wrong)}" if wrong else "every layer within its bound"
    bits = "" if wrong else ", equal bits whatever overlaps"
    return Text.assemble(
        ("right  " if verdict.right else "WRONG  ", "bold green" if verdict.right else "bold red"),
        f"exchange {exchange}; {layers} of one process{bits}",
    )


def _heat(rows: torch.Tensor) -> Table:
    """The matrix as coloured cells; what stays on its rank is dim, for it crosses no wire."""
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1), show_header=True)
    table.add_column("", justify="right", style="dim")
    ranks = len(rows)
    for rank in range(ranks):
        table.add_column(Text(f"  {rank}   ", style="dim"), justify="center")
    most = max(int(rows.max()), 1)
    for source in range(ranks):
        cells: list[Text] = []
        for target in range(ranks):
            count = int(rows[source, target])
            shade = SHADES[-(-count * (len(SHADES) - 1) // most)]
            ink = "grey62" if source == target else "bold white"
            cells.append(Text(f" {count:4d} ", style=f"{ink} on {shade}"))
        table.add_row(f"rank {source}", *cells)
    return table


def save_picture(path: Path, verdict: Verdict) -> None:
    """Write who sent what to whom as an image.

    Raises InvalidArgument where matplotlib is missing or cannot write there.
    """
    from weft.bench.exchange_plot import draw_exchange

    plan = verdict.plan
    draw_exchange(
        path,
        verdict.rows,
        tokens=plan.tokens,
        row_bytes=plan.hidden * DTYPE.itemsize,
        title=f"One MoE layer on {plan.ranks} ranks: top {plan.top_k} of {plan.experts} experts",
    )
