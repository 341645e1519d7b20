# SPDX-License-Identifier: Apache-2.0
"""The engine benchmarks: their commands, variants and tables."""

import dataclasses
import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.plugins.settings import FORMS, Settings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_commands_and_variants(engine, script):
    """Each command is an importable script; each variant's settings are valid for the plug-in."""
    text = (
        (BENCHMARKS / engine / "run.sh").read_text().partition("scripts=(")[2].partition(")\n")[0]
    )
    names = {word.split("]=")[1] for word in text.split() if "]=" in word}
    assert len(names) >= 3
    for name in names:
        assert callable(script(name.removesuffix(".py")).main)
    prefix = engine.upper()
    known = {f"WEFT_{prefix}_{field.name.upper()}" for field in dataclasses.fields(Settings)}
    for group in vars(script("variants")).values():
        for variant in group.values() if isinstance(group, dict) else ():
            if hasattr(variant, "environment"):
                assert set(variant.environment) <= known | {FORMS[prefix][0]}, variant
                Settings.read(prefix, variant.environment)


@pytest.mark.parametrize("engine", ["sglang"])
def test_the_newest_line_of_a_case_counts(script, tmp_path):
    report = script("report")
    line = {"bench": "decode", "variant": "stock", "model": "tiny", "gpus": 2, "requests": 4}
    line |= {"machine": {"gpus": []}, "result": {}}
    file = tmp_path / "results.jsonl"
    dates = ("2026-11-23T10", "2026-11-23T12", "2026-11-23T11")
    file.write_text("".join(json.dumps({**line, "date": date}) + "\n" for date in dates))
    assert [each["date"] for each in report.read([file])] == ["2026-11-23T12"]
    file.write_text("{}\n")
    with pytest.raises(SystemExit, match="results.jsonl:1 is not a result"):
        report.read([file])
