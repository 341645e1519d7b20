# SPDX-License-Identifier: Apache-2.0
"""Functions that several commands use for their options and output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console

from weft.errors import InvalidArgument

DEVICES = ("auto", "cpu", "cuda")


def choice_option(allowed: Sequence[str], text: str, *, several: bool = False) -> Any:
    """Create an option that accepts only `allowed` words, with completion and help.

    Another word ends the command with exit code 2. With `several`, words are separated by commas.
    """

    def check(value: str | None) -> str | None:
        for word in split_words(value or "") if several else [value]:
            if value is not None and word not in allowed:
                number = "some" if several else "one"
                raise typer.BadParameter(f"{word!r}: choose {number} of {', '.join(allowed)}")
        return value

    def complete(incomplete: str) -> list[str]:
        done, comma, last = incomplete.rpartition(",") if several else ("", "", incomplete)
        return [f"{done}{comma}{word}" for word in allowed if word.startswith(last)]

    kind = "some of, with commas" if several else "one of"
    text = f"{text} ({kind}: {', '.join(allowed)})"
    return typer.Option(callback=check, autocompletion=complete, help=text)


def split_words(text: str) -> tuple[str, ...]:
    """Split a text at commas, and remove duplicates."""
    return tuple(dict.fromkeys(word for word in text.replace(" ", "").split(",") if word))


def select_device(device: str) -> str:
    """Return "cpu" or "cuda" for the option --device.

    Raises InvalidArgument for another name, or for "cuda" if torch finds no GPU.
    """
    import torch  # not needed for help and the doctor

    if device not in DEVICES:
        raise InvalidArgument(f"device is {device!r}; choose one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(
            f"device is 'cuda', but torch {torch.__version__} finds no GPU; "
            "use --device cpu, or run `weft doctor`"
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def create_console(*, stderr: bool = False) -> Console:
    """Create a console for tables, at least 120 columns wide if it is not a terminal."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    return console
