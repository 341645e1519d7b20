# SPDX-License-Identifier: Apache-2.0
"""Findings of `weft doctor`: their output, and the checks that need no torch."""

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
_TORCH = "pip install 'torch>=2.8'"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check, with a remedy unless nothing is wrong."""

    section: str
    name: str
    status: Status
    detail: str
    remedy: str = ""


def line(name: str, good: bool, detail: str, remedy: str, bad: Status = "fail") -> Line:
    """Return a line. If not good, it has status `bad` and the remedy."""
    return name, "ok" if good else bad, detail, "" if good else remedy


def basic_lines() -> Iterator[Line]:
    """Yield the checks without torch: Python, and which project's `weft` is installed."""
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    good = sys.version_info[:2] >= MIN_PYTHON and platform.system() == "Linux"
    yield line("python", good, version, "weft needs Linux and Python 3.11 or newer")
    foreign = find_foreign_installs()
    if foreign:
        detail = f"of another project: {', '.join(foreign)}"
        remedy = (
            "the name weft belongs to another project on PyPI; this one is installed as weft-moe: "
            "pip uninstall weft, then install this one again"
        )
        yield "the name weft", "warn", detail, remedy


def torch_problem() -> Line | None:
    """Import torch, and return why it cannot be used, or None."""
    try:
        check_torch()
        torch = importlib.import_module("torch")
        # An interrupted installation often leaves only the folder.
        for name in ("__version__", "Tensor", "cuda", "distributed"):
            getattr(torch, name)
    except TorchTooOld as error:
        return "torch", "fail", f"{torch_version()} is installed", str(error)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return "torch", "fail", "not installed", _TORCH
        return _broken_torch(error)
    except Exception as error:  # a broken installation may raise anything
        return _broken_torch(error)
    return None


def _broken_torch(error: Exception) -> Line:
    text = " ".join(str(error).split())[:400]
    detail = f"{torch_version() or 'unknown version'}, cannot be imported: "
    return "torch", "fail", f"{detail}{type(error).__name__}: {text}", f"reinstall it: {_TORCH}"


def require_torch() -> None:
    """Raise SetupError or TorchTooOld, with one line, if torch cannot be used."""
    check_torch()
    problem = torch_problem()
    if problem is not None:
        _, _, detail, remedy = problem
        raise SetupError(f"torch: {detail}; {remedy}")


def examine_without_torch(problem: Line) -> list[Finding]:
    """Return the findings of a machine where torch cannot be used."""
    return [Finding("software", *each) for each in (*basic_lines(), problem)]


def to_json(findings: list[Finding]) -> str:
    """Return the findings as JSON, with the worst status first."""
    statuses = [finding.status for finding in findings]
    worst = next(status for status in ("fail", "warn", "ok") if status in statuses)
    return json.dumps({"status": worst, "findings": [asdict(f) for f in findings]}, indent=1)


def print_findings(console: Console, findings: list[Finding], devices: str) -> None:
    """Print one line per finding, with remedies below, and a verdict for these devices."""
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
