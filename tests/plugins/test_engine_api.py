# SPDX-License-Identifier: Apache-2.0
"""Names and signatures that a plug-in relies on, compared with the installed ones."""

from __future__ import annotations

import pytest

from weft.errors import SetupError
from weft.plugins.engine_api import Engine, ExpectedAPI

ENGINE = Engine("Toy", ("no-such-package", "pytest"), ("1.0", "2.0"))
THIS = __name__ + "."


class Toy:
    field: int

    def __init__(self, x: int, y: int = 1, *, z: int = 2) -> None:
        self.x = x

    @classmethod
    def make(cls, a: int, *rest: int, b: int, **more: int) -> None: ...


API = (
    ExpectedAPI(THIS + "Toy", attributes="field make"),
    ExpectedAPI(THIS + "Toy.__init__", {"1.0": "self, x, y=, *, z=", "2.0": "self, x"}, "x"),
    ExpectedAPI(THIS + "Toy.make", "cls, a, *rest, b, **more"),
    ExpectedAPI(THIS + "Toy.remake", {"2.0": "self"}),
)


def test_differences_are_listed_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENGINE.get_version() == pytest.__version__
    assert Engine("Toy", ("no-such-package",), ()).get_version() == "(unknown version)"
    monkeypatch.setattr(Engine, "get_version", lambda self: "1.0.post1")
    ENGINE.check(API)
    assert [entry.target for entry in ENGINE.select_entries(API)] == [e.target for e in API[:3]]
    wrong = ExpectedAPI(THIS + "Toy.__init__", attributes="x w"), ExpectedAPI(THIS + "API", "self")
    monkeypatch.setattr(Engine, "get_version", lambda self: "2.0+cu130")
    with pytest.raises(SetupError) as raised:
        ENGINE.check((*API, *wrong))
    for part in (
        "Toy 2.0+cu130 does not match weft's plug-in, so nothing was patched: ",
        "Toy.__init__ has parameters (self, x, y=, *, z=), not (self, x); ",
        "Toy.remake does not exist",
        "Toy.__init__ has no w; ",
        "API is not a function",
        "Supported: 1.0, 2.0. Install one of them",
    ):
        assert part in str(raised.value)
    assert "version is" not in str(raised.value)


def test_an_unsupported_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its names are equal; they are compared with the closest version."""
    for installed in ("1.00", "1", "11.0", "(unknown version)"):
        monkeypatch.setattr(Engine, "get_version", lambda self, installed=installed: installed)
        assert ENGINE.select_entries(API) == []
        with pytest.raises(SetupError, match="its version is not supported. Supported: 1.0, 2.0"):
            ENGINE.check(API)
