"""python -m tests.plugins.vllm.tables SITE ...: what wheels have of the names that weft relies on.

SITE is a folder with `vllm/` and `vllm-VERSION.dist-info/` of a wheel, of which nothing is
imported. Writes names.json beside this file: for each version and name, its parameters (null for
what is no function) and those of the plug-in's attributes or fields that are there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.plugins.sources import Function, Sources, names, parameters
from weft.plugins.vllm import allreduce, engine

TABLE = Path(__file__).with_name("names.json")
ENTRIES = (*engine.KNOWN, *engine.DERIVED, *allreduce.KNOWN)


def read(site: Path) -> dict[str, Any]:
    """The rows of one wheel."""
    sources, found = Sources(site), {}
    for entry in ENTRIES:
        node = sources.find(entry.target)
        if node is not None:
            takes = parameters(node) if isinstance(node, Function) else None
            here = names(node) & set(entry.names.split())
            found[entry.target] = {"takes": takes, "has": " ".join(sorted(here))}
    return found


def release(site: Path) -> str:
    """A wheel's version, by the name of its metadata."""
    return next(site.glob("vllm-*.dist-info")).name.removeprefix("vllm-").removesuffix(".dist-info")


if __name__ == "__main__":
    sites = [Path(each) for each in sys.argv[1:]]
    TABLE.write_text(json.dumps({release(each): read(each) for each in sites}, indent=1) + "\n")
