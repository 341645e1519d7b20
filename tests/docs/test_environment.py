# SPDX-License-Identifier: Apache-2.0
"""The environment page names every variable that weft reads; quoted errors are weft's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from weft.cli.report import VARIABLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/user/environment.md").read_text()
SOURCES = {path: path.read_text() for path in sorted((ROOT / "weft").rglob("*.py"))}
REPORT = ROOT / "weft/cli/report.py"  # it shows those of a list


def _sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", PAGE, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _first_cells(section: str) -> list[str]:
    rows = [line for line in _sections()[section].splitlines() if line.startswith("|")]
    return [row.split("|")[1] for row in rows[2:]]


def test_the_page_has_every_variable():
    named = {name for cell in _first_cells("Environment variables") for name in _named(cell)}
    text = "".join(text for path, text in SOURCES.items() if path != REPORT)
    read = set(re.findall(r"""["'](WEFT_[A-Z_]+)["']""", text))
    assert {"WEFT_CACHE", "WEFT_HOST", "WEFT_LOG"} <= read
    assert read <= named


def test_the_report_has_them_too():
    named = {name for cell in _first_cells("Environment variables") for name in _named(cell)}
    assert set(VARIABLES) == named
    assert len(VARIABLES) == len(named)


def test_errors_are_quoted_as_they_are():
    texts = [
        node.value
        for source in SOURCES.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    page = (ROOT / "docs/user/troubleshooting.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    # Words of an error, not a name, a setting or a command.
    quoted = {words for row in rows for words in _named(row) if " " in words and "--" not in words}
    assert len(quoted) > 15
    missing = {words for words in quoted if not any(words in text for text in texts)}
    assert missing <= {"Operation not permitted"}  # the kernel's words


def _named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
