# SPDX-License-Identifier: Apache-2.0
"""Compare an engine's sources, parsed without import, with a table of names."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from weft.plugins.engine_api import ExpectedAPI, select_signatures

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Sources:
    """Modules of a folder, by dotted name."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.parsed: dict[Path, ast.Module] = {}

    def module(self, name: str) -> ast.Module | None:
        path = self.site.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                if file not in self.parsed:
                    self.parsed[file] = ast.parse(file.read_text())
                return self.parsed[file]
        return None

    def find(self, target: str) -> ast.AST | None:
        """Return the definition, assignment or import of the target's last name."""
        parts = target.split(".")
        for length in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:length])
            module = self.module(name)
            if module is not None:
                result = self.bound(name, module, parts[length])
                for part in parts[length + 1 :]:
                    result = self.member(*result, part) if result else None
                return result[1] if result else None
        return None

    def member(self, name: str, owner: ast.AST, wanted: str) -> tuple[str, ast.AST] | None:
        """Return a member of a class of the module `name`, its own or inherited."""
        direct = next(named(getattr(owner, "body", []), wanted), None)
        if direct is not None:
            return name, direct
        module = self.module(name)
        assert module is not None
        for base in getattr(owner, "bases", []):
            parent = self.bound(name, module, base.id) if isinstance(base, ast.Name) else None
            if parent and (result := self.member(*parent, wanted)):
                return result
        return None

    def bound(self, name: str, module: ast.Module, wanted: str) -> tuple[str, ast.AST] | None:
        """Return what a module binds to a name, and the module of the definition."""
        direct = next(named(module.body, wanted), None)
        if direct is not None:
            return name, direct
        for node in ast.walk(module):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            for alias in node.names:
                if alias.name == "*" or wanted in (alias.asname, alias.name):
                    source = node.module if not node.level else f"{name}.{node.module}"
                    other = self.module(source)
                    if other is not None and other is not module:
                        real = wanted if alias.name == "*" else alias.name
                        result = self.bound(source, other, real)
                        if result is not None:
                            return result
        return None


def named(body: list[ast.stmt], wanted: str) -> Iterator[ast.AST]:
    """Yield the statements of a body that bind a name."""
    for node in body:
        if isinstance(node, (*Function, ast.ClassDef)) and node.name == wanted:
            yield node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(each, ast.Name) and each.id == wanted for each in targets):
            yield node


def parameters(function: ast.AST) -> str:
    """List the parameters as weft.plugins.engine_api.format_signature does."""
    assert isinstance(function, Function)
    inputs = function.args
    plain = [each.arg for each in (*inputs.posonlyargs, *inputs.args)]
    without = len(plain) - len(inputs.defaults)
    result = [name + "=" * (place >= without) for place, name in enumerate(plain)]
    if inputs.vararg:
        result.append("*" + inputs.vararg.arg)
    elif inputs.kwonlyargs:
        result.append("*")
    pairs = zip(inputs.kwonlyargs, inputs.kw_defaults, strict=True)
    result += [each.arg + "=" * (default is not None) for each, default in pairs]
    if inputs.kwarg:
        result.append("**" + inputs.kwarg.arg)
    return ", ".join(result)


def names(node: ast.AST) -> set[str]:
    """Return the attributes that a function reads or sets, or the names that a class binds."""
    if isinstance(node, ast.ClassDef):
        bound = [*node.body]
        targets = [getattr(each, "target", None) for each in bound]
        return {each.id for each in targets if isinstance(each, ast.Name)} | {
            each.name for each in bound if isinstance(each, (*Function, ast.ClassDef))
        }
    return {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def version_of(site: Path, package: str) -> str:
    """Return a wheel's version, by the name of its metadata."""
    result = next(site.glob(f"{package}-*.dist-info"))
    return result.name.removeprefix(f"{package}-").removesuffix(".dist-info")


def differences(site: Path, entries: Iterable[ExpectedAPI], release: str) -> list[str]:
    """Return a line for each entry of a version that is missing or differs in the sources."""
    sources, result = Sources(site), []
    for entry, expected in select_signatures(entries, release):
        node = sources.find(entry.target)
        if node is None:
            result.append(f"{entry.target} is missing")
            continue
        if expected is not None and parameters(node) != expected:
            result.append(f"{entry.target} takes ({parameters(node)}), not ({expected})")
        if lost := set(entry.attributes.split()) - names(node):
            result.append(f"{entry.target} has no {', '.join(sorted(lost))}")
    return result
