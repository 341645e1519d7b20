# SPDX-License-Identifier: Apache-2.0
"""Every figure of the docs' result tables is in a file of benchmarks/."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks/results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in DOCUMENTS}
AMONG = re.compile(r"<!-- figures among: ([A-Za-z0-9.,/ -]+) -->")
NO_FIGURES = re.compile(r"<!-- no measurements: [^>]+ -->")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
# A cell that is a number or two, with a unit or without: what a table of results is made of.
FIGURE = re.compile(r"[-+]?[\d.]+(?:(?:-|, )[\d.]+)*(?: (?:us|ms|s|%|[KMG]i?B|GB/s|TB/s|MHz))?")
Table = tuple[int, str, list[list[str]]]  # line of its header, the line above, rows of cells


def _tables(text: str) -> Iterator[Table]:
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        first = number
        while number < len(lines) and lines[number].startswith("|"):
            number += 1
        rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines[first + 2 : number]]
        if rows:
            yield first + 1, lines[first - 1], rows
        number += 1


def _sources(text: str) -> list[int]:
    """Return the lines of result tables that name no source."""
    result = []
    for line, above, rows in _tables(text):
        cells = [cell for row in rows for cell in row[1:] if cell]
        results = 2 * sum(bool(FIGURE.fullmatch(cell)) for cell in cells) >= max(1, len(cells))
        if results and not (AMONG.fullmatch(above) or NO_FIGURES.fullmatch(above)):
            result.append(line)
    return result


def _numbers(value: Any) -> Iterator[float]:
    """Return all numbers except samples, because tables show medians."""
    if isinstance(value, dict):
        value = [each for name, each in value.items() if not name.startswith("samples")]
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, str):
        yield from map(float, NUMBER.findall(value))


def _load(name: str) -> Any:
    """Return a file of benchmarks/; of a file with a record per line, a list."""
    text = (RECORDS / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name[-1] == "l" else json.loads(text)


def _says(text: str, value: float) -> bool:
    """Whether a number of a cell is this one, rounded to as many decimals."""
    decimals = len(text.partition(".")[2])
    return abs(float(text) - value) <= 0.5 * 10.0**-decimals * (1 + 1e-6)


def _unknown(text: str) -> list[str]:
    """Return the figures that are in none of the files that their table names."""
    result = []
    for _, above, rows in _tables(text):
        if names := AMONG.fullmatch(above):
            known = {each for file in names[1].split(", ") for each in _numbers(_load(file))}
            figures = (f for row in rows for cell in row[1:] for f in NUMBER.findall(cell))
            result += [f for f in figures if not any(_says(f, each) for each in known)]
    return result


def test_every_figure_is_among_those_of_the_files_that_its_table_names():
    for name, text in TEXTS.items():
        assert not _sources(text), f"{name}: write <!-- figures among: FILE.json --> above it"
        assert not _unknown(text), name


def test_a_wrong_figure_and_a_table_without_a_source_are_found():
    right, wrong = "| bf16 both ways | 8.7 |", "| bf16 both ways | 7.13 |"
    assert right in TEXTS["docs/results/alltoall.md"]
    assert _unknown(TEXTS["docs/results/alltoall.md"].replace(right, wrong)) == ["7.13"]
    assert _sources("| Tokens | 1 | 8 |\n|---|---|---|\n| weft | 9.3 | 13.8 |") == [1]


def test_every_file_of_figures_is_named():
    reported = "".join(TEXTS.values())
    names = [path.relative_to(RECORDS).as_posix() for path in RECORDS.glob("*/*.json*")]
    assert len(names) > 50
    assert not [name for name in names if name not in reported]
