# SPDX-License-Identifier: Apache-2.0
"""The header tree's digest, and names of sources."""

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


def test_header_digest_covers_path_and_content_of_what_entries_include(tree: Path) -> None:
    digest = source.header_digest.__wrapped__  # past the once-per-process memory
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
    for name in ("notes.md", "x.py"):
        (tree / "device" / name).write_text("1")
    assert digest() == seen[-1]


@pytest.mark.parametrize("name", ["", "a/b", "../a", "-o", "a b", "x" * 101])
def test_names_that_cannot_name_a_file_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a valid file name"):
        source.check_name(name)
