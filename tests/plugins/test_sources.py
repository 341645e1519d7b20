# SPDX-License-Identifier: Apache-2.0
"""The plug-ins' names, compared with the engines' sources, which are parsed without import.

WEFT_SGLANG_SITE and WEFT_VLLM_SITE are folders with a wheel's package and metadata. Without them
names are compared with names.txt. The stand-ins have what the plug-ins' tables name.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.plugins.sources import differences, version_of
from tests.plugins.tables import entries_of, known, read, row
from weft.plugins.engine_api import Engine, ExpectedAPI, select_signatures
from weft.plugins.sglang.hooks import SGLANG
from weft.plugins.vllm.engine import VLLM

NAMES = known()
ENGINES = pytest.mark.parametrize("engine", [SGLANG, VLLM], ids=lambda engine: engine.name)


@ENGINES
def test_every_name_is_on_record(engine: Engine) -> None:
    for version in engine.supported:
        for entry, expected in select_signatures(entries_of(engine), version):
            wanted = row(expected, entry.attributes.split())
            assert NAMES[version][entry.target] == wanted, entry.target


@ENGINES
def test_the_record_is_of_the_wheel(engine: Engine) -> None:
    folder = os.environ.get(f"WEFT_{engine.name.upper()}_SITE")
    if folder is None:
        pytest.skip("needs the engine's sources")
    site = Path(folder)
    version = version_of(site, engine.packages[0])
    release = engine.match_release(version)
    assert release is not None
    assert differences(site, entries_of(engine), release) == []
    assert NAMES[release] == read(site, engine)


def test_differences_are_found(tmp_path: Path) -> None:
    """They are found through re-exports, classes, annotated names and every kind of parameter."""
    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from sglang.srt.far import *\nfrom .near import g as f\n")
    (package / "far.py").write_text(
        "class A:\n    def __init__(self, x, y=1, *, z=2):\n        self.x = x\n"
    )
    (package / "near.py").write_text("def g(a, *rest, b, **more): ...\nLIST: list[int] = []\n")
    known = (
        ExpectedAPI("sglang.srt.A.__init__", "self, x, y=, *, z=", attributes="x"),
        ExpectedAPI("sglang.srt.f", "a, *rest, b, **more"),
        ExpectedAPI("sglang.srt.near.LIST"),
    )
    assert differences(tmp_path, known, SGLANG.supported[-1]) == []
    wrong = (
        ExpectedAPI("sglang.srt.A.__init__", "self, x", attributes="x w"),
        ExpectedAPI("sglang.srt.A.forward", "self"),
        ExpectedAPI("sglang.srt.near.TUPLE"),
        ExpectedAPI("sglang.lang.f"),
    )
    assert differences(tmp_path, wrong, SGLANG.supported[-1]) == [
        "sglang.srt.A.__init__ takes (self, x, y=, *, z=), not (self, x)",
        "sglang.srt.A.__init__ has no w",
        "sglang.srt.A.forward is missing",
        "sglang.srt.near.TUPLE is missing",
        "sglang.lang.f is missing",
    ]
