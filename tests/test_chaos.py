"""A short form of tests/chaos.py: a death at a fault point of each of three seeds, one replaced."""

from __future__ import annotations

import pytest

from tests import chaos


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_survivors_are_right_whoever_dies(seed):
    chaos.one_run(seed)
