# SPDX-License-Identifier: Apache-2.0
"""Names of an engine that weft relies on, checked against the installed version."""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from weft.errors import SetupError

# Parameters in the form that `format_signature` returns; None if weft does not rely on them. A
# mapping gives them per version and omits versions in which weft does not use the name.
Parameters = str | Mapping[str, str | None] | None


@dataclass(frozen=True, slots=True)
class Known:
    """A name of the engine that weft calls or reads.

    Attributes:
        target: Full dotted path, down to a method.
        parameters: Expected signature.
        names: Attributes that the function's code reads or sets, or fields of the class, separated
            by spaces.
    """

    target: str
    parameters: Parameters = None
    names: str = ""


K = TypeVar("K", bound=Known)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine and the versions of it that weft supports.

    Attributes:
        name: Display name.
        packages: Names of the pip packages that may provide it.
        served: Supported versions, for which every entry of the plug-in's tables was verified.
    """

    name: str
    packages: tuple[str, ...]
    served: tuple[str, ...]

    def installed(self) -> str:
        """Return the installed version from package metadata."""
        for package in self.packages:
            with contextlib.suppress(PackageNotFoundError):
                return version(package)
        return "(unknown version)"

    def release(self, installed: str) -> str | None:
        """Return the supported version without suffixes (.post1, +cu130), or None."""
        for each in self.served:
            if re.fullmatch(re.escape(each) + r"([.+].*)?", installed):
                return each
        return None

    def entries_of_installed(self, entries: Iterable[K]) -> list[K]:
        """Return the entries that apply to the installed version; none if it is not supported."""
        release = self.release(self.installed())
        return [] if release is None else [entry for entry, _ in relied_on(entries, release)]

    def check(self, entries: Iterable[Known]) -> None:
        """Raise SetupError for an unsupported version, listing all differences."""
        entries, installed = tuple(entries), self.installed()
        release = self.release(installed)
        if release is not None:
            wrong = list(list_differences(entries, release))
        else:  # compare with the closest supported version
            wrong = min((list(list_differences(entries, each)) for each in self.served), key=len)
            wrong.insert(0, "its version is not supported")
        if wrong:
            raise SetupError(
                f"{self.name} {installed} does not match weft's plug-in, so nothing was patched: "
                f"{'; '.join(wrong)}. Supported: {', '.join(self.served)}; install one of them, or "
                "a newer weft"
            )


def format_signature(signature: inspect.Signature) -> str:
    """Format a signature as the tables do: "self, x, *, scale=".

    A name ends in `=` if it has a default; `*` precedes keyword-only parameters.
    """
    names: list[str] = []
    keyword_only = False
    for each in signature.parameters.values():
        stars = "*" * (each.kind is each.VAR_POSITIONAL) + "**" * (each.kind is each.VAR_KEYWORD)
        if each.kind is each.KEYWORD_ONLY and not keyword_only:
            names.append("*")
        keyword_only = keyword_only or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        names.append(stars + each.name + ("" if each.default is each.empty else "="))
    return ", ".join(names)


def relied_on(entries: Iterable[K], release: str) -> Iterator[tuple[K, str | None]]:
    """Yield the entries that apply to one version, with their parameters there."""
    for entry in entries:
        if not isinstance(entry.parameters, Mapping):
            yield entry, entry.parameters
        elif release in entry.parameters:
            yield entry, entry.parameters[release]


def list_differences(entries: Iterable[Known], release: str) -> Iterator[str]:
    """Yield a message for each entry that is missing or has another signature.

    `release` is the supported version whose signatures are expected.
    """
    for entry, parameters in relied_on(entries, release):
        try:
            target = pkgutil.resolve_name(entry.target)
        except (ImportError, AttributeError, ValueError) as error:
            yield f"there is no {entry.target} ({error})"
            continue
        if entry.names and (missing := set(entry.names.split()) - _names_of(target)):
            yield f"{entry.target} has no {', '.join(sorted(missing))}"
        if parameters is None:
            continue
        try:
            have = format_signature(inspect.signature(unbound_function(target)))
        except (TypeError, ValueError) as error:
            yield f"{entry.target} is not a function: {error}"
            continue
        if have != parameters:
            yield f"{entry.target} takes ({have}), not ({parameters})"


def _names_of(target: Any) -> set[str]:
    if isinstance(target, type):
        return {
            name
            for each in target.__mro__
            for name in (*vars(each), *inspect.get_annotations(each))
        }
    return set(inspect.unwrap(target).__code__.co_names)


def unbound_function(method: Any) -> Any:
    """Return the function of a bound class method, or the argument itself."""
    return getattr(method, "__func__", method)
