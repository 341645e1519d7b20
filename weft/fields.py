# SPDX-License-Identifier: Apache-2.0
"""Sizes that specialise a kernel: a frozen dataclass, each field of which is told once.

A field's annotation says which argument callers know it by and what it may be. From that follow its
check, what ranks compare at creation, and the initialiser of the C++ struct with the same fields:

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

from weft.arguments import adopt, integer, one_of


@dataclass(frozen=True, slots=True)
class Size:
    """An integer in low..high."""

    argument: str
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A word, and the enumerator of the same name in the C++ enum."""

    argument: str
    allowed: Collection[str]
    enum: str


@dataclass(frozen=True, slots=True)
class Array:
    """A tuple of integers; the C++ struct has its length in a field of its own."""

    argument: str
    length: str


def check_fields(config: object) -> None:
    """Adopt a config's sizes and words as they were checked.

    Raises InvalidArgument naming the argument and what it may be.
    """
    rules = _rules_of(config)
    adopt(config, **{name: _check(rule, getattr(config, name)) for name, rule in rules.items()})


def checked(kind: type, **values: Any) -> dict[str, Any]:
    """Values of some of a config's fields, for who needs them before there is a config.

    Raises InvalidArgument as `check_fields` does.
    """
    rules = _rules(kind)
    return {name: _check(rules[name], value) for name, value in values.items()}


def largest(kind: type, name: str) -> int:
    """The upper limit of a size."""
    rule = _rules(kind)[name]
    assert isinstance(rule, Size)
    return rule.high


def by_argument(config: object) -> dict[str, Any]:
    """Every field by the name that callers know: what ranks compare at creation."""
    rules = _rules_of(config).items()
    return {getattr(rule, "argument", name): getattr(config, name) for name, rule in rules}


def literal(config: object, struct: str) -> str:
    """The C++ initialiser of the struct that has these fields, in this order."""
    rules = _rules_of(config).items()
    words = (_word(name, rule, getattr(config, name)) for name, rule in rules)
    return f"{struct}{{{', '.join(words)}}}"


def config_hash(config: Any, kind: str = "") -> int:
    """Return 24 bits of a config's hash, which flags carry so that ranks notice another config.

    kind: keeps equal fields of different operators apart.
    """
    text = kind + json.dumps(asdict(config), sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:3], "little")


def _word(name: str, rule: Any, value: Any) -> str:
    if isinstance(rule, Choice):
        return f".{name} = {rule.enum}::{value}"
    if isinstance(rule, Array):
        entries = ", ".join(map(str, value))
        return f".{rule.length} = {len(value)}, .{name} = {{{entries}}}"
    return f".{name} = {str(value).lower() if isinstance(value, bool) else value}"


def _check(rule: Any, value: Any) -> Any:
    if isinstance(rule, Size):
        return integer(rule.argument, value, rule.low, rule.high)
    if isinstance(rule, Choice):
        return one_of(rule.argument, value, rule.allowed)
    return value


def _rules_of(config: object) -> Mapping[str, Any]:
    kind: Any = type(config)
    return _rules(kind)


@functools.cache
def _rules(kind: Any) -> Mapping[str, Any]:
    """Each field's rule by its name, None where it has none."""
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: getattr(hints[f.name], "__metadata__", (None,))[0] for f in fields(kind)}
