# SPDX-License-Identifier: Apache-2.0
"""python -m tests.plugins.tables SITE ...: write names.txt, the names that weft relies on.

SITE is a folder with a wheel's package and its metadata, of which nothing is imported. A line has a
name, the versions that agree, the parameters in brackets where weft relies on them, and the
attributes or fields that weft uses and the wheel has. Rows of wheels that are not given stay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from tests.plugins.sources import Function, Sources, names, parameters, version_of
from weft.plugins.engine_api import Engine, ExpectedAPI, select_signatures
from weft.plugins.sglang.hooks import SGLANG
from weft.plugins.vllm.engine import VLLM

TABLE = Path(__file__).with_name("names.txt")


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
    for entry, expected in select_signatures(
        entries_of(engine), engine.match_release(installed) or installed
    ):
        node = sources.find(entry.target)
        if node is not None:
            relied = expected is not None and isinstance(node, Function)
            takes = parameters(node) if relied else None
            result[entry.target] = row(takes, names(node) & set(entry.attributes.split()))
    return result


def lines_of(versions: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines of all versions."""
    agree: dict[tuple[str, str], list[str]] = {}
    for target in dict.fromkeys(each for rows in versions.values() for each in rows):
        for version, rows in versions.items():
            if target in rows:
                agree.setdefault((target, rows[target]), []).append(version)
    return [f"{name} {'|'.join(which)} {text}".rstrip() for (name, text), which in agree.items()]


def known() -> dict[str, dict[str, str]]:
    """Return the recorded rows, by version."""
    result: dict[str, dict[str, str]] = {}
    for line in TABLE.read_text().splitlines():
        target, versions, *text = line.split(" ", 2)
        for version in versions.split("|"):
            result.setdefault(version, {})[target] = "".join(text)
    return result


if __name__ == "__main__":
    rows_of = known()
    for site in map(Path, sys.argv[1:]):
        engine = SGLANG if (site / "sglang").is_dir() else VLLM
        rows_of[version_of(site, engine.packages[0])] = read(site, engine)
    TABLE.write_text("\n".join(lines_of(rows_of)) + "\n")
