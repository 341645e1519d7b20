"""Figures of the JSON files in benchmarks/, as series over the number that a table's columns name.

A selector names one:  FILE/path/to/a/list[field=value,...]@axis.field.field  or, where an object's
keys are numbers,  FILE/path/to/an/object/*.field  (`*` alone for plain numbers, `*.0` for the first
of a list).
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent
_STEP = re.compile(r"/(\*[^/]*|[^/\[\]@]+)|\[([^\]]*)\]@([a-z_]+)\.(.+)")


class Series(dict[float, float]):
    """Numbers by the number of a column; arithmetic goes column by column, where both have one."""

    def __add__(self, other: Series | float) -> Series:
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: Series | float) -> Series:
        return self._with(other, lambda a, b: a - b)

    def __mul__(self, other: Series | float) -> Series:
        return self._with(other, lambda a, b: a * b)

    def __truediv__(self, other: Series | float) -> Series:
        return self._with(other, lambda a, b: a / b)

    def beside(self, other: Series) -> Series:
        """With the columns of another that this one has not."""
        return Series({**other, **self})

    def _with(self, other: Series | float, by: Any) -> Series:
        if isinstance(other, int | float):
            return Series({key: by(value, other) for key, value in self.items()})
        return Series({key: by(value, other[key]) for key, value in self.items() if key in other})


def least(*several: Series) -> Series:
    """The smallest of several at each column that any of them has."""
    keys = {key for each in several for key in each}
    return Series({key: min(each[key] for each in several if key in each) for key in keys})


@functools.cache
def load(name: str) -> Any:
    """A file of benchmarks/; of one with a record in every line, a list of them."""
    text = (RECORDS / name).read_text()
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)


def series(selector: str) -> Series:
    """The numbers that a selector names. Raises KeyError naming it where there are none."""
    name, _, path = selector.partition(".json")
    found: Any = load(f"{name}.json")
    try:
        place = 0
        while place < len(path):
            step = _STEP.match(path, place)
            if step is None:
                raise KeyError(path[place:])
            place = step.end()
            if step[1] is None:
                return _records(found, step[2], step[3], step[4].split("."))
            if step[1].startswith("*"):
                fields = step[1].split(".")[1:]
                return _by_key(found, fields)
            found = found[int(step[1])] if isinstance(found, list) else found[step[1]]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise KeyError(f"{selector}: {error!r}") from error
    raise KeyError(f"{selector} names no series")


def _by_key(found: dict[str, Any], fields: list[str]) -> Series:
    """Of an object whose keys are numbers; not all of them need have the field."""
    read = Series()
    for key in found:
        if key.isdigit():
            try:
                read[float(key)] = _field(found[key], fields)
            except KeyError:
                continue
    if not read:
        raise KeyError(".".join(fields))
    return read


def _records(rows: list[dict[str, Any]], chosen: str, axis: str, fields: list[str]) -> Series:
    wanted = dict(part.split("=", 1) for part in chosen.split(",") if part)
    found = Series()
    for row in rows:
        if all(str(row.get(name)) == value for name, value in wanted.items()):
            if float(row[axis]) in found and _field(row, fields) != found[float(row[axis])]:
                raise KeyError(f"several rows of {axis} {row[axis]}")
            found[float(row[axis])] = _field(row, fields)
    if not found:
        raise KeyError(f"no row with {chosen}")
    return found


def _field(value: Any, fields: list[str]) -> float:
    for name in fields:
        value = value[int(name)] if isinstance(value, list) else value[name]
    if value is None:
        raise KeyError(f"{fields} is null")
    return float(value)
