# SPDX-License-Identifier: Apache-2.0
"""Fixtures that run the engine benchmarks on a stand-in of an engine.

They say which by a fixture `engine`, or a parameter of this name.
"""

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

from tests.bench import stand_in_sglang, stand_in_vllm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TREES = {"sglang": stand_in_sglang.write_tree, "vllm": stand_in_vllm.write_tree}


@pytest.fixture
def measure(engine: str, tmp_path: Path) -> Callable[..., tuple[int, str, list[dict[str, Any]]]]:
    """Return `measure("decode", *options, NAME=value)` -> (exit status, output, results)."""
    TREES[engine](tmp_path / "pack")

    def run(*arguments: str, **environment: str) -> tuple[int, str, list[dict[str, Any]]]:
        places = {"PACK": tmp_path / "pack", "PACK_SITE": tmp_path / "pack"}
        places |= {"OUT": tmp_path / "out", "PACK_HOME": tmp_path / "home"}
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
        results = tmp_path / "out" / "results.jsonl"
        lines = results.read_text().splitlines() if results.exists() else []
        return ended.returncode, ended.stdout + ended.stderr, [json.loads(one) for one in lines]

    return run


@pytest.fixture
def script(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[str], types.ModuleType]]:
    """Return `script("report")`, which imports a script as its folder's modules do."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("PACK_SITE", str(tmp_path))
    for place in (engine, f"{engine}/plugins", f"{engine}/pack", "engines"):
        monkeypatch.syspath_prepend(str(BENCHMARKS / place))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]
