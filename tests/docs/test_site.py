# SPDX-License-Identifier: Apache-2.0
"""The site builds without a warning and shows every public name, without importing weft."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")

from tools.site import public_names, reference_pages

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site with a Python that cannot import torch."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "torch.py").write_text("raise ImportError('the site needs no torch')")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", folder / "out"]
    environment = os.environ | {"PYTHONPATH": str(folder), "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return folder / "out"


def _shown(page: Path) -> set[str]:
    return set(re.findall(r'<h\d id="([\w.]+)"', page.read_text()))


def test_every_public_name_is_on_its_page(site):
    pages = list(reference_pages())
    assert {path.rsplit(".", 1)[1] for *_, paths in pages for path in paths} >= {
        *public_names("weft/public.py"),
        *public_names("weft/moe/__init__.py"),
        *public_names("weft/gemm/__init__.py"),
        *public_names("weft/errors.py"),
    } - {"errors", "reference"}
    for _, _, file, paths in pages:
        assert set(paths) <= _shown(site / file.replace(".md", ".html")), file


def test_inherited_members_are_shown_and_internals_are_not(site):
    members = {"check", "broken", "abort", "history", "waits", "close", "memory_bytes"}
    for name in ("AllToAll", "LowLatencyAllToAll", "AllReduce", "MoE"):
        shown = _shown(site / f"api/weft-{name}.html")
        assert {f"weft.{name}.{member}" for member in members} <= shown
    assert "weft.MoE.__call__" in _shown(site / "api/weft-MoE.html")
    group = _shown(site / "api/weft-Group.html")
    assert {"weft.Group.recover", "weft.Group.barrier", "weft.Group.from_torch"} <= group
    internal = {"vote", "noted", "map_shares", "exchange_fds", "agree", "run_collective", "attach"}
    assert not {f"weft.Group.{name}" for name in internal} & group


def test_search_needs_neither_a_server_nor_a_network(site):
    assert (site / "search/search_index.js").is_file(), "Material's offline plugin"
    scripts = re.findall(r'<script[^>]* src="([^"]+)"', (site / "index.html").read_text())
    assert any("iframe-worker" in script for script in scripts)
    assert all((site / script).is_file() for script in scripts)
