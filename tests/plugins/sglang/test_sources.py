# SPDX-License-Identifier: Apache-2.0
"""The hooks beside SGLang's own sources, which are parsed and never imported.

WEFT_SGLANG_SITE is a folder with a wheel's `sglang/` and metadata. The stand-in goes through the
same check, so it cannot drift away from the table either.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.plugins.sglang.server import STANDIN
from tests.plugins.sources import differences, version_of
from weft.plugins.names import Known
from weft.plugins.sglang import allreduce, engine
from weft.plugins.sglang.hooks import SGLANG

ENTRIES = (*engine.HOOKS, *engine.KNOWN, *allreduce.HOOKS, *allreduce.KNOWN)


SITES = [pytest.param(Path(STANDIN), id="stand-in")]
if "WEFT_SGLANG_SITE" in os.environ:
    SITES.append(pytest.param(Path(os.environ["WEFT_SGLANG_SITE"]), id="sources"))


@pytest.mark.parametrize("site", SITES)
def test_every_entry_is_in_the_sources(site: Path) -> None:
    """Names, signatures and attributes."""
    release = SGLANG.release(version_of(site, "sglang"))
    assert release is not None
    assert differences(site, ENTRIES, release) == []


def test_what_differs_is_found(tmp_path: Path) -> None:
    """A check that finds nothing must be able to find something."""
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
