"""Files of measured times: JSON that is read, written, compared and refused in one way."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar, Self

from weft.errors import InvalidArgument
from weft.tuning.thresholds import Times


class TableFile:
    """A table of measured times: kept in a file, sent to all ranks, and compared by them."""

    __slots__ = ()

    form: ClassVar[str]  # what "format" is in its JSON values
    what: ClassVar[str]  # it is, in errors

    def as_json(self) -> dict[str, Any]:
        """The table as JSON values."""
        raise NotImplementedError

    @classmethod
    def _make(cls, found: Any) -> Self:
        """The table in JSON values of this form. What they lack is any error of Python's."""
        raise NotImplementedError

    @classmethod
    def of_json(cls, found: Any, where: str) -> Self:
        """The table in JSON values. Raises InvalidArgument naming `where` and what is wrong."""
        try:
            if found["format"] != cls.form:
                raise InvalidArgument(
                    f"format is {found['format']!r}; this weft reads {cls.form!r}"
                )
            return cls._make(found)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            reason = error if isinstance(error, InvalidArgument) else repr(error)
            raise InvalidArgument(f"{where} is no {cls.what}: {reason}") from error

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a file that `weft tune` wrote. Raises InvalidArgument naming it."""
        return cls.of_json(read_json(path, f"the {cls.what}"), str(path))

    def text(self) -> str:
        """The file's text: one of its "curves" a line."""
        head = self.as_json()
        curves = [f"  {json.dumps(curve)}" for curve in head.pop("curves")]
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        body = ",\n".join(curves)
        return "{\n" + ",\n".join(lines) + f',\n "curves": [\n{body}\n ]\n}}\n'

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides; what ranks compare."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()


def read_json(path: Path | str, what: str) -> Any:
    """A file's JSON values. Raises InvalidArgument naming what the file is, and itself."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot read {what} {path}: {error}") from error


def whole(value: Any) -> int:
    """A JSON integer. Raises InvalidArgument for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"{value!r} stands where a whole number belongs")
    return value


def texts_of(found: Any, *names: str) -> dict[str, str]:
    """The texts of these names in JSON values."""
    return {name: str(found[name]) for name in names}


def tokens_of(curve: Any) -> tuple[int, ...]:
    """The sizes that a curve in JSON values was measured at."""
    return tuple(whole(n) for n in curve["tokens"])


def times_of(curve: Any) -> dict[str, Times]:
    """name -> us for each size, None where it was not measured, of a curve in JSON values."""
    return {
        str(name): tuple(None if us is None else float(us) for us in times)
        for name, times in curve["us"].items()
    }
