# SPDX-License-Identifier: Apache-2.0
"""Suggestions for misspelt keyword arguments of constructors and public functions.

`explain_keywords` runs once for each public module and wraps its exports. A wrapper costs a Python
frame, 0.8 us per call. Methods of the decode hot path avoid it: they accept `**_unknown: Never`,
which costs 0.01 us, and pass it to `reject_unknown`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from types import FunctionType
from typing import Any, NoReturn, TypeVar

from weft.arguments import suggest
from weft.errors import BadCall

UNKNOWN = "_unknown"
_MARK = "_weft_explained"
_INTERNAL = "_weft_internal"
F = TypeVar("F", bound=Callable[..., Any])


def internal(function: F) -> F:
    """Mark a method of a public class as internal to weft.

    It is not wrapped, because decode loops call it, and the API pages omit it.
    """
    setattr(function, _INTERNAL, True)
    return function


def is_internal(function: Any) -> bool:
    """Whether a method of a public class is marked as internal to weft."""
    return hasattr(function, _INTERNAL)


def explain_keywords(names: MutableMapping[str, Any]) -> None:
    """Make public functions and classes raise BadCall for unknown or missing arguments.

    Args:
        names: Globals of a module with `__all__`. Functions are replaced only there, so that calls
            within weft are not wrapped. Constructors and methods are replaced in their classes.
    """
    for name in names["__all__"]:
        value = names[name]
        if isinstance(value, FunctionType) and _is_defined_in_weft(value):
            names[name] = _wrap(value, name)
        elif (
            isinstance(value, type)
            and _is_defined_in_weft(value)
            and not issubclass(value, BaseException)
        ):
            for base in filter(_is_defined_in_weft, value.__mro__):
                _explain_class(base)


def _explain_class(kind: type[Any]) -> None:
    for name, value in list(vars(kind).items()):
        if name.startswith("_") and name not in ("__init__", "__call__"):
            continue
        func_name = kind.__name__ if name == "__init__" else f"{kind.__name__}.{name}"
        if isinstance(value, FunctionType):
            setattr(kind, name, _wrap(value, func_name))
        elif isinstance(value, classmethod | staticmethod):
            inner = value.__func__
            if isinstance(inner, FunctionType):
                setattr(kind, name, type(value)(_wrap(inner, func_name)))


def _wrap(function: Callable[..., Any], func_name: str) -> Callable[..., Any]:
    if (
        hasattr(function, _MARK)
        or is_internal(function)
        or UNKNOWN in inspect.signature(function).parameters
    ):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if isinstance(error, BadCall):
                raise
            bind(function, func_name, args, kwargs)
            raise  # from within the function

    setattr(call, _MARK, True)
    return call


def bind(
    function: Callable[..., Any], func_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Bind the arguments of a call to parameters. Raises BadCall if they do not match."""
    signature = inspect.signature(function)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        _raise_bad_call(signature, func_name, kwargs, str(error))


def reject_unknown(function: Callable[..., Any], unknown: Collection[str]) -> NoReturn:
    """Raise BadCall for keywords that a public function collected in `**_unknown`."""
    _raise_bad_call(inspect.signature(function), function.__qualname__, unknown)


def _raise_bad_call(
    signature: inspect.Signature, func_name: str, keywords: Collection[str], reason: str = ""
) -> NoReturn:
    known = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind is not parameter.POSITIONAL_ONLY
        and name not in ("self", "cls")
        and name[0] != "_"
    ]
    usage = f"{func_name}() accepts {', '.join(known)}"
    unknown = [name for name in keywords if name not in signature.parameters]
    if not unknown:
        raise BadCall(f"{func_name}(): {reason}. {usage}") from None
    suggestions = ", ".join(
        name + suggest(name, known).replace("; did", ": did") for name in unknown
    )
    end = "" if suggestions[-1] == "?" else "."
    raise BadCall(f"{func_name}() has no argument {suggestions}{end} {usage}") from None


def _is_defined_in_weft(value: Any) -> bool:
    return str(value.__module__).split(".")[0] == "weft"
