# SPDX-License-Identifier: Apache-2.0
"""Names of an engine that weft relies on, compared with the installed engine's before their use."""

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

# What `listed` makes of a signature; None where that is not relied on. A mapping has one for each
# version where weft relies on the name.
Parameters = str | Mapping[str, str | None] | None


@dataclass(frozen=True, slots=True)
class Known:
    """A name that weft calls or reads.

    target: the whole dotted path, down to a method.
    names: attributes that the function's own code reads or sets, or fields of the class,
        separated by spaces.
    """

    target: str
    parameters: Parameters = None
    names: str = ""


K = TypeVar("K", bound=Known)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine by its package.

    name: as people write it.   packages: those that may have it, as pip names them.
    served: versions whose sources every entry of the plug-in's tables was read in.
    """

    name: str
    packages: tuple[str, ...]
    served: tuple[str, ...]

    def installed(self) -> str:
        """Its version, as its metadata have it."""
        for package in self.packages:
            with contextlib.suppress(PackageNotFoundError):
                return version(package)
        return "(of no known version)"

    def release(self, installed: str) -> str | None:
        """The one of `served` that it is, or is a build of (0.5.17.post1, 0.5.17+cu130)."""
        for each in self.served:
            if re.fullmatch(re.escape(each) + r"([.+].*)?", installed):
                return each
        return None

    def here(self, entries: Iterable[K]) -> list[K]:
        """The entries of the installed version, which is among those that are served."""
        release = self.release(self.installed())
        return [] if release is None else [entry for entry, _ in relied_on(entries, release)]

    def check(self, entries: Iterable[Known]) -> None:
        """Raise SetupError for a version that is not served, with all that differs there."""
        entries, installed = tuple(entries), self.installed()
        release = self.release(installed)
        if release is not None:
            wrong = list(differences(entries, release))
        else:  # what sets it apart from the version that is most like it
            wrong = min((list(differences(entries, each)) for each in self.served), key=len)
            wrong.insert(0, "its version is another")
        if wrong:
            raise SetupError(
                f"{self.name} {installed} is not what weft's plug-in knows, so nothing of it was "
                f"patched: {'; '.join(wrong)}. Served: {', '.join(self.served)}; install one of "
                "them, or a newer weft"
            )


def listed(signature: inspect.Signature) -> str:
    """Parameters as the tables write them: names in order, `=` after those with a default.

    `*` is before keyword-only ones, as in Python: "self, x, *, scale=".
    """
    found: list[str] = []
    keyword_only = False
    for each in signature.parameters.values():
        stars = "*" * (each.kind is each.VAR_POSITIONAL) + "**" * (each.kind is each.VAR_KEYWORD)
        if each.kind is each.KEYWORD_ONLY and not keyword_only:
            found.append("*")
        keyword_only = keyword_only or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        found.append(stars + each.name + ("" if each.default is each.empty else "="))
    return ", ".join(found)


def relied_on(entries: Iterable[K], release: str) -> Iterator[tuple[K, str | None]]:
    """The entries of one version, each with its parameters there."""
    for entry in entries:
        if not isinstance(entry.parameters, Mapping):
            yield entry, entry.parameters
        elif release in entry.parameters:
            yield entry, entry.parameters[release]


def differences(entries: Iterable[Known], release: str) -> Iterator[str]:
    """A line for each entry that the imported engine lacks, or whose signature is another.

    release: a version that is served, whose signatures are expected.
    """
    for entry, parameters in relied_on(entries, release):
        try:
            found = pkgutil.resolve_name(entry.target)
        except (ImportError, AttributeError, ValueError) as error:
            yield f"there is no {entry.target} ({error})"
            continue
        if entry.names and (lost := set(entry.names.split()) - _names_of(found)):
            yield f"{entry.target} has no {', '.join(sorted(lost))}"
        if parameters is None:
            continue
        try:
            have = listed(inspect.signature(raw(found)))
        except (TypeError, ValueError) as error:
            yield f"{entry.target} is no function: {error}"
            continue
        if have != parameters:
            yield f"{entry.target} takes ({have}), not ({parameters})"


def _names_of(found: Any) -> set[str]:
    if isinstance(found, type):
        return {
            name for each in found.__mro__ for name in (*vars(each), *inspect.get_annotations(each))
        }
    return set(inspect.unwrap(found).__code__.co_names)


def raw(found: Any) -> Any:
    """The function itself, of a method that is bound to its class."""
    return getattr(found, "__func__", found)
