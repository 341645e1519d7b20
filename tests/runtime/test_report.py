# SPDX-License-Identifier: Apache-2.0
"""Errors name the rank, and the exceeded limit also where epochs wrap."""

from __future__ import annotations

from typing import Any

import pytest

from weft.errors import Aborted, PeerDied, PeerTimeout
from weft.heap.header import EPOCH_MASK, ErrorRecord
from weft.runtime.report import ABORTED, ALL_REDUCE, PEER_DIED, PEER_TIMEOUT, build_group_error

DISPATCH, LAST = 1, EPOCH_MASK
LATE: dict[str, Any] = {"code": PEER_TIMEOUT, "rank": 0, "peer": 1}
DEAD: dict[str, Any] = {"code": PEER_DIED, "rank": 0, "peer": 2, "phase": DISPATCH, "expected": 5}
LIMITS = [
    (first, {**LATE, "phase": phase, "expected": epoch, "reported_by": reporter}, f" {option}= if")
    for phase in (DISPATCH, ALL_REDUCE)
    for reporter in (0, 3)
    for first, epoch, option in (
        (0, 1, "first_timeout"),
        (0, 2, "timeout"),
        (LAST - 4, LAST - 3, "first_timeout"),
        (LAST - 4, 3, "timeout"),
        (LAST, 0, "first_timeout"),
    )
]


@pytest.mark.parametrize("machines", [1, 2])
def test_errors_name_ranks_limits_and_whether_the_group_recovers(machines: int) -> None:
    late = LATE | {"phase": DISPATCH, "expected": 5, "reported_by": 3}
    aborted = {"code": ABORTED, "rank": 1, "peer": 1, "phase": DISPATCH, "expected": 5}
    for first, fields, text in (
        *LIMITS,
        (0, late | {"peer": 2}, "rank 2 timed out in its own part of this call"),
        (0, late, "rank 2 timed out waiting for rank 1"),
        (0, late | {"peer": 0}, "rank 2 timed out waiting for this rank, 0,"),
        (0, aborted, "because this rank called abort() or was interrupted"),
        (0, DEAD, "rank 2 died: process 102 ended"),
    ):
        calls = lambda rank: 100 + rank, lambda rank: "", lambda rank, value: f"{value} of {rank}"
        record = ErrorRecord(**fields)
        error = build_group_error(record, *calls, first_epoch=first, machines=machines)
        kind = {PEER_TIMEOUT: PeerTimeout, ABORTED: Aborted, PEER_DIED: PeerDied}[record.code]
        assert type(error) is kind
        assert text in str(error)
        if kind is not Aborted:
            assert ("group.recover()" in str(error)) == (machines == 1)
