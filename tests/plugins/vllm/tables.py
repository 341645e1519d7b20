# SPDX-License-Identifier: Apache-2.0
"""python -m tests.plugins.vllm.tables SITE ...: write names.txt, the names that weft relies on.

SITE is a folder with `vllm/` and `vllm-VERSION.dist-info/` of a wheel, of which nothing is
imported. A line has a name, the versions that agree, the parameters in brackets where weft relies
on them, and the attributes or fields that weft uses and the wheel has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tests.plugins.sources import Function, Sources, names, parameters, version_of
from weft.plugins.names import relied_on
from weft.plugins.vllm import allreduce, engine

TABLE = Path(__file__).with_name("names.txt")
ENTRIES = (*engine.KNOWN, *engine.DERIVED, *allreduce.KNOWN)


def row(takes: str | None, has: Iterable[str]) -> str:
    """Return the end of a line: "(self, layer) apply quant_method"."""
    return " ".join(([] if takes is None else [f"({takes})"]) + sorted(has))


def read(site: Path) -> dict[str, str]:
    """Return the rows of one wheel."""
    sources, found = Sources(site), {}
    for entry, expected in relied_on(ENTRIES, version_of(site, "vllm")):
        node = sources.find(entry.target)
        if node is not None:
            relied = expected is not None and isinstance(node, Function)
            takes = parameters(node) if relied else None
            found[entry.target] = row(takes, names(node) & set(entry.names.split()))
    return found


def lines_of(versions: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines of all versions."""
    agree: dict[tuple[str, str], list[str]] = {}
    for target in dict.fromkeys(each for rows in versions.values() for each in rows):
        for version, rows in versions.items():
            if target in rows:
                agree.setdefault((target, rows[target]), []).append(version)
    return [f"{name} {'|'.join(which)} {text}".rstrip() for (name, text), which in agree.items()]


def known() -> dict[str, dict[str, str]]:
    """Return the rows that are on record, by version."""
    found: dict[str, dict[str, str]] = {}
    for line in TABLE.read_text().splitlines():
        target, versions, *text = line.split(" ", 2)
        for version in versions.split("|"):
            found.setdefault(version, {})[target] = "".join(text)
    return found


if __name__ == "__main__":
    rows_of = {version_of(each, "vllm"): read(each) for each in map(Path, sys.argv[1:])}
    TABLE.write_text("\n".join(lines_of(rows_of)) + "\n")
