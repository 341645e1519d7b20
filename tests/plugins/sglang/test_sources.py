"""The hooks beside SGLang's own sources, which are parsed and never imported.

WEFT_SGLANG_SITE is a folder with `sglang/` of a wheel. The stand-in goes through the same check, so
it cannot drift away from the table either.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.sglang.server import STANDIN
from weft.plugins.names import Known, relied_on
from weft.plugins.sglang import allreduce, engine
from weft.plugins.sglang.hooks import SGLANG, Hook

ENTRIES: tuple[Hook | Known, ...] = (*engine.HOOKS, *engine.KNOWN)
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
        """What the target's last name is bound to, by definition, assignment or import."""
        parts = target.split(".")
        for length in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:length])
            module = self.module(name)
            if module is not None:
                found: ast.AST | None = self.bound(name, module, parts[length])
                for part in parts[length + 1 :]:
                    found = next(named(getattr(found, "body", []), part), None)
                return found
        return None

    def bound(self, name: str, module: ast.Module, wanted: str) -> ast.AST | None:
        direct = next(named(module.body, wanted), None)
        if direct is not None:
            return direct
        for node in ast.walk(module):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            for alias in node.names:
                if alias.name == "*" or wanted in (alias.asname, alias.name):
                    source = node.module if not node.level else f"{name}.{node.module}"
                    other = self.module(source)
                    if other is not None and other is not module:
                        real = wanted if alias.name == "*" else alias.name
                        found = self.bound(source, other, real)
                        if found is not None:
                            return found
        return None


def named(body: list[ast.stmt], wanted: str) -> Iterator[ast.AST]:
    """Statements of a body that bind a name."""
    for node in body:
        if isinstance(node, (*Function, ast.ClassDef)) and node.name == wanted:
            yield node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(each, ast.Name) and each.id == wanted for each in targets):
            yield node


def parameters(function: ast.AST) -> str:
    """As weft.plugins.names.listed writes them."""
    assert isinstance(function, Function)
    given = function.args
    plain = [each.arg for each in (*given.posonlyargs, *given.args)]
    without = len(plain) - len(given.defaults)
    found = [name + "=" * (place >= without) for place, name in enumerate(plain)]
    if given.vararg:
        found.append("*" + given.vararg.arg)
    elif given.kwonlyargs:
        found.append("*")
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    found += [each.arg + "=" * (default is not None) for each, default in pairs]
    if given.kwarg:
        found.append("**" + given.kwarg.arg)
    return ", ".join(found)


def release(site: Path) -> str:
    """What the wheel's own `_version.py` says; without one, the oldest that is served."""
    file = site / "sglang" / "_version.py"
    if not file.is_file():
        return SGLANG.served[0]
    found = re.search(r"^__version__ = .*'([^']+)'$", file.read_text(), re.MULTILINE)
    assert found is not None
    known = SGLANG.release(found[1])
    assert known is not None, f"{found[1]} is not among {SGLANG.served}"
    return known


def differences(site: Path, entries: tuple[Hook | Known, ...]) -> list[str]:
    sources, found = Sources(site), []
    for entry, expected in relied_on(entries, release(site)):
        node = sources.find(entry.target)
        if node is None:
            found.append(f"{entry.target} is missing")
            continue
        if expected is not None and parameters(node) != expected:
            found.append(f"{entry.target} takes ({parameters(node)}), not ({expected})")
        inside = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
        names = entry.names if isinstance(entry, Known) else ""
        if lost := set(names.split()) - inside:
            found.append(f"{entry.target} has no {', '.join(sorted(lost))}")
    return found


SITES = [pytest.param(Path(STANDIN), ENTRIES, id="stand-in")]
if "WEFT_SGLANG_SITE" in os.environ:
    wheel, sums = Path(os.environ["WEFT_SGLANG_SITE"]), (*allreduce.HOOKS, *allreduce.KNOWN)
    SITES.append(pytest.param(wheel, (*ENTRIES, *sums), id="sources"))


@pytest.mark.parametrize(("site", "entries"), SITES)
def test_every_entry_is_in_the_sources(site: Path, entries: tuple[Hook | Known, ...]) -> None:
    """Names, signatures and attributes."""
    assert differences(site, entries) == []


def test_what_differs_is_found(tmp_path: Path) -> None:
    """A check that finds nothing must be able to find something."""
    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from sglang.srt.far import *\nfrom .near import g as f\n")
    (package / "far.py").write_text(
        "class A:\n    def __init__(self, x, y=1, *, z=2):\n        self.x = x\n"
    )
    (package / "near.py").write_text("def g(a, *rest, b, **more): ...\nLIST: list[int] = []\n")
    known = (
        Known("sglang.srt.A.__init__", "self, x, y=, *, z=", names="x"),
        Known("sglang.srt.f", "a, *rest, b, **more"),
        Known("sglang.srt.near.LIST"),
    )
    assert differences(tmp_path, known) == []
    wrong = (
        Known("sglang.srt.A.__init__", "self, x", names="x w"),
        Known("sglang.srt.A.forward", "self"),
        Known("sglang.srt.near.TUPLE"),
        Known("sglang.lang.f"),
    )
    assert differences(tmp_path, wrong) == [
        "sglang.srt.A.__init__ takes (self, x, y=, *, z=), not (self, x)",
        "sglang.srt.A.__init__ has no w",
        "sglang.srt.A.forward is missing",
        "sglang.srt.near.TUPLE is missing",
        "sglang.lang.f is missing",
    ]
