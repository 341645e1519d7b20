"""Write the tables of the docs anew from the JSON files in benchmarks/.

    python benchmarks/publish.py             # every figure, as benchmarks/tables/ says

Cells keep their number of decimals; labels and empty cells are left as they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.series import Series  # noqa: E402
from benchmarks.tables import TABLES  # noqa: E402
from benchmarks.tables.sources import Cells  # noqa: E402

MARK = re.compile(r"<!-- table: ([a-z0-9-]+) -->")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Found:
    """A table of a document: its name or None, the line of its header, and its cells."""

    name: str | None
    line: int
    head: list[str]
    rows: list[list[str]]


def documents() -> list[Path]:
    """What may hold result tables."""
    notebook = ROOT / "benchmarks" / "notebook.md"
    return [ROOT / "README.md", notebook, *sorted((ROOT / "docs").glob("*.md"))]


def tables_of(text: str) -> Iterator[Found]:
    """Every table of a document."""
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        if not lines[number].startswith("|"):
            number += 1
            continue
        end = number
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        mark = MARK.fullmatch(lines[number - 1]) if number else None
        rows = [cells_of(line) for line in lines[number + 2 : end]]
        yield Found(mark and mark[1], number, cells_of(lines[number]), rows)
        number = end


def cells_of(line: str) -> list[str]:
    """The texts between the bars."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def columns(head: list[str]) -> list[float | None]:
    """The first number of each column's name, in its unit's factor."""
    found: list[float | None] = []
    for name in head[1:]:
        number = re.search(r"\d+", name)
        factor = 1024 if "KiB" in name else 1 << 20 if "MiB" in name else 1
        found.append(float(number[0]) * factor if number else None)
    return found


def expected(cells: Cells, head: list[str], place: int) -> list[float]:
    """What the cell in column `place` (the first behind the label is 0) is to say."""
    if cells is None:
        return []
    if isinstance(cells, Series):
        column = columns(head)[place]
        return [] if column is None or column not in cells else [cells[column]]
    value = cells[place] if place < len(cells) else None
    if value is None:
        return []
    return list(value) if isinstance(value, tuple) else [value]


def says(text: str, value: float) -> bool:
    """Whether a number of a cell is this one, rounded to as many decimals, halves either way."""
    decimals = len(text.partition(".")[2])
    return abs(float(text) - value) <= 0.5 * 10.0**-decimals * (1 + 1e-6)


def rendered(cell: str, values: list[float]) -> str:
    """The cell with these numbers, each with as many decimals as the one in its place has."""
    remaining = iter(values)

    def number(match: re.Match[str]) -> str:
        old = match[0]
        decimals = len(old.partition(".")[2])
        value = next(remaining, None)
        if value is None or says(old, value):
            return old
        text = f"{value:{'+' if old[0] in '+-' else ''}.{decimals}f}"
        return text.replace("+0.0", "0.0") if float(text) == 0 else text

    return NUMBER.sub(number, cell)


def rewritten(text: str) -> str:
    """The document with every figure of its tables written anew."""
    lines = text.split("\n")
    for table in tables_of(text):
        if table.name not in TABLES:
            continue
        for index, (row, (_, cells)) in enumerate(zip(table.rows, TABLES[table.name], strict=True)):
            fresh = [
                rendered(cell, expected(cells, table.head, place)) if cell else cell
                for place, cell in enumerate(row[1:])
            ]
            old = lines[table.line + 2 + index]
            if fresh != row[1:]:
                lines[table.line + 2 + index] = "| " + " | ".join([row[0], *fresh]) + " |"
            assert old.startswith("|")
    return "\n".join(lines)


def main() -> None:
    """Rewrite, and say which documents changed."""
    for path in documents():
        text = path.read_text()
        fresh = rewritten(text)
        if fresh != text:
            path.write_text(fresh)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
