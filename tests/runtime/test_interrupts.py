# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in a wait of a CPU rank."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import weft
from tests.operators import KINDS
from weft.errors import Aborted


def interrupted(group: weft.Group, name: str) -> tuple[float, str] | None:
    """Rank 0 gets SIGINT while it waits for rank 1, which makes no call; deadlines are 600 s."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs begin without it
    with KINDS[name].open(group) as operator:
        group.barrier()
        if group.rank == 1:
            group.barrier()
            return None
        began = time.monotonic()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            operator.round()
        took = time.monotonic() - began
        with pytest.raises(Aborted, match="called abort\\(\\) or was interrupted"):
            operator.round()
        group.barrier()
        return took, "left"


@pytest.mark.parametrize("name", ["pull", "receiver", "oneshot"])
def test_ctrl_c_ends_a_wait_at_once(ranks, name):
    first, second = ranks(2, "cpu")(interrupted, name)
    assert second is None
    assert 0.3 <= first[0] < 30, "of a deadline of 600 s"
