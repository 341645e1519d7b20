"""A line that says what a run is doing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Any]:
    """Yield a function that names the next step. It draws only then: a thread that redraws while
    CPU ranks are timed would take a core from one of them."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=quiet
    ) as bar:
        task = bar.add_task("starting", total=total)
        started = False

        def step(name: str) -> None:
            nonlocal started
            bar.update(task, description=name, advance=1 if started else 0)
            bar.refresh()
            started = True

        yield step
