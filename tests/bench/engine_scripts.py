"""How tests run the scripts that measure inside engines, on a stand-in of an engine."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHARED = BENCHMARKS / "engines"
Ran = tuple[int, str, list[dict[str, Any]]]


def measuring(engine: str, write_tree: Callable[[Path], None], folder: Path) -> Callable[..., Ran]:
    """`measure("decode", *options, NAME=value)` -> exit status, what was printed, the results."""
    write_tree(folder / "pack")

    def run(*arguments: str, **environment: str) -> Ran:
        places = {"PACK": folder / "pack", "PACK_SITE": folder / "pack"}
        places |= {"OUT": folder / "out", "PACK_HOME": folder / "home"}
        set_ = {name: str(place) for name, place in places.items()}
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        ended = subprocess.run(
            [str(BENCHMARKS / engine / "run.sh"), *arguments],
            env=kept | set_ | {"PYTHON": sys.executable, **environment},
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        results = folder / "out" / "results.jsonl"
        lines = results.read_text().splitlines() if results.exists() else []
        return ended.returncode, ended.stdout + ended.stderr, [json.loads(one) for one in lines]

    return run


def importing(
    monkeypatch: pytest.MonkeyPatch, out: Path, *folders: Path
) -> Iterator[Callable[[str], types.ModuleType]]:
    """`script("report")` imports a script as its folder's modules import each other."""
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setenv("PACK_SITE", str(out))
    for place in (*folders, SHARED):
        monkeypatch.syspath_prepend(str(place))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]
