# SPDX-License-Identifier: Apache-2.0
"""What pip installs: built as a release is, installed apart, and run where no checkout is."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

for module in ("hatchling", "hatch_fancy_pypi_readme"):
    pytest.importorskip(module, reason="pip install -e '.[dev]'")

ROOT = Path(__file__).parents[1]
PROGRAM = """
import json
import os
import sys

import torch
import weft


def rank(group):
    x = torch.full((3, 64), group.rank + 1.0, dtype=torch.bfloat16)
    ids, weights = torch.tensor([[0, 3]] * 3), torch.full((3, 2), 0.5)
    with weft.AllToAll(group, max_tokens=4, top_k=2, num_experts=4, hidden=64) as a2a:
        received = a2a.dispatch(x, ids, weights)
        back = a2a.combine(weft.reference.identity_experts(received, x.dtype))
    files = [m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "weft"]
    return [torch.equal(back, x), os.path.commonpath(files)]


if __name__ == "__main__":
    print(json.dumps(weft.launch(rank, ranks=2)))
"""


def _run(*command: str | Path, folder: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that pip makes of the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    _run("-m", "hatchling", "build", "-t", "sdist", "-d", folder, folder=ROOT)
    (source,) = folder.glob("*.tar.gz")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-q")
    _run("-m", "pip", "wheel", *options, "-w", folder, source, folder=folder)
    (made,) = folder.glob("*.whl")
    return made


def _metadata(wheel: Path) -> tuple[email.message.Message, str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        found = email.message_from_string(archive.read(name).decode())
    return found, str(found.get_payload())


def test_the_wheel_is_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        entry_points = archive.read("weft_moe-0.1.0.dist-info/entry_points.txt").decode()
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "weft").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert inside == here
    suffixes = {Path(name).suffix for name in inside}
    assert {".py", ".cuh", ".hpp", ".cpp"} <= suffixes
    assert "weft/py.typed" in inside
    assert "weft = weft.__main__:main" in entry_points


def test_the_metadata_says_what_it_is(wheel):
    found, _ = _metadata(wheel)
    assert found["Name"] == "weft-moe"
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Author"] == "weft developers"
    assert found.get_all("Provides-Extra") == [
        "checkpoint",
        "dev",
        "docs",
        "gpu",
        "plot",
        "transformers",
    ]


def test_the_readme_has_no_link_that_leads_nowhere(wheel):
    found, text = _metadata(wheel)
    assert found["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [target for target in targets if not target.startswith("https://")] == []
    readme = (ROOT / "README.md").read_text()
    assert "[quickstart](docs/user/quickstart.md)" in readme
    assert "Read on: quickstart" in text, "a link's text stays"
    headings = re.compile(r"^#+ .*", re.M)
    assert headings.findall(text) == headings.findall(readme), "and so does all the rest"


def test_it_runs_where_no_checkout_is(wheel, tmp_path):
    installed, folder = tmp_path / "installed", tmp_path / "elsewhere"
    folder.mkdir()
    options = ("--no-deps", "--no-index", "--no-compile", "-q")
    _run("-m", "pip", "install", *options, "--target", installed, wheel, folder=folder)
    (folder / "program.py").write_text(PROGRAM)
    told = _run(
        folder / "program.py",
        folder=folder,
        PYTHONPATH=str(installed),
        WEFT_CACHE=str(folder / "cache"),
        OMP_NUM_THREADS="1",
    )
    assert json.loads(told) == [[True, str(installed / "weft")]] * 2
