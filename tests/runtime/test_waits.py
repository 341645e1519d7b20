# SPDX-License-Identifier: Apache-2.0
"""A wait for other ranks is logged with its call, the ranks, and their calls."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch

import weft
from weft import logs
from weft.errors import WeftError
from weft.group.meeting import Meeting, meet
from weft.runtime import waits as module

X, IDS = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 2], [1, 3]])


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(logs, "FIRST_LOG_SECONDS", 0.4)


def waits(caplog, *, rank=0):
    """Return the waits that a rank logged."""
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [text for text in texts if text.startswith(f"rank {rank} has waited")]


def wait_until(there, seconds=300.0):
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until
        time.sleep(0.02)


def make(group, first_timeout=600.0):
    sizes: Any = {"max_tokens": 4, "top_k": 2, "num_experts": 4, "hidden": 64}
    return weft.AllToAll(group, **sizes, first_timeout=first_timeout)


def test_waits_name_the_late_ranks_and_their_calls(ranks, caplog):
    """Rank 1 makes no call first, and then another one than rank 0, which ends in an error."""

    def body(group):
        # An object of its own for each rank's barrier: the other's dispatch ends it in 3 s.
        with contextlib.suppress(WeftError), make(group, first_timeout=3.0) as operator:
            group.barrier()
            if group.rank == 0:
                operator.dispatch(X, IDS)
            else:
                wait_until(lambda: waits(caplog))
                group.agree(1, label="the batch")

    ranks(2, "threads")(body)
    first, *later = waits(caplog)
    assert "in a call of its all-to-all, after 0 finished rounds, for other ranks: rank 1 " in first
    assert first.endswith("is in no call of this group that waits for others")
    assert later[-1].endswith("waits in agreement on the batch")
    lines = waits(caplog, rank=1)
    assert "in agreement on the batch for ranks to enter it: rank 0 " in lines[0]
    assert any(line.endswith("waits in a call of AllToAll 1") for line in lines)


def test_a_waiting_meeting_names_the_missing_ranks(caplog):
    with contextlib.closing(Meeting.open()) as meeting, pytest.raises(WeftError):
        meet(meeting, rank=0, size=3, device="cpu", timeout=2.0)
    texts = waits(caplog)
    assert "of at most 2 s in the meeting for rank 1, 2 of 3 to join" in texts[0]
    assert len(texts) == 3  # after 0.4, 0.8 and 1.6 s


def test_calls_that_do_not_wait_log_nothing_and_the_thread_ends(ranks, caplog):
    def body(group):
        with make(group) as operator:
            until = time.monotonic() + 1.0
            while group.all_gather(time.monotonic() < until)[0]:
                received = operator.dispatch(X, IDS)
                operator.combine(weft.reference.identity_experts(received, X.dtype))

    ranks(2, "threads")(body)
    assert waits(caplog) == waits(caplog, rank=1) == []
    wait_until(lambda: module.WAIT_WATCHER._thread is None)
