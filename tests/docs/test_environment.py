# SPDX-License-Identifier: Apache-2.0
"""The environment page lists every variable that weft reads, and quotes weft's errors."""

import ast
import re
from pathlib import Path

from weft.cli.report import VARIABLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/user/environment.md").read_text()
SOURCES = {path: path.read_text() for path in sorted((ROOT / "weft").rglob("*.py"))}
REPORT = ROOT / "weft/cli/report.py"  # it shows those of a list


def _named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _first_cells(page: str) -> list[str]:
    return [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]


def test_the_page_and_the_report_have_every_variable():
    section = re.split(r"^## (.*)\n", PAGE, flags=re.M)
    table = section[section.index("Environment variables") + 1]
    named = {name for cell in _first_cells(table)[2:] for name in _named(cell)}
    text = "".join(text for path, text in SOURCES.items() if path != REPORT)
    read = set(re.findall(r"""["'](WEFT_[A-Z_]+)["']""", text))
    assert {"WEFT_CACHE", "WEFT_HOST", "WEFT_LOG"} <= read <= named
    assert sorted(VARIABLES) == sorted(named)


def test_quoted_errors_are_current():
    texts = [
        node.value
        for source in SOURCES.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    page = (ROOT / "docs/user/troubleshooting.md").read_text()
    rows = _first_cells(page)
    # Words of an error, not a name, a setting or a command.
    quoted = {words for row in rows for words in _named(row) if " " in words and "--" not in words}
    assert len(quoted) > 15
    missing = {words for words in quoted if not any(words in text for text in texts)}
    assert missing <= {"Operation not permitted"}  # the kernel's words
