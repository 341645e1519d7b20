# SPDX-License-Identifier: Apache-2.0
"""What holds of the scripts of every engine: their commands, and the variants they compare."""

from __future__ import annotations

import dataclasses

import pytest

from tests.bench.conftest import BENCHMARKS
from weft.plugins.settings import FORMS, Settings

READS = pytest.mark.slow
pytestmark = [READS, pytest.mark.parametrize("engine", ["sglang", "vllm"])]


def test_a_wrong_command_is_refused(measure, engine, tmp_path):
    """Before anything is begun, in words."""
    code, said, _ = measure("sing")
    assert (code, "run.sh " in said) == (2, True)
    code, said, _ = measure("decode", "--model", "tiny", "--variants", "stocks")
    assert (code, "no variant stocks; there are stock, " in said) == (1, True)
    code, said, _ = measure("decode", PACK_SITE="", PACK=str(tmp_path))
    assert (code, "run.sh: no " in said) == (2, True)


def test_commands_and_variants(engine, script):
    """Each command is a script that imports; each variant's settings are some of the plug-in's."""
    text = (BENCHMARKS / engine / "run.sh").read_text()
    inside = text[text.index("scripts=(") : text.index(")\n", text.index("scripts=("))]
    names = {word.split("]=")[1] for word in inside.split() if "]=" in word}
    assert len(names) >= 3
    for name in names:
        assert callable(script(name.removesuffix(".py")).main)
    known = {
        f"WEFT_{engine.upper()}_{field.name.upper()}" for field in dataclasses.fields(Settings)
    }
    for group in vars(script("variants")).values():
        for variant in group.values() if isinstance(group, dict) else ():
            if hasattr(variant, "environment"):
                assert set(variant.environment) <= known | {FORMS[engine.upper()][0]}, variant
                Settings.read(engine.upper(), variant.environment)
