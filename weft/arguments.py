# SPDX-License-Identifier: Apache-2.0
"""What a caller may pass, as declarations: integers, flags, numbers, choices, times, objects.

Every refusal is an InvalidArgument that names the argument as the caller knows it, shows what was
given, and says what it may be. Lists of choices are made of what the check itself reads.

An integer is whatever `operator.index` takes, numpy's integers included, but no bool, which is a
mistake more often than a number, and no tensor, which would have to be waited for. What comes back
is a plain int, so that ranks that pass 8 and numpy.int64(8) agree.
"""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

import torch

from weft.errors import InvalidArgument

T = TypeVar("T")
MAX_SECONDS = 10**9  # deadlines are 64-bit nanoseconds
_PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, torch.dtype)


def shown(value: object) -> str:
    """A value as an error shows it: itself where that is short and plain, else what it is."""
    if isinstance(value, torch.Tensor):
        size = "nested" if value.is_nested else list(value.shape)
        return f"a tensor {size} of {value.dtype} on {value.device}"
    named = kind_of(value)
    if isinstance(value, (*_PLAIN, numbers.Number)):
        try:
            return repr(value) if isinstance(value, torch.dtype) else reprlib.repr(value)
        except Exception:  # an int of too many digits, or a list of what cannot be shown
            return named
    return named


def kind_of(value: object) -> str:
    """The type of a value, with its article."""
    kind = type(value)
    room = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a {room}{kind.__name__}"


def refuse(name: str, value: object, wanted: str) -> NoReturn:
    """Raise the InvalidArgument of an argument that is not what it must be."""
    raise InvalidArgument(f"{name} is {shown(value)}; it must be {wanted}")


def integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """`value` as an int in low..high, or from low on, or any."""
    wanted = "an integer"
    if low is not None:
        wanted += f" in {low}..{high}" if high is not None else f", at least {low}"
    if isinstance(value, bool | torch.Tensor):
        refuse(name, value, wanted)
    if isinstance(value, int):
        number = int(value)  # also where a compiler traces, which cannot follow an enum's index
    else:
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            refuse(name, value, wanted)
    if (low is not None and number < low) or (high is not None and number > high):
        refuse(name, number, wanted)
    return int(number)


def integers(
    name: str, values: object, low: int | None = None, high: int | None = None
) -> tuple[int, ...]:
    """A sequence, or a tensor of one dimension, of integers, in low..high where those are given.

    An entry that is not is named by its index.
    """
    where = "" if high is None else f" in {low}..{high}"
    if isinstance(values, torch.Tensor):
        whole = not (values.is_floating_point() or values.is_complex() or values.is_meta)
        if values.dim() != 1 or not whole or values.dtype == torch.bool:
            shape = list(values.shape)
            refuse(name, values, f"one-dimensional and of integers; its shape is {shape}")
        values = values.tolist()
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        refuse(name, values, f"a sequence of integers{where}")
    try:
        entries = list(values)
    except TypeError:  # an array without dimensions has the method, and no entries
        refuse(name, values, f"a sequence of integers{where}")
    return tuple(integer(f"{name}[{i}]", value, low, high) for i, value in enumerate(entries))


def flags(**values: object) -> None:
    """Require True or False of each: "no" would count as yes."""
    for name, value in values.items():
        if not isinstance(value, bool):
            refuse(name, value, "True or False")


def real(
    name: str, value: object, *, least: float | None = None, above: float | None = None
) -> float:
    """`value` as a finite float, at least or above a bound."""
    bound = "" if least is None else f", at least {least:g}"
    bound = bound if above is None else f", above {above:g}"
    number = _float(value)
    if (
        not math.isfinite(number)
        or (least is not None and number < least)
        or (above is not None and number <= above)
    ):
        refuse(name, value, f"a finite number{bound}")
    return number


def seconds(name: str, value: object) -> float:
    """`value` as a time that a deadline can be made of."""
    number = _float(value)
    if not 0 < number <= MAX_SECONDS:
        refuse(name, value, f"a number of seconds above 0, at most {MAX_SECONDS}")
    return number


def _float(value: object) -> float:
    """`value` as a float; no number for what is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def one_of(name: str, value: object, allowed: Collection[T]) -> T:
    """The one of `allowed` that `value` equals."""
    for option in allowed:
        if value is option or _equal(value, option):
            return option
    raise InvalidArgument(
        f"{name} is {shown(value)}; choose one of {listed(allowed)}{suggestion(value, allowed)}"
    )


def suggestion(value: object, allowed: Iterable[object]) -> str:
    """The end of an error about a misspelt name: the choice that is nearest, if one is near."""
    names = {each.lower(): each for each in allowed if isinstance(each, str)}
    if not isinstance(value, str) or not value:
        return ""
    near = get_close_matches(value.lower(), names, 1)
    near = near or [name for name in names if name.startswith(value.lower())]
    if not near:
        return ""
    return f"; did you mean {names[near[0]]!r}?"


def listed(allowed: Iterable[object]) -> str:
    """Choices as an error lists them."""
    return ", ".join(map(repr, allowed))


def instance(name: str, value: object, kind: type[T], fix: str = "") -> T:
    """`value`, which must be a `kind`; `fix` says where one comes from."""
    if not isinstance(value, kind):
        refuse(name, value, f"a {_public(kind)}" + (f": {fix}" if fix else ""))
    return value


def function(name: str, value: Any, what: str) -> None:
    """Require something that can be called; `what` says what it does."""
    if not callable(value):
        refuse(name, value, f"a function, {what}")


def adopt(owner: object, **values: object) -> None:
    """Put checked values into the fields of a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(owner, name, value)


def _equal(value: object, option: object) -> bool:
    if isinstance(value, bool) or isinstance(option, bool):
        return False  # equal ones are identical
    if isinstance(option, int):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            return False
        return not isinstance(value, torch.Tensor) and number == option
    return isinstance(option, str) and isinstance(value, str) and str.__eq__(value, option)


def _public(kind: type[Any]) -> str:
    root = kind.__module__.partition(".")[0]
    return kind.__name__ if root == "builtins" else f"{root}.{kind.__name__}"
