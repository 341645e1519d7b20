# SPDX-License-Identifier: Apache-2.0
"""python -m tests.plugins.tables SITE ...: write names.txt, the names that weft relies on.

SITE is a folder with a wheel's package and its metadata, of which nothing is imported. A line has a
name, the versions that agree, the parameters in brackets where weft relies on them, and the
attributes or fields that weft uses and the wheel has. Rows of wheels that are not given stay.
"""

import ast
import functools
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from weft.plugins.engine_api import Engine, ExpectedAPI, select_signatures
from weft.plugins.sglang.hooks import SGLANG
from weft.plugins.vllm.engine import VLLM

TABLE = Path(__file__).with_name("names.txt")
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
Found = tuple[str, ast.AST] | None  # a definition, assignment or import, and its module's name


class Sources:
    """Modules of a folder, by dotted name."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.module = functools.cache(self._parse)

    def _parse(self, name: str) -> ast.Module | None:
        path = self.site.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text())
        return None

    def find(self, target: str) -> ast.AST | None:
        parts = target.split(".")
        for length in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:length])
            if (module := self.module(name)) is not None:
                result = self.bound(name, module, parts[length])
                for part in parts[length + 1 :]:
                    result = self.member(*result, part) if result else None
                return result[1] if result else None
        return None

    def member(self, name: str, owner: ast.AST, wanted: str) -> Found:
        """Return a member of a class of the module `name`, its own or inherited."""
        if (direct := bound_in(getattr(owner, "body", []), wanted)) is not None:
            return name, direct
        module = self.module(name)
        assert module is not None
        for base in getattr(owner, "bases", []):
            parent = self.bound(name, module, base.id) if isinstance(base, ast.Name) else None
            if parent and (result := self.member(*parent, wanted)):
                return result
        return None

    def bound(self, name: str, module: ast.Module, wanted: str) -> Found:
        """Return what a module binds to a name, also by an import."""
        if (direct := bound_in(module.body, wanted)) is not None:
            return name, direct
        for node in ast.walk(module):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            for alias in node.names:
                if alias.name == "*" or wanted in (alias.asname, alias.name):
                    source = node.module if not node.level else f"{name}.{node.module}"
                    other = self.module(source)
                    real = wanted if alias.name == "*" else alias.name
                    if other not in (None, module) and (result := self.bound(source, other, real)):
                        return result
        return None


def bound_in(body: list[ast.stmt], wanted: str) -> ast.AST | None:
    """Return the statement of a body that binds a name."""
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if getattr(node, "name", None) == wanted or wanted in [
            getattr(t, "id", "") for t in targets
        ]:
            return node
    return None


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """List the parameters as weft.plugins.engine_api.format_signature does."""
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
    return ", ".join(result + (["**" + inputs.kwarg.arg] if inputs.kwarg else []))


def attributes(node: ast.AST) -> set[str]:
    """Return the attributes that a function reads or sets, or the names that a class binds."""
    if isinstance(node, ast.ClassDef):
        names = {getattr(getattr(each, "target", each), "id", "") for each in node.body}
        return names | {getattr(each, "name", "") for each in node.body}
    return {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def version_of(site: Path, package: str) -> str:
    """Return a wheel's version, by the name of its metadata."""
    result = next(site.glob(f"{package}-*.dist-info"))
    return result.name.removeprefix(f"{package}-").removesuffix(".dist-info")


def entries_of(engine: Engine) -> list[ExpectedAPI]:
    """Return what the plug-in's modules rely on."""
    package = f"weft.plugins.{engine.packages[0]}"
    modules = [import_module(f"{package}.{name}") for name in ("engine", "allreduce")]
    tables = ("HOOKS", "EXPECTED_API", "DERIVED_LAYERS")
    return [each for module in modules for name in tables for each in getattr(module, name, ())]


def row(takes: str | None, has: Iterable[str]) -> str:
    """Return the end of a line: "(self, layer) apply quant_method"."""
    return " ".join(([] if takes is None else [f"({takes})"]) + sorted(has))


def read(site: Path, engine: Engine) -> dict[str, str]:
    """Return the rows of one wheel."""
    sources, result = Sources(site), {}
    installed = version_of(site, engine.packages[0])
    release = engine.match_release(installed) or installed
    for entry, expected in select_signatures(entries_of(engine), release):
        node = sources.find(entry.target)
        if node is not None:
            relied = expected is not None
            takes = parameters(node) if relied and isinstance(node, Function) else None
            result[entry.target] = row(takes, attributes(node) & set(entry.attributes.split()))
    return result


def known() -> dict[str, dict[str, str]]:
    """Return the recorded rows, by version."""
    result: dict[str, dict[str, str]] = {}
    for line in TABLE.read_text().splitlines():
        target, versions, *text = line.split(" ", 2)
        for version in versions.split("|"):
            result.setdefault(version, {})[target] = "".join(text)
    return result


if __name__ == "__main__":
    rows_of, agree = known(), dict[tuple[str, str], list[str]]()
    for site in map(Path, sys.argv[1:]):
        engine = SGLANG if (site / "sglang").is_dir() else VLLM
        rows_of[version_of(site, engine.packages[0])] = read(site, engine)
    for target in dict.fromkeys(each for rows in rows_of.values() for each in rows):
        for version, rows in rows_of.items():
            if target in rows:
                agree.setdefault((target, rows[target]), []).append(version)
    lines = (f"{name} {'|'.join(which)} {text}".rstrip() for (name, text), which in agree.items())
    TABLE.write_text("\n".join(lines) + "\n")
