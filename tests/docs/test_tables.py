"""Every figure of every result table of the docs is what a file in benchmarks/ says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.publish import NUMBER, ROOT, Found, documents, expected, rewritten, says, tables_of
from benchmarks.series import Series, least, load, series
from benchmarks.tables import TABLES

AMONG = re.compile(r"<!-- figures among: ([A-Za-z0-9., -]+) -->")
NO_FIGURES = re.compile(r"<!-- no measurements: [^>]+ -->")
# A cell that is a number or two, with a unit or without: what a table of results is made of.
FIGURE = re.compile(r"[-+]?[\d.]+(?:(?:-|, )[\d.]+)*(?: (?:us|ms|s|%|[KMG]i?B|GB/s|TB/s|MHz))?")
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in documents()}


def _results(text: str) -> Iterator[tuple[Found, str]]:
    """Tables whose cells are mostly figures, and the line above each."""
    lines = text.split("\n")
    for table in tables_of(text):
        cells = [cell for row in table.rows for cell in row[1:] if cell]
        figures = [cell for cell in cells if FIGURE.fullmatch(cell)]
        if table.name or 2 * len(figures) >= max(1, len(cells)):
            yield table, lines[table.line - 1]


def _sources(name: str) -> list[str]:
    """Result tables of a document that name no source."""
    text = TEXTS[name]
    return [
        f"{name}:{table.line + 1}"
        for table, above in _results(text)
        if not (table.name or AMONG.fullmatch(above) or NO_FIGURES.fullmatch(above))
    ]


@pytest.mark.parametrize("name", TEXTS)
def test_every_result_table_names_its_source(name):
    assert not _sources(name), "write <!-- table: NAME --> above it, and its rows in tables/"


def _differences(text: str) -> list[str]:
    """Cells of named tables that are not what their source says."""
    wrong = []
    for table in tables_of(text):
        if table.name is None:
            continue
        rows = TABLES[table.name]
        assert [row[0] for row in table.rows] == [label for label, _ in rows], table.name
        for row, (label, cells) in zip(table.rows, rows, strict=True):
            for place, cell in enumerate(row[1:]):
                if cells is None or not cell:
                    continue
                told, values = NUMBER.findall(cell), expected(cells, table.head, place)
                if len(told) != len(values) or not all(map(says, told, values)):
                    where = f"{table.name}, {label}, {table.head[place + 1]}"
                    wrong.append(f"{where}: {cell} is to be {values}")
    return wrong


@pytest.mark.parametrize("name", TEXTS)
def test_every_figure_is_the_recorded_one(name):
    assert not _differences(TEXTS[name]), "python benchmarks/publish.py writes them anew"
    assert rewritten(TEXTS[name]) == TEXTS[name]


def test_every_source_has_its_table():
    used = [table.name for text in TEXTS.values() for table in tables_of(text) if table.name]
    assert sorted(used) == sorted(TABLES)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, str):
        yield from map(float, re.findall(r"\d+(?:\.\d+)?", value))


@pytest.mark.parametrize("name", TEXTS)
def test_other_figures_are_among_those_of_their_files(name):
    for table, above in _results(TEXTS[name]):
        if found := AMONG.fullmatch(above):
            known = [each for file in found[1].split(", ") for each in _numbers(load(file))]
            for row in table.rows:
                for told in (
                    each for cell in row[1:] for each in re.findall(r"\d+(?:\.\d+)?", cell)
                ):
                    assert any(says(told, each) for each in known), f"{row[0]}: {told}"


def test_a_wrong_figure_and_a_table_without_a_source_are_found():
    text = TEXTS["benchmarks/notebook.md"]
    assert "| 2 ranks, perfect | 8.0 |" in text
    wrong = text.replace("| 2 ranks, perfect | 8.0 |", "| 2 ranks, perfect | 8.5 |", 1)
    (told,) = _differences(wrong)
    assert told.startswith("pairs-4-other, 2 ranks, perfect, 1: 8.5 is to be [8.0")
    assert rewritten(wrong) == text
    TEXTS["bare"] = "| Tokens | 1 | 8 |\n|---|---|---|\n| weft | 9.3 | 13.8 |"
    assert _sources("bare") == ["bare:1"]
    del TEXTS["bare"]


def test_selectors_say_what_they_do_not_find():
    name = "alltoall-4xH200-2026-11-21.json"
    assert series(f"{name}/runs/0/rows[phase=pair]@tokens.us.median")[1] == pytest.approx(
        8.4, abs=0.1
    )
    for selector in (
        f"{name}/runs/0/rows[phase=none]@tokens.us.median",
        f"{name}/runs/0/rows[]@tokens.us.median",  # several phases: several figures a size
        f"{name}/runs/99/rows[phase=pair]@tokens.us.median",
        f"{name}/runs",
    ):
        with pytest.raises(KeyError, match="alltoall"):
            series(selector)
    assert least(Series({1: 2.0, 8: 3.0}), Series({8: 1.0})) == {1: 2.0, 8: 1.0}
    assert (Series({1: 6.0, 8: 3.0}) / Series({1: 2.0})) == {1: 3.0}
