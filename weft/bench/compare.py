"""`weft bench compare`: two recorded runs side by side, and whether the second is slower."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from weft.bench.report import Row, read_rows, us_text
from weft.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Pair:
    """One variant at one size in both runs, medians of the whole in us."""

    variant: str
    tokens: int
    first: float
    second: float

    @property
    def ratio(self) -> float:
        """The second over the first."""
        return self.second / self.first


def compare(first: Path, second: Path) -> list[Pair]:
    """What both runs measured. Raises InvalidArgument where that is nothing, or no run."""
    ours, theirs = _wholes(first), _wholes(second)
    both = [Pair(*key, ours[key], theirs[key]) for key in ours if key in theirs]
    if not both:
        raise InvalidArgument(
            f"{first} and {second} have no variant and size in common: {_some(ours)}, and "
            f"{_some(theirs)}"
        )
    return both


def print_pairs(console: Console, pairs: list[Pair], limit: float | None) -> bool:
    """Print the table; return whether a ratio is above the limit, in percent."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("variant", "tokens", "first us", "second us", "second / first"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    over = [pair for pair in pairs if limit is not None and pair.ratio > 1 + limit / 100]
    for pair in pairs:
        texts = (pair.variant, str(pair.tokens), us_text(pair.first), us_text(pair.second))
        table.add_row(*texts, f"{pair.ratio:.3f}", style="red" if pair in over else "")
    console.print(table)
    for pair in over:
        console.print(
            f"{pair.variant}, {pair.tokens} tokens: {100 * (pair.ratio - 1):.1f} % slower, "
            f"the limit is {limit:g} %",
            style="red",
        )
    return bool(over)


def _wholes(path: Path) -> dict[tuple[str, int], float]:
    try:
        rows = read_rows(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: {error}") from error
    found: dict[tuple[str, int], Row] = {}
    for row in rows:
        if row.phase in ("pair", "call"):
            key = (row.variant, row.tokens)
            if key in found:
                raise InvalidArgument(f"{path} holds several runs with {key[0]}, {key[1]} tokens")
            found[key] = row
    return {key: row.us.median for key, row in found.items()}


def _some(keys: dict[tuple[str, int], float]) -> str:
    return ", ".join(f"{variant} at {tokens}" for variant, tokens in list(keys)[:3]) or "none"
