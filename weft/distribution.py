# SPDX-License-Identifier: Apache-2.0
"""Installed versions of weft and torch, and detection of another project's package `weft`.

The distribution is called `weft-moe`; the package and the command are called `weft`. The name
`weft` belongs to another project on PyPI, so no text may recommend to install it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from pathlib import Path

from weft.errors import TorchTooOld

NAME = "weft-moe"
_PACKAGE = Path(__file__).resolve().parent
_SUMMARY = "One-sided NVLink communication"  # start of the description, in all versions
_MAIN = b"weft.__main__"  # module that the script of this project's command imports
_SCRIPT_LIMIT = 1 << 16  # bytes of a script that are read


def install_hint(extra: str) -> str:
    """Return the pip command that installs an extra of this weft, for the end of an error.

    The command works for checkouts and wheels, and does not need a package index.
    """
    root = _PACKAGE.parent
    if (root / "pyproject.toml").is_file():
        return f"install weft's {extra!r} extra: pip install -e '{root}[{extra}]'"
    try:
        version = importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        version = "*"
    wheel = f"weft_moe-{version}-py3-none-any.whl"
    return (
        f"install weft's {extra!r} extra from the wheel of this installation: "
        f"pip install './{wheel}[{extra}]' in its folder"
    )


def torch_version() -> str | None:
    """Return the version of the installed torch from its metadata, or None without metadata."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_torch() -> None:
    """Raise TorchTooOld if the installed torch is older than 2.8.

    Does not raise if torch is missing or has no metadata: importing it gives a better error.
    """
    version = torch_version()
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < (2, 8):
        raise TorchTooOld(
            f"weft needs torch 2.8 or newer, but {version} is installed: pip install 'torch>=2.8'"
        )


def find_foreign_installs() -> list[str]:
    """Return the installed distributions, packages and command `weft` of other projects."""
    return [*_find_foreign_distributions(), *_find_foreign_packages(), *_find_foreign_command()]


def _find_foreign_distributions() -> list[str]:
    """Return installed distributions named `weft` that belong to another project."""
    entries = []
    for dist in importlib.metadata.distributions(name="weft"):
        name, summary = dist.metadata["Name"] or "", dist.metadata["Summary"] or ""
        if name.lower() == "weft" and not summary.startswith(_SUMMARY):
            entries.append(f"the distribution weft {dist.version} ({summary[:80] or 'no summary'})")
    return list(dict.fromkeys(entries))


def _find_foreign_packages() -> list[str]:
    """Return packages named `weft` on the import path that belong to another project."""
    entries = []
    for entry in dict.fromkeys(sys.path):
        folder = Path(entry or os.getcwd(), "weft")
        if (folder / "__init__.py").is_file() and not (folder / "device" / "header.cuh").is_file():
            entries.append(f"the package {folder}")
        elif folder.with_suffix(".py").is_file():
            entries.append(f"the module {folder.with_suffix('.py')}")
    return entries


def _find_foreign_command() -> list[str]:
    """Return the command `weft` on the PATH if it belongs to another project."""
    command = shutil.which("weft")
    if command is None:
        return []
    try:
        with open(command, "rb") as file:
            script = file.read(_SCRIPT_LIMIT)
    except OSError:
        return []
    return [] if _MAIN in script else [f"the command {command}"]
