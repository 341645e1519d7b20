# SPDX-License-Identifier: Apache-2.0
"""The deadline of a wait; a rank that waits itself, and the waiting rank, are not blamed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.programs import compile_program

SOURCE = Path(__file__).with_name("overdue.cpp")
FIRST, LATER = 1, 7  # epochs
NEVER = -1


def is_overdue(rank: int, peer: int, epoch: int, waited: int, seen_ago: int = NEVER) -> bool:
    program = compile_program(SOURCE, name="overdue")
    words = [str(program), *map(str, (rank, peer, epoch, waited, seen_ago))]
    reported = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    assert reported in ("overdue", "in time")
    return reported == "overdue"


@pytest.mark.parametrize(("epoch", "deadline"), [(FIRST, 8000), (LATER, 1000)])
def test_an_idle_peer_is_overdue_at_the_deadline(epoch, deadline):
    assert not is_overdue(0, 1, epoch, deadline)
    assert is_overdue(0, 1, epoch, deadline + 1)


@pytest.mark.parametrize(("epoch", "deadline"), [(FIRST, 8000), (LATER, 1000)])
def test_a_wait_for_this_rank_itself_gets_a_quarter_more(epoch, deadline):
    """Another wait of this rank delays it: that one ends first, and names the culprit."""
    assert not is_overdue(1, 1, epoch, deadline + 1)
    assert not is_overdue(1, 1, epoch, deadline * 5 // 4)
    assert is_overdue(1, 1, epoch, deadline * 5 // 4 + 1)


def test_a_waiting_peer_is_overdue_at_twice_the_deadline():
    assert not is_overdue(0, 1, LATER, 1999, seen_ago=499)
    assert not is_overdue(0, 1, LATER, 2000, seen_ago=0)
    assert is_overdue(0, 1, LATER, 2001, seen_ago=0)
    assert is_overdue(0, 1, LATER, 1001, seen_ago=500)  # it waited once, and has stopped since
