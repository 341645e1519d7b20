# SPDX-License-Identifier: Apache-2.0
"""A kept cache serves a checkout until something changes that compiled code depends on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kept import cache_of, decided_by

FILES = ("weft/device/copy.cuh", "weft/alltoall/cpu.cpp", "weft/jit/host.py", "tests/race.hpp")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (*FILES, "weft/public.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_what_is_compiled_is_a_new_cache(tree: Path, name: str) -> None:
    before = decided_by(tree, "c++")
    (tree / name).write_text("int other;")
    assert decided_by(tree, "c++") != before


def test_another_compiler_is_a_new_cache(tree: Path) -> None:
    compiler = tree / "compiler"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o700)
    before = decided_by(tree, str(compiler))
    os.utime(compiler, (0, 0))
    assert len({before, decided_by(tree, str(compiler)), decided_by(tree, "none")}) == 3


def test_other_caches_are_kept_for_a_day(tree: Path) -> None:
    old = cache_of(tree)
    assert old is not None
    assert old.stat().st_mode & 0o777 == 0o700
    (tree / "weft/public.py").write_text("# Python alone is not compiled")
    assert cache_of(tree) == old
    (tree / FILES[0]).write_text("// new")
    new = cache_of(tree)
    assert new not in (None, old)
    assert old.is_dir()
    os.utime(old, (0, 0))
    assert cache_of(tree) == new
    assert not old.exists()
