"""What several commands ask for: choices, device, ranks, consoles, and files to write."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from weft.errors import InvalidArgument

STDOUT = Path("-")
PICTURES = (".png", ".svg", ".pdf")
DEVICES = ("auto", "cpu", "cuda")


def choice(allowed: Sequence[str], text: str, *, several: bool = False, free: bool = False) -> Any:
    """An option whose words are known: completed, named in its help, refused with exit code 2.

    several: with commas between them.  free: also other texts, which the command itself checks.
    """

    def check(value: str | None) -> str | None:
        for word in words(value or "") if several else [value]:
            if value is not None and not free and word not in allowed:
                some = "some" if several else "one"
                raise typer.BadParameter(f"{word!r}: choose {some} of {', '.join(allowed)}")
        return value

    def complete(incomplete: str) -> list[str]:
        done, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        return [f"{done}{comma}{word}" for word in allowed if word.startswith(last)]

    return typer.Option(
        callback=check, autocompletion=complete, help=text.format(", ".join(allowed))
    )


def words(text: str) -> tuple[str, ...]:
    """The words between commas, each once."""
    return tuple(dict.fromkeys(word for word in text.replace(" ", "").split(",") if word))


def chosen_device(device: str) -> str:
    """Return "cpu" or "cuda".

    Raises InvalidArgument for another name, or for cuda where torch sees no GPU.
    """
    if device not in DEVICES:
        raise InvalidArgument(f"device is {device!r}; choose one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(
            f"device is 'cuda', and torch {torch.__version__} sees no GPU; "
            "use --device cpu, or run `weft doctor`"
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write, None for none; json may be `-`, for stdout."""

    json: Path | None = None
    plot: Path | None = None
    trace: Path | None = None

    def check(self) -> None:
        """Refuse now what would be lost after the run. Raises InvalidArgument."""
        for path in (self.json, self.plot, self.trace):
            if path is not None and path != STDOUT:
                check_writable(path)
        for name in ("plot", "trace"):
            if getattr(self, name) == STDOUT:
                raise InvalidArgument(f"--{name} is '-'; only --json writes to stdout: name a file")
        if self.plot is not None and self.plot.suffix not in PICTURES:
            raise InvalidArgument(
                f"--plot is {self.plot}; its suffix chooses the format: {', '.join(PICTURES)}"
            )
        if self.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise InvalidArgument(
                "--plot needs matplotlib, which is not installed: pip install 'weft[plot]'"
            )

    @property
    def console(self) -> Console:
        """Where tables go: stdout, unless JSON does."""
        return wide_console(stderr=self.json == STDOUT)


def check_writable(path: Path) -> None:
    """Raises InvalidArgument where a file cannot be written; leaves nothing behind."""
    above = path.parent
    while not above.exists():
        above = above.parent
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error}") from error


def wide_console(*, stderr: bool = False) -> Console:
    """A console for tables: as wide as the terminal, and wide enough where there is none."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    return console


def stop_at(problem: str | None) -> None:
    """Say what a check found wrong, if anything, and leave with exit code 1."""
    if problem is not None:
        Console(stderr=True).print(Text(f"check failed, nothing timed: {problem}", "red"))
        raise typer.Exit(1)
