# SPDX-License-Identifier: Apache-2.0
"""A wait for other ranks is logged with its call, the ranks, and their calls."""

import contextlib
import time

import torch

import weft
from tests.patience import SECONDS
from tests.rounds import Round
from weft import logs
from weft.errors import WeftError
from weft.runtime import waits

CASE = Round((2, 2), top_k=2, experts=4)


def test_waits_name_the_late_ranks_and_their_calls(ranks, caplog, monkeypatch):
    """Rank 1 makes no call first, and then another one than rank 0, which ends in an error."""
    monkeypatch.setattr(logs, "FIRST_LOG_SECONDS", 0.4)

    def logged(rank):
        start = f"rank {rank} has waited"
        return [each for each in caplog.messages if each.startswith(start)]

    def wait_until(there):
        until = time.monotonic() + SECONDS
        while not there():
            assert time.monotonic() < until
            time.sleep(0.02)

    def body(group):
        x, ids = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 2], [1, 3]])
        with CASE.open(group, 4) as operator:
            until = time.monotonic() + 1.0
            while group.all_gather(time.monotonic() < until)[0]:
                received = operator.dispatch(x, ids)
                operator.combine(weft.reference.identity_experts(received, x.dtype))
        assert logged(group.rank) == [], "calls that do not wait log nothing"
        # An object of its own for each rank's barrier: the other's dispatch ends it in 3 s.
        with contextlib.suppress(WeftError), CASE.open(group, 4, first_timeout=3.0) as operator:
            group.barrier()
            if group.rank == 0:
                operator.dispatch(x, ids)
            else:
                wait_until(lambda: logged(0))
                group.agree(1, label="the batch")

    ranks(2, "threads")(body)
    first, *later = logged(0)
    assert "in a call of its all-to-all, after 0 finished rounds, for other ranks: rank 1 " in first
    assert first.endswith("is in no call of this group that waits for others")
    assert later[-1].endswith("waits in agreement on the batch")
    lines = logged(1)
    assert "in agreement on the batch for ranks to enter it: rank 0 " in lines[0]
    assert any("waits in a call of AllToAll " in line for line in lines)
    # Closed operators are polled no more. Fixtures of other tests may keep open ones.
    polled = waits.WAIT_WATCHER._states
    wait_until(lambda: all(each.read_own_header() is not None for each in list(polled)))
