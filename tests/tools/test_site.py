"""The site builds without a warning, has every public name, and lists what docstrings list."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="pip install -e '.[dev]'")

from tests.recorded import reads
from tools.site import API, public_names, with_lists

ROOT = Path(__file__).resolve().parents[2]


@reads("mkdocs.yml", "docs/*.md", "weft/**/*.py", "tools/site.py")
def test_every_public_name_is_on_its_page(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", tmp_path]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for name, (_, modules) in API.items():
        page = (tmp_path / f"api/{name}.html").read_text()
        shown = {each.rsplit(".", 1)[-1] for each in re.findall(r'<h2 id="([^"]+)"', page)}
        assert {each for module in modules for each in public_names(module)} <= shown
        assert "_defines" not in page
    operators = (tmp_path / "api/operators.html").read_text()
    assert "AllToAll.history" in operators, "inherited members are shown"


def test_parameters_become_a_list():
    text = 'Do.\n\nx: rows\n    of tokens.   y, z: "a": one.\nRaises nothing.\n\nNote: plain.'
    listed = '- `x`: rows of tokens.\n- `y`, `z`: "a": one. Raises nothing.'
    assert with_lists(text) == f"Do.\n\n{listed}\n\nNote: plain."
