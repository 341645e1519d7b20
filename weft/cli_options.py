"""What several commands ask for and do: device, samples, console, the way out."""

from __future__ import annotations

import torch
import typer
from rich.console import Console
from rich.text import Text

from weft.errors import InvalidArgument

DEVICE = "cpu, cuda or auto: cuda where there are GPUs"
PDL = "programmatic dependent launch of the one-sided kernels"
ITERS = "samples; 0: 15 replays of a graph, which takes 11 at least, or 20 calls on CPU"


def everyone(ranks: int, device: str) -> int:
    """Ranks to start: those asked for, else every GPU, or 4 on the CPU."""
    return ranks or (torch.cuda.device_count() if device == "cuda" else 4)


def stop_at(problem: str | None) -> None:
    """Say what a check found wrong, if anything, and leave with exit code 1."""
    if problem is not None:
        Console(stderr=True).print(Text(f"check failed, nothing timed: {problem}", "red"))
        raise typer.Exit(1)


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
        raise InvalidArgument(f"device is {device!r}; choose {DEVICE}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(
            f"device is 'cuda', and torch {torch.__version__} sees no GPU; "
            "use --device cpu, or run `weft doctor`"
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def chosen_samples(iters: int, device: str, *, graph: bool) -> int:
    """Return how many samples to take.

    Raises InvalidArgument for fewer than 11 replays of a graph: their median would say little.
    """
    if iters == 0:
        return 15 if device == "cuda" else 20
    if device == "cuda" and graph and iters < 11:
        raise InvalidArgument(f"{iters} replays of the graph; at least 11 are needed for a median")
    return iters
