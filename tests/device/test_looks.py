# SPDX-License-Identifier: Apache-2.0
"""One wait of a rank looks round for all of them in every 16 us, and all before they give up."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.programs import compile_program

SOURCE = Path(__file__).with_name("looks.cpp")
OK, MISMATCH, ABORTED = 0, 5, 6


def test_one_wait_polls_for_all():
    program = compile_program(SOURCE, name="looks")
    reported = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    result = {name: list(map(int, words)) for name, *words in map(str.split, reported.splitlines())}
    assert result == {
        "looks": [10],  # in 160 us, of 2560 waits
        "asked": [OK, ABORTED],
        "told": [OK, MISMATCH],
        "overdue": [MISMATCH],  # not a timeout
    }
