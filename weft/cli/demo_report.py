"""What `weft demo` shows while it runs, prints and draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weft.cli.demo import Listener, Verdict
from weft.cli.eval import Plan, print_rows

SHADES = ("grey11", "#3b1d0f", "#6b2f12", "#9a4015", "#c2541b", "#ea7a3b")


def print_title(console: Console, plan: Plan) -> None:
    """Say what is about to run."""
    console.print(
        f"[bold]weft demo[/]  A trained mixture of experts, spread over {plan.ranks} ranks "
        f"({plan.device}).\nEach rank answers a question by experts of all ranks; weft carries the "
        "tokens:\n",
        highlight=False,
    )


class Scene:
    """The ranks' answers as they come, and what is being done; drawn when something is heard.

    A thread that redrew by itself would take a core from the ranks.
    """

    def __init__(self, plan: Plan) -> None:
        self._asked = [question.question for question in plan.asked[: plan.ranks]]
        self._texts = [""] * plan.ranks
        self._running = True
        self._count, self._carrier, self._asked_all = len(plan.asked), "", False

    def hear(self, told: dict[str, Any]) -> None:
        """Take in what a rank told."""
        if "text" in told:
            self._texts[told["rank"]] = told["text"].strip()
        elif told["rank"] == 0 and "loading" in told:
            self._carrier = told["loading"] or "one process"
        elif told["rank"] == 0 and "asked" in told:
            self._asked_all = True

    def draw(self) -> Group:
        """All lines."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for rank, (question, text) in enumerate(zip(self._asked, self._texts, strict=True)):
            table.add_row(Text(f"rank {rank}", "dim"), question, Text(text, "bold"))
        if self._asked_all:
            status = f"\n{self._count} questions: {self._carrier}"
        else:
            status = "" if any(self._texts) else "\nstarting the ranks"
        return Group(table, Text(status, "dim")) if self._running else Group(table)

    def finish(self) -> None:
        """Nothing more is done."""
        self._running = False


@contextmanager
def shown(console: Console, plan: Plan) -> Iterator[Listener]:
    """Yield what hears the ranks, and draws."""
    scene = Scene(plan)
    with Live(scene.draw(), console=console, auto_refresh=False) as live:

        def hear(told: dict[str, Any]) -> None:
            scene.hear(told)
            live.update(scene.draw(), refresh=console.is_terminal)

        yield hear
        scene.finish()
        live.update(scene.draw(), refresh=True)
    if not console.is_terminal:
        console.print()  # a terminal's live display ends its last line by itself


def print_verdict(console: Console, verdict: Verdict) -> None:
    """Print who sent what to whom, the table, and how the texts compare."""
    console.print("\nToken rows that this took, from rank (down) to rank (across), in all layers;")
    console.print("each is sent once, however many experts it meets there:\n")
    console.print(_heat(verdict.rows))
    asked = f"{verdict.table[0].questions} questions that training never saw"
    console.print(f"\n{asked}, three examples before each:", highlight=False)
    print_rows(console, verdict.table)
    console.print(_sentence(verdict))


def _sentence(verdict: Verdict) -> Text:
    wrong = [row.exchange for row in verdict.table if row.equal < row.questions]
    texts = f"texts DIFFER: {', '.join(wrong)}" if wrong else "all texts equal, letter by letter"
    return Text.assemble(
        ("right  " if verdict.right else "WRONG  ", "bold green" if verdict.right else "bold red"),
        f"{texts}, whoever carried the tokens" if verdict.right else texts,
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

    draw_exchange(
        path,
        verdict.rows,
        tokens=verdict.tokens,
        row_bytes=verdict.row_bytes,
        title=f"{len(verdict.rows)} ranks, a question each: token rows of all layers",
    )
