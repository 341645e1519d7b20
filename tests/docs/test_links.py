# SPDX-License-Identifier: Apache-2.0
"""Every relative link of README and docs leads to a file, and to a heading in it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "models/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.M | re.S)


def _anchors(text: str) -> set[str]:
    """Return the names that renderers give to headings."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in headings}


def _broken(path: Path, text: str) -> list[str]:
    result = []
    for target in LINK.findall(CODE.sub("", text)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        if "api/" in name:  # made from docstrings: tests/tools/test_site.py
            continue
        there = path.parent / name if name else path
        if not there.exists():
            result.append(f"{target}: there is no such file")
        elif anchor and anchor not in _anchors(there.read_text() if name else text):
            result.append(f"{target}: there is no such heading")
    return result


def test_links_resolve():
    texts = {path: path.read_text() for path in DOCUMENTS}
    assert sum(len(LINK.findall(text)) for text in texts.values()) > 100
    broken = {path.name: _broken(path, text) for path, text in texts.items()}
    assert {name: links for name, links in broken.items() if links} == {}
