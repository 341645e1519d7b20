# SPDX-License-Identifier: Apache-2.0
"""Functions and classes of an engine that weft uses, checked against the installed version."""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter
from typing import Any, TypeVar

from weft.errors import SetupError

# Parameters as returned by `format_signature`, or None if they are not checked. A mapping has them
# by version, without the versions in which weft does not use the name.
Parameters = str | Mapping[str, str | None] | None


@dataclass(frozen=True, slots=True)
class ExpectedAPI:
    """A function or class of the engine that weft uses.

    Attributes:
        target: Full dotted path, down to a method.
        parameters: Expected signature.
        attributes: Attributes that the function's code reads or sets, or fields of the class,
            separated by spaces.
    """

    target: str
    parameters: Parameters = None
    attributes: str = ""


K = TypeVar("K", bound=ExpectedAPI)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine and the versions of it that weft supports.

    Attributes:
        name: Display name.
        packages: Names of the pip packages that provide it.
        supported: Supported versions, for which every entry of the plug-in's tables was verified.
    """

    name: str
    packages: tuple[str, ...]
    supported: tuple[str, ...]

    def get_version(self) -> str:
        """Return the installed version from package metadata."""
        for package in self.packages:
            with contextlib.suppress(PackageNotFoundError):
                return version(package)
        return "(unknown version)"

    def match_release(self, installed: str) -> str | None:
        """Return the supported version without suffixes (.post1, +cu130), or None."""
        for supported in self.supported:
            if re.fullmatch(re.escape(supported) + r"([.+].*)?", installed):
                return supported
        return None

    def select_entries(self, entries: Iterable[K]) -> list[K]:
        """Return the entries for the installed version; none if it is not supported."""
        release = self.match_release(self.get_version())
        return (
            [] if release is None else [entry for entry, _ in select_signatures(entries, release)]
        )

    def check(self, entries: Iterable[ExpectedAPI]) -> None:
        """Raise SetupError for an unsupported version, with a list of all differences."""
        entries, installed = tuple(entries), self.get_version()
        release = self.match_release(installed)
        if release is not None:
            differences = list(list_differences(entries, release))
        else:  # compare with the closest supported version
            differences = min(
                (list(list_differences(entries, other)) for other in self.supported), key=len
            )
            differences.insert(0, "its version is not supported")
        if differences:
            raise SetupError(
                f"{self.name} {installed} does not match weft's plug-in, so nothing was patched: "
                f"{'; '.join(differences)}. Supported: {', '.join(self.supported)}. "
                "Install one of them, or a newer weft"
            )


def format_signature(signature: inspect.Signature) -> str:
    """Format a signature as in the tables of ExpectedAPI: "self, x, *, scale=".

    A name ends in `=` if it has a default; `*` precedes keyword-only parameters.
    """
    names: list[str] = []
    keyword_only = False
    for parameter in signature.parameters.values():
        kind, name = parameter.kind, parameter.name
        if kind is Parameter.KEYWORD_ONLY and not keyword_only:
            names.append("*")
        keyword_only = keyword_only or kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_POSITIONAL)
        stars = "*" * (kind is Parameter.VAR_POSITIONAL) + "**" * (kind is Parameter.VAR_KEYWORD)
        names.append(stars + name + ("" if parameter.default is Parameter.empty else "="))
    return ", ".join(names)


def select_signatures(entries: Iterable[K], release: str) -> Iterator[tuple[K, str | None]]:
    """Yield the entries for one version, each with its parameters in that version."""
    for entry in entries:
        if not isinstance(entry.parameters, Mapping):
            yield entry, entry.parameters
        elif release in entry.parameters:
            yield entry, entry.parameters[release]


def list_differences(entries: Iterable[ExpectedAPI], release: str) -> Iterator[str]:
    """Yield a message for each entry that is missing or has another signature.

    `release` is the supported version whose signatures are expected.
    """
    for entry, parameters in select_signatures(entries, release):
        try:
            target = pkgutil.resolve_name(entry.target)
        except (ImportError, AttributeError, ValueError) as error:
            yield f"{entry.target} does not exist ({error})"
            continue
        if entry.attributes and (
            missing := set(entry.attributes.split()) - _read_attributes(target)
        ):
            yield f"{entry.target} has no {', '.join(sorted(missing))}"
        if parameters is None:
            continue
        try:
            actual = format_signature(inspect.signature(get_unbound_function(target)))
        except (TypeError, ValueError) as error:
            yield f"{entry.target} is not a function: {error}"
            continue
        if actual != parameters:
            yield f"{entry.target} has parameters ({actual}), not ({parameters})"


def _read_attributes(target: Any) -> set[str]:
    if isinstance(target, type):
        return {
            name
            for base in target.__mro__
            for name in (*vars(base), *inspect.get_annotations(base))
        }
    return set(inspect.unwrap(target).__code__.co_names)


def get_unbound_function(method: Any) -> Any:
    """Return the function of a bound class method, or `method` itself."""
    return getattr(method, "__func__", method)
