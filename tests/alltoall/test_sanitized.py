# SPDX-License-Identifier: Apache-2.0
"""The rounds that compute-sanitizer runs, on CPU ranks without it."""

from __future__ import annotations

import pytest

from tests.gpu.sanitized import PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS)
def test_rounds_are_right(ranks, program):
    for part in PROGRAMS[program]:
        ranks(2, "threads")(part)
