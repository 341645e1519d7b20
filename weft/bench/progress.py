"""What a run is doing: a line that is drawn over on a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that names the next step, on stderr. It writes only then: a thread that
    redraws while CPU ranks are timed would take a core from one of them."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        count = 0

        def count_up(name: str) -> None:
            nonlocal count
            count += 1
            if not quiet:
                print(f"weft: {count} of {total}: {name}", file=sys.stderr, flush=True)

        yield count_up
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=total)
        started = False

        def step(name: str) -> None:
            nonlocal started
            bar.update(task, description=name, advance=1 if started else 0)
            bar.refresh()
            started = True

        yield step
