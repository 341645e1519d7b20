# SPDX-License-Identifier: Apache-2.0
"""Findings of `weft doctor`, their output, and the checks that do not need torch."""

from __future__ import annotations

import importlib
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.distribution import check_torch, find_foreign_installs, torch_version
from weft.errors import SetupError, TorchTooOld

Status: TypeAlias = Literal["ok", "warn", "fail"]
Line: TypeAlias = tuple[str, Status, str, str]  # a Finding without its section
MIN_PYTHON = (3, 11)
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_TORCH_FIX = "pip install 'torch>=2.8'"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. `remedy` is empty if the check passed."""

    section: str
    name: str
    status: Status
    detail: str
    remedy: str = ""


def build_line(
    name: str, passed: bool, detail: str, remedy: str, failure_status: Status = "fail"
) -> Line:
    """Build the line of a check; `failure_status` and `remedy` apply unless it passed."""
    return name, "ok" if passed else failure_status, detail, "" if passed else remedy


def check_basics() -> Iterator[Line]:
    """Check Python, and whether another project named `weft` is installed, without torch."""
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    is_ok = sys.version_info[:2] >= MIN_PYTHON and platform.system() == "Linux"
    yield build_line("python", is_ok, version, "weft needs Linux and Python 3.11 or newer")
    foreign = find_foreign_installs()
    if foreign:
        detail = f"another project is installed: {', '.join(foreign)}"
        remedy = (
            "the PyPI package weft belongs to another project; this one is weft-moe: "
            "pip uninstall weft, then reinstall weft-moe"
        )
        yield "the name weft", "warn", detail, remedy


def find_torch_error() -> Line | None:
    """Import torch; return a line with the error if it cannot be used, otherwise None."""
    try:
        check_torch()
        torch = importlib.import_module("torch")
        # After an interrupted installation often only the folder exists.
        for name in ("__version__", "Tensor", "cuda", "distributed"):
            getattr(torch, name)
    except TorchTooOld as error:
        return "torch", "fail", f"{torch_version()} is installed", str(error)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return "torch", "fail", "not installed", _TORCH_FIX
        return _build_torch_error(error)
    except Exception as error:  # a broken installation may raise anything
        return _build_torch_error(error)
    return None


def _build_torch_error(error: Exception) -> Line:
    text = " ".join(str(error).split())[:400]
    detail = f"{torch_version() or 'unknown version'}, cannot be imported: "
    return "torch", "fail", f"{detail}{type(error).__name__}: {text}", f"reinstall it: {_TORCH_FIX}"


def require_torch() -> None:
    """Raise SetupError or TorchTooOld if torch cannot be used."""
    check_torch()
    error_line = find_torch_error()
    if error_line is not None:
        _, _, detail, remedy = error_line
        raise SetupError(f"torch: {detail}; {remedy}")


def run_checks_without_torch(error_line: Line) -> list[Finding]:
    """Run the checks that do not need torch, and add the error of its import."""
    return [Finding("software", *line) for line in (*check_basics(), error_line)]


def to_json(findings: list[Finding]) -> str:
    """Return the findings as JSON, with the worst status first."""
    statuses = [finding.status for finding in findings]
    worst = next(status for status in ("fail", "warn", "ok") if status in statuses)
    return json.dumps({"status": worst, "findings": [asdict(f) for f in findings]}, indent=1)


def print_findings(console: Console, findings: list[Finding], devices: str) -> None:
    """Print the findings with their remedies, and whether the devices are ready."""
    table = Table(box=None, pad_edge=False, show_header=False)
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            table.add_row(Text(""), Text(section, "bold"), "")
        detail = Text(finding.detail)
        if finding.remedy:
            detail.append(f"\n-> {finding.remedy}", STYLES[finding.status])
        table.add_row(Text(finding.status, STYLES[finding.status]), Text(finding.name), detail)
    console.print(table)
    fails = sum(finding.status == "fail" for finding in findings)
    verdict = f"not ready for {devices}: {fails} to fix" if fails else f"ready for {devices}"
    console.print(Text(f"\n{verdict}", STYLES["fail" if fails else "ok"]))
