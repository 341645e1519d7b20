# SPDX-License-Identifier: Apache-2.0
"""The plug-ins' names beside the engines' own sources, which are parsed and never imported.

WEFT_SGLANG_SITE and WEFT_VLLM_SITE are folders with a wheel's package and metadata. Without them
vLLM's names are compared with names.txt, which tables.py read in three wheels. The stand-ins go
through the plug-ins' own check in every test that loads them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.plugins.sources import differences, version_of
from tests.plugins.vllm.tables import ENTRIES, known, read, row
from weft.plugins.names import Known, relied_on
from weft.plugins.sglang import allreduce, engine
from weft.plugins.sglang.hooks import SGLANG
from weft.plugins.vllm.engine import VLLM

NAMES = known()


@pytest.mark.parametrize("version", VLLM.served)
def test_every_name_is_on_record(version: str) -> None:
    for entry, expected in relied_on(ENTRIES, version):
        assert NAMES[version][entry.target] == row(expected, entry.names.split()), entry.target
    assert set(NAMES) == set(VLLM.served)


@pytest.mark.skipif("WEFT_SGLANG_SITE" not in os.environ, reason="needs SGLang's sources")
def test_every_name_is_in_sglang() -> None:
    site = Path(os.environ["WEFT_SGLANG_SITE"])
    release = SGLANG.release(version_of(site, "sglang"))
    assert release is not None
    entries = (*engine.HOOKS, *engine.KNOWN, *allreduce.HOOKS, *allreduce.KNOWN)
    assert differences(site, entries, release) == []


@pytest.mark.skipif("WEFT_VLLM_SITE" not in os.environ, reason="needs vLLM's sources")
def test_the_record_is_of_the_wheel() -> None:
    site = Path(os.environ["WEFT_VLLM_SITE"])
    assert NAMES[version_of(site, "vllm")] == read(site)


def test_what_differs_is_found(tmp_path: Path) -> None:
    """Through re-exports, classes, annotated names and every kind of parameter."""
    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from sglang.srt.far import *\nfrom .near import g as f\n")
    (package / "far.py").write_text(
        "class A:\n    def __init__(self, x, y=1, *, z=2):\n        self.x = x\n"
    )
    (package / "near.py").write_text("def g(a, *rest, b, **more): ...\nLIST: list[int] = []\n")
    known = (
        Known("sglang.srt.A.__init__", "self, x, y=, *, z=", names="x"),
        Known("sglang.srt.f", "a, *rest, b, **more"),
        Known("sglang.srt.near.LIST"),
    )
    assert differences(tmp_path, known, SGLANG.served[-1]) == []
    wrong = (
        Known("sglang.srt.A.__init__", "self, x", names="x w"),
        Known("sglang.srt.A.forward", "self"),
        Known("sglang.srt.near.TUPLE"),
        Known("sglang.lang.f"),
    )
    assert differences(tmp_path, wrong, SGLANG.served[-1]) == [
        "sglang.srt.A.__init__ takes (self, x, y=, *, z=), not (self, x)",
        "sglang.srt.A.__init__ has no w",
        "sglang.srt.A.forward is missing",
        "sglang.srt.near.TUPLE is missing",
        "sglang.lang.f is missing",
    ]
