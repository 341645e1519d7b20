# SPDX-License-Identifier: Apache-2.0
"""The header tree's digest, and the display of sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import InvalidArgument
from weft.jit import source


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for room in ("device", "alltoall", "memory"):
        (tmp_path / room).mkdir()
    monkeypatch.setattr(source, "PACKAGE", tmp_path)
    return tmp_path


def digest() -> str:
    return source.header_digest.__wrapped__()  # past the once-per-process memory


def test_header_digest_covers_path_and_content_of_what_entries_include(tree: Path) -> None:
    seen = [digest()]
    large = "// a line of forty characters, as an example\n" * 5000
    for path, text in (
        ("device/a.cuh", "1"),
        ("device/a.cuh", "2"),
        ("alltoall/cpu.cpp", "1"),
        ("alltoall/deep/b.hpp", "1"),
        ("device/large.cuh", large),
        ("device/large.cuh", large[:-10] + "!" + large[-9:]),
    ):
        (tree / path).parent.mkdir(exist_ok=True)
        (tree / path).write_text(text)
        seen.append(digest())
    (tree / "device/a.cuh").rename(tree / "alltoall/a.cuh")
    seen.append(digest())
    assert len(set(seen)) == len(seen)
    (tree / "device/notes.md").write_text("1")
    (tree / "device/x.py").write_text("1")
    assert digest() == seen[-1]


def test_header_digest_is_read_once(tree: Path) -> None:
    source.header_digest.cache_clear()
    try:
        before = source.header_digest()
        (tree / "device/a.cuh").write_text("1")
        assert source.header_digest() == before
    finally:
        source.header_digest.cache_clear()


@pytest.mark.parametrize("name", ["", "a/b", "../a", "-o", "a b", "x" * 101])
def test_names_that_cannot_name_a_file_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a valid file name"):
        source.check_name(name)


def test_numbered_and_clipped() -> None:
    assert source.number_lines("a\n\nb") == "   1 | a\n   2 | \n   3 | b"
    assert source.truncate_log(" warning \n\0") == "warning"
    assert "printed nothing" in source.truncate_log("")
    assert source.truncate_log("x" * 16_100).endswith("100 characters more")
