# SPDX-License-Identifier: Apache-2.0
"""What a wait polls, its deadline, and the ranks that it does not blame."""

import subprocess
from pathlib import Path

import pytest

from tests.programs import compile_program

SOURCE = Path(__file__).with_name("waits.cpp")
OK, MISMATCH, ABORTED = 0, 5, 6
FIRST, LATER = 1, 7  # epochs, with deadlines of 8000 ns and 1000 ns
NEVER = -1


def run(*words: int) -> list[int]:
    program = compile_program(SOURCE, name="waits")
    command = [str(program), *map(str, words)]
    reported = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(map(int, reported.split()))


def test_one_wait_polls_for_all_in_every_16_us_and_all_before_they_give_up():
    looks, *asked_and_told, overdue = run()
    assert looks == 10  # in 160 us, of 2560 waits
    assert asked_and_told == [OK, ABORTED, OK, MISMATCH]
    assert overdue == MISMATCH  # not a timeout


@pytest.mark.parametrize(
    ("rank", "peer", "epoch", "waited", "seen_ago", "overdue"),
    [
        *((0, 1, FIRST, 8000, NEVER, 0), (0, 1, FIRST, 8001, NEVER, 1)),
        *((0, 1, LATER, 1000, NEVER, 0), (0, 1, LATER, 1001, NEVER, 1)),
        # Another wait of this rank delays it: that one ends first, and names the culprit.
        *((1, 1, FIRST, 8001, NEVER, 0), (1, 1, FIRST, 10000, NEVER, 0)),
        *((1, 1, FIRST, 10001, NEVER, 1), (1, 1, LATER, 1001, NEVER, 0)),
        *((1, 1, LATER, 1250, NEVER, 0), (1, 1, LATER, 1251, NEVER, 1)),
        # A peer that waits itself gets twice the deadline.
        *((0, 1, LATER, 1999, 499, 0), (0, 1, LATER, 2000, 0, 0), (0, 1, LATER, 2001, 0, 1)),
        (0, 1, LATER, 1001, 500, 1),  # it waited once, and has stopped since
    ],
)
def test_the_deadline_of_a_wait(rank, peer, epoch, waited, seen_ago, overdue):
    assert run(rank, peer, epoch, waited, seen_ago) == [overdue]
