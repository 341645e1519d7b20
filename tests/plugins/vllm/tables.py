# SPDX-License-Identifier: Apache-2.0
"""python -m tests.plugins.vllm.tables SITE ...: what wheels have of the names that weft relies on.

SITE is a folder with `vllm/` and `vllm-VERSION.dist-info/` of a wheel, of which nothing is
imported. Writes names.json beside this file: for each name and versions that agree, the parameters
in brackets, where weft relies on them, and those of the plug-in's attributes or fields that are
there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.plugins.sources import Function, Sources, names, parameters, version_of
from weft.plugins.names import relied_on
from weft.plugins.vllm import allreduce, engine

TABLE = Path(__file__).with_name("names.json")
ENTRIES = (*engine.KNOWN, *engine.DERIVED, *allreduce.KNOWN)


def row(takes: str | None, has: Iterable[str]) -> str:
    """What a version has of a name: "(self, layer) apply quant_method"."""
    return " ".join(([] if takes is None else [f"({takes})"]) + sorted(has))


def read(site: Path) -> dict[str, str]:
    """The rows of one wheel."""
    sources, found = Sources(site), {}
    for entry, expected in relied_on(ENTRIES, version_of(site, "vllm")):
        node = sources.find(entry.target)
        if node is not None:
            relied = expected is not None and isinstance(node, Function)
            takes = parameters(node) if relied else None
            found[entry.target] = row(takes, names(node) & set(entry.names.split()))
    return found


def merged(versions: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The rows of all versions: name, versions that agree, row."""
    found: dict[str, dict[str, str]] = {}
    for target in dict.fromkeys(each for rows in versions.values() for each in rows):
        agree: dict[str, list[str]] = {}
        for version, rows in versions.items():
            if target in rows:
                agree.setdefault(rows[target], []).append(version)
        found[target] = {" ".join(which): text for text, which in agree.items()}
    return found


def known() -> dict[str, dict[str, str]]:
    """The rows that are on record, by version."""
    found: dict[str, dict[str, str]] = {}
    for target, rows in json.loads(TABLE.read_text()).items():
        for versions, text in rows.items():
            for version in versions.split():
                found.setdefault(version, {})[target] = text
    return found


if __name__ == "__main__":
    rows_of = {version_of(each, "vllm"): read(each) for each in map(Path, sys.argv[1:])}
    TABLE.write_text(json.dumps(merged(rows_of), indent=1) + "\n")
