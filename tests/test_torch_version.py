"""An old torch is refused when weft is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def imported_with(torch_version: str, folder: Path) -> subprocess.CompletedProcess[str]:
    info = folder / f"torch-{torch_version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {torch_version}\n"
    )
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    return subprocess.run(
        [sys.executable, "-c", "import weft"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_old_torch_is_refused_with_both_versions(tmp_path: Path) -> None:
    done = imported_with("2.7.1+cu128", tmp_path)
    assert done.returncode == 1
    assert (
        "weft.errors.TorchTooOld: weft needs torch 2.8 or newer, this is 2.7.1+cu128: "
        "pip install 'torch>=2.8'"
    ) in done.stderr


@pytest.mark.parametrize("version", ["2.8.0", "2.11.0.dev20260201+cu130", "3.0.0"])
def test_a_newer_torch_is_not(version: str, tmp_path: Path) -> None:
    assert imported_with(version, tmp_path).stderr == ""
