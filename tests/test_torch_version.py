# SPDX-License-Identifier: Apache-2.0
"""An old torch is refused when weft is imported; the command works whatever is installed."""

from __future__ import annotations

import json
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


TORCHES = {
    "2.7": (
        "torch-2.7.1.dist-info/METADATA",
        "Name: torch\nVersion: 2.7.1\n",
        "torch 2.8 or newer",
    ),
    "broken": (
        "torch/__init__.py",
        "raise OSError('libcudart.so.12: not found')",
        "libcudart.so.12",
    ),
    "empty": ("torch/__init__.py", "", "cannot be imported: AttributeError"),
    "none": (
        "torch/__init__.py",
        "raise ModuleNotFoundError('No module named torch', name='torch')",
        "not installed",
    ),
}


def weft_with(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "300", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("kind", TORCHES)
def test_the_command_works_whatever_torch_is_installed(kind: str, tmp_path: Path) -> None:
    name, content, text = TORCHES[kind]
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(content)
    code, out, _ = weft_with(tmp_path, "--version")
    assert code == 0
    assert out.startswith("weft ")
    code, out, _ = weft_with(tmp_path, "doctor", "--json")
    (found,) = [each for each in json.loads(out)["findings"] if each["name"] == "torch"]
    assert (code, found["status"]) == (1, "fail")
    assert text in f"{found['detail']} {found['remedy']}"
    assert "'torch>=2.8'" in found["remedy"]
    code, out, _ = weft_with(tmp_path, "doctor", "--report", "-")
    assert code == 1
    assert "torch: fail" in out
    code, out, err = weft_with(tmp_path, "demo")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert text in err


@pytest.mark.parametrize("arguments", [["doctor"], ["cache", "list"]])
def test_a_level_that_is_none_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    code, out, err = weft_with(tmp_path, *arguments, WEFT_LOG="nope")
    assert (code, out) == (2, "")
    assert err == "InvalidArgument: WEFT_LOG is 'nope'; set it to debug, info, warning, error\n"
    code, out, _ = weft_with(tmp_path, "--version", WEFT_LOG="nope")
    assert (code, out[:5]) == (0, "weft ")
