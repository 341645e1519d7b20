# SPDX-License-Identifier: Apache-2.0
"""Frozen dataclasses of kernel sizes whose checks are derived from field annotations.

An annotation has the name of the public argument and the allowed values. The argument check, the
comparison between ranks at creation and the initialiser of the C++ struct are derived from it:

    tokens: Annotated[int, Size("max_tokens", 1, 1 << 20)]
    combine: Annotated[str, Choice("combine", COMBINES, "weft::Combine")] = "pull"
    mapped: bool = False
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_type_hints

from weft.arguments import check_choice, check_int, set_fields


@dataclass(frozen=True, slots=True)
class Size:
    """Rule of a field: an integer in low..high."""

    argument: str
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Rule of a field: one of several strings that name the enumerators of a C++ enum."""

    argument: str
    allowed: Collection[str]
    enum: str


@dataclass(frozen=True, slots=True)
class Array:
    """Rule of a field: a tuple of integers. `length` names the C++ field of its length."""

    argument: str
    length: str


def check_fields(config: object) -> None:
    """Check a config's sizes and choices and store the normalised values.

    Raises:
        InvalidArgument: names the argument and the allowed values.
    """
    rules = _get_rules(config)
    set_fields(
        config, **{name: _check_value(rule, getattr(config, name)) for name, rule in rules.items()}
    )


def check_values(kind: type, **values: Any) -> dict[str, Any]:
    """Check values of fields before the config is constructed, and return them.

    Raises:
        InvalidArgument: as `check_fields`.
    """
    rules = _read_rules(kind)
    return {name: _check_value(rules[name], value) for name, value in values.items()}


def max_value(kind: type, name: str) -> int:
    """Return the upper limit of a field with a `Size` rule."""
    rule = _read_rules(kind)[name]
    assert isinstance(rule, Size)
    return rule.high


def values_by_argument(config: object) -> dict[str, Any]:
    """Return all fields by argument name, for the comparison between ranks at creation."""
    rules = _get_rules(config).items()
    return {getattr(rule, "argument", name): getattr(config, name) for name, rule in rules}


def to_cpp(config: object, struct: str) -> str:
    """Return the initialiser of the C++ struct that has these fields, in this order."""
    rules = _get_rules(config).items()
    entries = (_cpp_initialiser(name, rule, getattr(config, name)) for name, rule in rules)
    return f"{struct}{{{', '.join(entries)}}}"


def config_hash(config: Any, kind: str = "") -> int:
    """Return 24 bits of a config's hash, which flags contain so that ranks detect a mismatch.

    Args:
        config: Dataclass to hash.
        kind: Prefix that distinguishes operators with equal fields.
    """
    text = kind + json.dumps(asdict(config), sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:3], "little")


def _cpp_initialiser(name: str, rule: Any, value: Any) -> str:
    if isinstance(rule, Choice):
        return f".{name} = {rule.enum}::{value}"
    if isinstance(rule, Array):
        entries = ", ".join(map(str, value))
        return f".{rule.length} = {len(value)}, .{name} = {{{entries}}}"
    return f".{name} = {str(value).lower() if isinstance(value, bool) else value}"


def _check_value(rule: Any, value: Any) -> Any:
    if isinstance(rule, Size):
        return check_int(rule.argument, value, rule.low, rule.high)
    if isinstance(rule, Choice):
        return check_choice(rule.argument, value, rule.allowed)
    return value


def _get_rules(config: object) -> Mapping[str, Any]:
    kind: Any = type(config)
    return _read_rules(kind)


@functools.cache
def _read_rules(kind: Any) -> Mapping[str, Any]:
    """Return the rule of each field by name; None for a field without one."""
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: getattr(hints[f.name], "__metadata__", (None,))[0] for f in fields(kind)}
