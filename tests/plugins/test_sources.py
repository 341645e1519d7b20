# SPDX-License-Identifier: Apache-2.0
"""The plug-ins' names, compared with the engines' sources, which are parsed without import.

WEFT_SGLANG_SITE and WEFT_VLLM_SITE are folders with a wheel's package and metadata. Without them
names are compared with names.txt.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.plugins.tables import entries_of, known, read, row, version_of
from weft.plugins.engine_api import Engine, select_signatures
from weft.plugins.sglang.hooks import SGLANG
from weft.plugins.vllm.engine import VLLM

ENGINES = pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda engine: engine.name)


@ENGINES
def test_every_name_is_on_record(engine: Engine) -> None:
    for version in engine.supported:
        for entry, expected in select_signatures(entries_of(engine), version):
            wanted = row(expected, entry.attributes.split())
            assert known()[version][entry.target] == wanted, entry.target


@ENGINES
def test_the_record_is_of_the_wheel(engine: Engine) -> None:
    folder = os.environ.get(f"WEFT_{engine.name.upper()}_SITE")
    if folder is None:
        pytest.skip("needs the engine's sources")
    release = engine.match_release(version_of(Path(folder), engine.packages[0]))
    assert release is not None
    assert known()[release] == read(Path(folder), engine)
