# SPDX-License-Identifier: Apache-2.0
"""Checks of public arguments: integers, flags, numbers, choices, times, objects.

Every check raises InvalidArgument with the argument's public name, its value and the allowed
values.

An integer is any object that `operator.index` accepts, including numpy's integers, except bool
(usually a mistake) and tensors (reading one synchronises). The checks return a plain int, so that
ranks that pass 8 and numpy.int64(8) agree.
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
_BASIC = (type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, torch.dtype)


def format_value(value: object) -> str:
    """Return a value as text for an error: its repr if that is short, else its type."""
    if isinstance(value, torch.Tensor):
        size = "nested" if value.is_nested else list(value.shape)
        return f"a tensor {size} of {value.dtype} on {value.device}"
    type_name = describe_type(value)
    if isinstance(value, (*_BASIC, numbers.Number)):
        try:
            return repr(value) if isinstance(value, torch.dtype) else reprlib.repr(value)
        except Exception:  # an int of too many digits, or a list whose elements' repr raises
            return type_name
    return type_name


def describe_type(value: object) -> str:
    """Return the qualified type name of a value with the article "a"."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a {module}{kind.__name__}"


def raise_invalid(name: str, value: object, expected: str) -> NoReturn:
    """Raise InvalidArgument with an argument's name, value and expected value."""
    raise InvalidArgument(f"{name} is {format_value(value)}; it must be {expected}")


def check_int(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """Return `value` as an int in low..high; a bound of None is not checked."""
    expected = "an integer"
    if low is not None:
        expected += f" in {low}..{high}" if high is not None else f", at least {low}"
    if isinstance(value, bool | torch.Tensor):
        raise_invalid(name, value, expected)
    if isinstance(value, int):
        number = int(value)  # torch.compile cannot trace operator.index of an enum
    else:
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise_invalid(name, value, expected)
    if (low is not None and number < low) or (high is not None and number > high):
        raise_invalid(name, number, expected)
    return int(number)


def check_ints(
    name: str, values: object, low: int | None = None, high: int | None = None
) -> tuple[int, ...]:
    """Return a sequence or one-dimensional tensor of integers in low..high as a tuple.

    The error names an invalid entry by its index.
    """
    where = "" if high is None else f" in {low}..{high}"
    if isinstance(values, torch.Tensor):
        is_integral = not (values.is_floating_point() or values.is_complex() or values.is_meta)
        if values.dim() != 1 or not is_integral or values.dtype == torch.bool:
            shape = list(values.shape)
            raise_invalid(name, values, f"one-dimensional and of integers; its shape is {shape}")
        values = values.tolist()
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise_invalid(name, values, f"a sequence of integers{where}")
    try:
        entries = list(values)
    except TypeError:  # a zero-dimensional array has __iter__ but no entries
        raise_invalid(name, values, f"a sequence of integers{where}")
    return tuple(check_int(f"{name}[{i}]", value, low, high) for i, value in enumerate(entries))


def check_bools(**values: object) -> None:
    """Require that each value is True or False: the string "no" would be truthy."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise_invalid(name, value, "True or False")


def check_float(
    name: str, value: object, *, minimum: float | None = None, above: float | None = None
) -> float:
    """Return `value` as a finite float that is at least `minimum` and above `above`."""
    bound = "" if minimum is None else f", at least {minimum:g}"
    bound = bound if above is None else f", above {above:g}"
    number = _to_float(value)
    if (
        not math.isfinite(number)
        or (minimum is not None and number < minimum)
        or (above is not None and number <= above)
    ):
        raise_invalid(name, value, f"a finite number{bound}")
    return number


def check_seconds(name: str, value: object) -> float:
    """Return `value` as a positive number of seconds, at most MAX_SECONDS."""
    number = _to_float(value)
    if not 0 < number <= MAX_SECONDS:
        raise_invalid(name, value, f"a number of seconds above 0, at most {MAX_SECONDS}")
    return number


def _to_float(value: object) -> float:
    """Return `value` as a float; NaN if it is not a real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_choice(name: str, value: object, allowed: Collection[T]) -> T:
    """Return the entry of `allowed` that equals `value`."""
    for option in allowed:
        if value is option or _is_equal(value, option):
            return option
    raise InvalidArgument(
        f"{name} is {format_value(value)}; choose one of "
        f"{format_choices(allowed)}{suggest(value, allowed)}"
    )


def suggest(value: object, allowed: Iterable[object]) -> str:
    """Return "; did you mean ...?" with the choice closest to a misspelled value, or ""."""
    names = {option.lower(): option for option in allowed if isinstance(option, str)}
    if not isinstance(value, str) or not value:
        return ""
    matches = get_close_matches(value.lower(), names, 1)
    matches = matches or [name for name in names if name.startswith(value.lower())]
    if not matches:
        return ""
    return f"; did you mean {names[matches[0]]!r}?"


def format_choices(allowed: Iterable[object]) -> str:
    """Return choices as a comma-separated list for an error."""
    return ", ".join(map(repr, allowed))


def check_instance(name: str, value: object, kind: type[T], fix: str = "") -> T:
    """Return `value` if it is a `kind`; `fix` is appended to the error."""
    if not isinstance(value, kind):
        raise_invalid(name, value, f"a {_public_name(kind)}" + (f": {fix}" if fix else ""))
    return value


def check_callable(name: str, value: Any, description: str) -> None:
    """Require a callable; `description` is appended to the error."""
    if not callable(value):
        raise_invalid(name, value, f"a function, {description}")


def set_fields(owner: object, **values: object) -> None:
    """Assign checked values to the fields of a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(owner, name, value)


def _is_equal(value: object, option: object) -> bool:
    if isinstance(value, bool) or isinstance(option, bool):
        return False  # equal bools are identical, which the caller has checked
    if isinstance(option, int):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            return False
        return not isinstance(value, torch.Tensor) and number == option
    return isinstance(option, str) and isinstance(value, str) and str.__eq__(value, option)


def _public_name(kind: type[Any]) -> str:
    root = kind.__module__.partition(".")[0]
    return kind.__name__ if root == "builtins" else f"{root}.{kind.__name__}"
