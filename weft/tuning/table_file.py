"""Files of measured times: JSON that is read, written, compared and refused in one way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import InvalidArgument
from weft.tuning.thresholds import Times

T = TypeVar("T")


def read_table(path: Path | str, what: str) -> Any:
    """The JSON values in a file. Raises InvalidArgument naming it; `what` it should be."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot read {what} {path}: {error}") from error


def parsed(found: Any, make: Callable[[Any], T], *, form: str, where: str, what: str) -> T:
    """What `make` makes of JSON values whose "format" is `form`.

    Raises InvalidArgument naming `where` they come from, and what is wrong.
    """
    try:
        if found["format"] != form:
            raise InvalidArgument(f"format is {found['format']!r}; this weft reads {form!r}")
        return make(found)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = error if isinstance(error, InvalidArgument) else repr(error)
        raise InvalidArgument(f"{where} is no {what}: {reason}") from error


def whole(value: Any) -> int:
    """A JSON integer. Raises InvalidArgument for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"{value!r} stands where a whole number belongs")
    return value


def times_of(found: Any) -> dict[str, Times]:
    """name -> us for each size, None where it was not measured, from JSON values."""
    return {
        str(name): tuple(None if us is None else float(us) for us in times)
        for name, times in found.items()
    }


def table_text(values: Mapping[str, Any]) -> str:
    """The file's text: one of its "curves" a line."""
    head = dict(values)
    curves = [f"  {json.dumps(curve)}" for curve in head.pop("curves")]
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    body = ",\n".join(curves)
    return "{\n" + ",\n".join(lines) + f',\n "curves": [\n{body}\n ]\n}}\n'


def digest_of(values: Mapping[str, Any]) -> str:
    """SHA-256 of all that decides; what ranks compare."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
