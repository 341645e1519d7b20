# SPDX-License-Identifier: Apache-2.0
"""Tests that passed before on the very files that they read, and need not run again.

A campaign searches a state space, breaks a kernel in sixty ways or reads machine code: it takes
minutes, and comes out the same until something that it reads changes. `reads(...)` marks its tests.
recorded.json says for each on which digest of its files it passed: with that digest it is skipped,
and counted, with any other it runs here and now. `make record` (`pytest --record`) runs all of
them, whatever is on record, and writes down which passed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REASON = "on record: it passed with the same files; `make record` runs it again"
# As in `#include <weft/device/copy.cuh>`, also where a part of it is filled in.
_HEADER = re.compile(r"weft/[\w/{}' .]+\.(?:cuh|hpp|cpp)\b")
_FILLED_IN = re.compile(r"\{[^}]*\}")
_DOTTED = re.compile(r'"((?:weft|tests)(?:\.\w+)+)"')  # as importlib.import_module takes it
_DIGEST = "digest of what it reads"


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:  # its tests say so, or it is of a toolkit
        return f"{package} of an unknown version"


NVRTC = _version("nvidia-cuda-nvrtc")
TRITON = _version("triton")
TORCH = _version("torch")
TRANSFORMERS = _version("transformers")


def reads(*files: str, tools: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Mark tests whose outcome follows from these files: patterns from the repository's root.

    Their own module belongs to them unsaid, and so does whatever these files import, include or
    name as one of weft's headers, to any depth. tools: versions of programs that decide, too.
    """
    return pytest.mark.reads(*files, tools=tools)


class Sources:
    """What files of a repository lead to, and the digest of all that."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._next = functools.cache(self._leads_to)
        self._content = functools.cache(lambda path: hashlib.sha256(path.read_bytes()).hexdigest())
        self.digest = functools.cache(self._digest)

    def reached(self, patterns: tuple[str, ...]) -> list[Path]:
        """Every file that those of some patterns lead to, themselves included, in order."""
        todo = [path for pattern in patterns for path in self._matching(pattern)]
        found: set[Path] = set()
        while todo:
            path = todo.pop()
            if path not in found:
                found.add(path)
                todo += self._next(path)
        return sorted(found)

    def _digest(self, patterns: tuple[str, ...], tools: tuple[str, ...]) -> str:
        total = hashlib.sha256("\0".join(tools).encode())
        for path in self.reached(patterns):
            total.update(f"\0{path.relative_to(self._root)}\0{self._content(path)}".encode())
        return total.hexdigest()[:24]

    def _matching(self, pattern: str) -> list[Path]:
        found = [path for path in self._root.glob(pattern) if path.is_file()]
        if not found:
            raise FileNotFoundError(f"reads({pattern!r}): there is no such file in {self._root}")
        return found

    def _leads_to(self, path: Path) -> tuple[Path, ...]:
        text = path.read_text()
        found = [
            header
            for name in _HEADER.findall(text)
            for header in self._root.glob(_FILLED_IN.sub("*", name))
        ]
        if path.suffix == ".py":
            found += self._imports(ast.parse(text))
            found += (file for name in _DOTTED.findall(text) for file in self._module(name))
        return tuple(found)

    def _imports(self, tree: ast.Module) -> Iterator[Path]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._module(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    yield from self._source(node.module, alias.name)

    def _module(self, name: str) -> list[Path]:
        if name.partition(".")[0] not in ("weft", "tests"):
            return []
        place = self._root.joinpath(*name.split("."))
        found = (place.with_suffix(".py"), place / "__init__.py")
        return [path for path in found if path.exists()]

    def _source(self, module: str, name: str) -> list[Path]:
        """Where `from module import name` has it from: of a package, only what it re-exports."""
        if below := self._module(f"{module}.{name}"):
            return below
        found = self._module(module)
        if found and found[0].name == "__init__.py":
            for node in ast.parse(found[0].read_text()).body:
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    for alias in node.names:
                        if name == (alias.asname or alias.name):
                            return self._source(node.module, alias.name)
        return found


class Recorder:
    """Hooks of pytest: skips what is on record; with `record`, runs it and writes down the rest."""

    def __init__(self, root: Path, file: Path, *, record: bool) -> None:
        self._root, self._file, self._record = root, file, record
        self._sources = Sources(root)
        self._known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
        self._passed: dict[str, str] = {}
        self._ran: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip every test that is on record with its digest of now."""
        for item in items:
            marks = list(item.iter_markers("reads"))
            if not marks or item.get_closest_marker("gpu") is not None:
                continue
            own = str(item.path.relative_to(self._root))
            files = (own, *(file for mark in marks for file in mark.args))
            tools = tuple(tool for mark in marks for tool in mark.kwargs["tools"])
            digest = self._sources.digest(files, tools)
            if not self._record and self._known.get(item.nodeid) == digest:
                item.add_marker(pytest.mark.skip(reason=REASON))
            else:
                item.user_properties.append((_DIGEST, digest))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test went, be it of this process or of a worker."""
        digest = dict(report.user_properties).get(_DIGEST)
        if digest is None or report.skipped:
            return
        self._ran.add(report.nodeid)
        if report.failed:
            self._passed.pop(report.nodeid, None)
        elif report.when == "call":
            self._passed[report.nodeid] = str(digest)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write down what passed. What did not run stays, unless all tests were asked for."""
        config = session.config
        if not self._record or hasattr(config, "workerinput"):
            return
        whole = not (config.option.file_or_dir or config.option.keyword)
        known = {} if whole else self._known
        kept = {name: digest for name, digest in known.items() if name not in self._ran}
        self._file.write_text(f"{json.dumps(kept | self._passed, indent=0, sort_keys=True)}\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report tests that ran because they were not on record."""
        if self._ran and not self._record:
            terminalreporter.write_line(
                f"{len(self._ran)} tests ran that are not on record with their files of now; "
                "`make record` writes down that they pass, and spares their time"
            )
