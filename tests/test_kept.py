# SPDX-License-Identifier: Apache-2.0
"""A kept cache serves a checkout until something changes that compiled code depends on."""

from pathlib import Path

import pytest

from tests.kept import decided_by

FILES = ("weft/device/copy.cuh", "weft/alltoall/cpu.cpp", "weft/jit/host.py", "tests/race.hpp")


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_what_is_compiled_is_a_new_cache(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text("")
    before = decided_by(tmp_path, "c++")
    path.write_text("int other;")
    assert decided_by(tmp_path, "c++") != before
