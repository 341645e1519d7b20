# SPDX-License-Identifier: Apache-2.0
"""The deadline of exchanges, on counts that a test writes in place of a stream."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, cast

import pytest
import torch

from weft.errors import GroupError
from weft.hosts.rail import Rail
from weft.hosts.watch import _watch

FIRST, LATER = 30.0, 0.4


class Exchange:
    """What is asked about it, and told that it is late."""

    def __init__(self) -> None:
        self.looks = 0
        self.late_at: float | None = None

    def look(self, overdue: float | None) -> bool:
        self.looks += 1
        if overdue is not None:
            self.late_at = time.monotonic()
        return overdue is not None


def watched(
    exchange: Exchange, *, first: int = 1, later: float = LATER
) -> tuple[torch.Tensor, threading.Thread, Any]:
    """Counts, the thread that looks at them, and what ends it."""
    seen, stop = torch.zeros(2, dtype=torch.int64), threading.Event()
    look = weakref.WeakMethod(exchange.look)
    thread = threading.Thread(target=_watch, args=(seen, look, later, FIRST, first, stop))
    thread.start()
    return seen, thread, stop


def test_an_exchange_that_lasts_is_late_once():
    exchange = Exchange()
    seen, thread, _ = watched(exchange)
    seen[0] = 1  # the first may take longer
    time.sleep(2 * LATER)
    assert exchange.late_at is None
    assert exchange.looks > 0
    seen[1] = 1
    seen[0] = 2
    began = time.monotonic()
    thread.join(20.0)
    assert not thread.is_alive()
    assert exchange.late_at is not None
    assert exchange.late_at - began >= LATER - 0.06


def test_exchanges_that_end_are_not_late():
    exchange = Exchange()
    seen, thread, stop = watched(exchange, first=0, later=1.0)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:  # each on its way for less than the limit
        seen[0] += 1
        time.sleep(0.02)
        seen[1] += 1
    assert exchange.late_at is None
    stop.set()
    thread.join(20.0)
    assert not thread.is_alive()


def test_an_operator_that_is_gone_is_told_nothing():
    exchange = Exchange()
    seen, thread, _ = watched(exchange, first=0)
    seen[0] = 1
    del exchange
    thread.join(20.0)
    assert not thread.is_alive()


def test_other_hosts_learn_of_a_failure_that_this_gpu_can_tell_nobody(monkeypatch):
    def lost(error: Exception) -> None:
        raise OSError("the context is lost")

    rail, told = cast("Any", object.__new__(Rail)), list[GroupError]()
    rail._failed, rail._on_failure = None, lambda: lost
    monkeypatch.setattr(rail, "_tell_hosts", told.append)
    with pytest.raises(OSError, match="the context is lost"):
        rail._fail("rank 2 is late")
    assert [str(error) for error in told] == ["rank 2 is late"]
