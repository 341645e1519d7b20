# SPDX-License-Identifier: Apache-2.0
"""Error texts: the named rank, and the exceeded limit."""

from __future__ import annotations

import pytest

from weft.errors import Aborted, GroupError, PeerDied, PeerTimeout
from weft.heap.header import EPOCH_MASK, ErrorRecord
from weft.runtime.report import ABORTED, ALL_REDUCE, PEER_DIED, PEER_TIMEOUT, build_group_error

DISPATCH = 1


def raised(record: ErrorRecord, first_epoch: int = 0, machines: int = 1) -> GroupError:
    calls = lambda rank: 100 + rank, lambda rank: "", lambda rank, value: f"{value} of rank {rank}"
    return build_group_error(record, *calls, first_epoch=first_epoch, machines=machines)


@pytest.mark.parametrize("phase", [DISPATCH, ALL_REDUCE])
@pytest.mark.parametrize("reported_by", [0, 3])
def test_a_timeout_names_its_option(phase: int, reported_by: int) -> None:
    before_the_wrap = EPOCH_MASK - 4
    for first, epoch, option in (
        (0, 1, "first_timeout"),
        (0, 2, "timeout"),
        (before_the_wrap, before_the_wrap + 1, "first_timeout"),
        (before_the_wrap, 3, "timeout"),
        (EPOCH_MASK, 0, "first_timeout"),
    ):
        record = ErrorRecord(
            code=PEER_TIMEOUT, rank=0, peer=1, phase=phase, expected=epoch, reported_by=reported_by
        )
        error = raised(record, first)
        assert isinstance(error, PeerTimeout)
        assert f" increase {option}= if it was only slow, then call group.recover() or " in str(
            error
        )
        text = str(raised(record, first, machines=2))
        assert f" increase {option}= if it was only slow, then create a new group." in text


def test_a_peer_is_not_said_to_wait_for_itself() -> None:
    record = ErrorRecord(
        code=PEER_TIMEOUT, rank=0, peer=2, phase=DISPATCH, expected=5, reported_by=3
    )
    text = str(raised(record))
    assert "rank 2 timed out in its own part of this call" in text
    assert "timed out waiting" not in text
    record.peer = 1
    assert "rank 2 timed out waiting for rank 1" in str(raised(record))
    record.peer = 0
    assert "rank 2 timed out waiting for this rank, 0," in str(raised(record))


def test_an_interrupted_rank_blames_no_peer() -> None:
    record = ErrorRecord(code=ABORTED, rank=1, peer=1, phase=DISPATCH, expected=5)
    error = raised(record)
    assert isinstance(error, Aborted)
    assert "because this rank called abort() or was interrupted" in str(error)


@pytest.mark.parametrize("machines", [1, 2])
def test_a_death_names_the_fix(machines: int) -> None:
    record = ErrorRecord(code=PEER_DIED, rank=0, peer=2, phase=DISPATCH, expected=5)
    error = raised(record, machines=machines)
    assert isinstance(error, PeerDied)
    assert "rank 2 died: process 102 ended" in str(error)
    assert ("call group.recover()" in str(error)) == (machines == 1)
    assert ("a group of 2 machines does not recover" in str(error)) == (machines == 2)
