"""The API reference builds without a warning, and has every public name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import weft

pytest.importorskip("pdoc", reason="pip install -e '.[dev]'")

from tools import api_reference


def test_every_public_name_is_on_a_page(tmp_path):
    assert api_reference.build(tmp_path) == []
    page = (tmp_path / "weft.html").read_text()
    names = set(weft.__all__) - {"errors", "reference"}
    assert [name for name in names if f'<section id="{name}">' not in page] == []
    for linked in ("weft/errors.html", "weft/reference.html", "weft/moe.html"):
        assert f'href="{linked}' in page
        assert (tmp_path / linked).is_file()
    assert "PeerTimeout" in (tmp_path / "weft/errors.html").read_text()


def test_names_that_are_missing_are_told(tmp_path, monkeypatch):
    package = tmp_path / "reedsley"
    package.mkdir()
    (package / "__init__.py").write_text(
        '"""Odd."""\n'
        "import json\n"
        '__all__ = ["f", "json", "number"]\n'
        'def f(x: "Nowhere") -> None:\n    """Do."""\n'
        "number = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    wrong = api_reference.build(tmp_path / "pages", ["reedsley"])
    sys.modules.pop("reedsley")
    (annotation, page) = wrong
    assert "Nowhere" in annotation
    assert page == "reedsley.json: json has no page"
    assert Path(tmp_path / "pages/reedsley.html").is_file()
