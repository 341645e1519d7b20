# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in a wait of a CPU rank."""

from __future__ import annotations

import os
import signal
import threading

import pytest

import weft
from tests.baseline import raises_soon
from tests.operators import KINDS
from tests.ranks import on_ranks
from weft.errors import Aborted


@pytest.mark.parametrize("name", ["pull", "receiver", "oneshot"])
@on_ranks(2, "cpu")
def test_ctrl_c_ends_a_wait_at_once(group: weft.Group, name: str) -> None:
    """Rank 0 gets SIGINT while it waits for rank 1, which makes no call; deadlines are 600 s."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs begin without it
    with KINDS[name].open(group) as operator:
        group.barrier()
        if group.rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with raises_soon(KeyboardInterrupt, "", 30.0):
                operator.round()
            with pytest.raises(Aborted, match=r"called abort\(\) or was interrupted"):
                operator.round()
        group.barrier()
