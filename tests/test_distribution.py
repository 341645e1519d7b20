# SPDX-License-Identifier: Apache-2.0
"""The name: nothing tells to install the PyPI package `weft`, which is another project's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from weft import distribution

ROOT = Path(__file__).parents[1]


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    assert distribution.foreign_parts() == []
    return tmp_path


def install(folder: Path, name: str, summary: str) -> None:
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\nSummary: {summary}\n"
    )


def test_a_foreign_distribution_is_found(foreign: Path) -> None:
    install(foreign, "weft", "An agent framework")
    assert distribution.foreign_parts() == ["the distribution weft 1.2 (An agent framework)"]


def test_an_earlier_distribution_of_this_project_is_not(foreign: Path) -> None:
    install(foreign, "weft", "One-sided NVLink communication for MoE inference, with CPU ranks")
    assert distribution.foreign_parts() == []


def test_a_foreign_package_and_module_are_found(foreign: Path) -> None:
    (foreign / "weft").mkdir()
    (foreign / "weft" / "__init__.py").touch()
    assert distribution.foreign_parts() == [f"the package {foreign / 'weft'}"]
    (foreign / "weft" / "__init__.py").unlink()
    (foreign / "weft.py").touch()
    assert distribution.foreign_parts() == [f"the module {foreign / 'weft.py'}"]


@pytest.mark.parametrize(
    ("line", "ours"),
    [("from weft.__main__ import main", True), ("from weft.cli import app", False)],
)
def test_a_foreign_command_is_found(
    line: str, ours: bool, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = foreign / "bin" / "weft"
    command.parent.mkdir()
    command.write_text(f"#!/usr/bin/env python3\n{line}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    assert distribution.foreign_parts() == ([] if ours else [f"the command {command}"])


def test_the_doctor_reports_a_foreign_distribution(foreign: Path) -> None:
    from weft.cli.findings import basic_lines

    install(foreign, "weft", "An agent framework")
    (found,) = [each for each in basic_lines() if each[0] == "the name weft"]
    assert found[1] == "warn"
    assert "An agent framework" in found[2]
    assert "pip uninstall weft" in found[3]


def test_an_extra_is_installed_from_the_checkout_or_from_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"pip install -e '{ROOT}[gpu]'" in distribution.install_hint("gpu")
    monkeypatch.setattr(distribution, "_PACKAGE", tmp_path / "weft")
    assert re.search(
        r"pip install '\./weft_moe-[^']*-py3-none-any\.whl\[plot\]'",
        distribution.install_hint("plot"),
    )


def test_no_text_of_the_code_installs_the_foreign_package() -> None:
    named = re.compile(r"pip[^\n]*(?<!un)install[^\n]*['\" ]weft(?:\[|['\" ]|$)")
    texts = [*(ROOT / "weft").rglob("*.py"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    found = {str(path): named.findall(path.read_text()) for path in texts}
    assert {path: each for path, each in found.items() if each} == {}
    assert named.search("pip install 'weft[gpu]'")
    assert named.search("pip install weft")
