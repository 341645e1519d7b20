# SPDX-License-Identifier: Apache-2.0
"""Log calls that wait long for their peers: a rank that skips its first call is named after 5 s.

One thread of the process polls once a second the header of each operator's own share, which kernels
update while they wait. Calls have no overhead. An operator on GPUs, whose header has to be copied,
is polled only until its first round has finished; later waits have a shorter deadline.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
import weakref
from typing import Any, Protocol

from weft import logs
from weft.errors import WeftError
from weft.group.group import Group
from weft.group.membership import Progress
from weft.heap.header import EPOCH_MASK

SAMPLE = 0.1  # seconds between two reads of a peer; a waiting peer updates its header every 16 us
_JOIN = 2.0  # seconds that process exit waits for a poll in progress
_log = logging.getLogger(__name__)


class WatchedOperator(Protocol):
    """Interface of an operator that the poll thread uses."""

    group: Group
    kind: str
    first_epoch: int
    timeouts: tuple[float, float]

    def own_header(self) -> ctypes.Structure | None: ...
    def finished_rounds(self) -> int: ...
    def progress(self, rank: int) -> Progress | None: ...


class _Wait:
    """State of an operator at the last poll."""

    def __init__(self) -> None:
        self.waiting_ns = 0
        self.progress = b""
        self.reminder: logs.WaitLogTimer | None = None


class Watcher:
    """The operators of this process, and the thread that polls them while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: weakref.WeakKeyDictionary[WatchedOperator, _Wait] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._stop = threading.Event()
        atexit.register(self._end)

    def watch(self, operator: WatchedOperator) -> None:
        """Poll an operator as long as it is alive."""
        with self._lock:
            if os.getpid() != self._process:  # a forked child inherits the list but not the thread
                self._waits.clear()
                self._process, self._thread = os.getpid(), None
            self._waits[operator] = _Wait()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weft-waits", daemon=True)
                self._thread.start()

    def _end(self) -> None:
        self._stop.set()
        thread = self._thread
        if thread is not None and os.getpid() == self._process:
            thread.join(_JOIN)

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, logs.FIRST_LOG_SECONDS / 5)):
            for operator, wait in list(self._waits.items()):
                try:
                    keep = _poll(operator, wait)
                except (WeftError, AttributeError):  # it was closed meanwhile, or its GPU failed
                    keep = False
                if not keep:
                    self._waits.pop(operator, None)
                del operator
            with self._lock:
                if not self._waits:
                    self._thread = None
                    return


def _poll(operator: WatchedOperator, wait: _Wait) -> bool:
    """Log a wait that is due, and return whether to poll this operator again."""
    header = operator.own_header()
    if header is None:
        return False
    if operator.group.device.type == "cuda" and any(record.phase for record in header.ring):
        return False
    kind: Any = type(header)
    ring = kind.ring
    content = bytes(header)
    progress = content[kind.epoch.offset :][:8] + content[ring.offset : ring.offset + ring.size]
    if header.waiting_ns == wait.waiting_ns:  # no kernel is waiting
        wait.reminder = None
    elif wait.reminder is None or progress != wait.progress:
        wait.reminder = logs.WaitLogTimer()
    elif (waited := wait.reminder.due()) is not None:
        _log_wait(operator, header, waited)
    wait.waiting_ns, wait.progress = header.waiting_ns, progress
    return True


def _log_wait(operator: WatchedOperator, header: Any, waited: float) -> None:
    group, local = operator.group, operator.group.local
    ranks = group.host_ranks[group.host]
    peers = [rank for rank in local.living if rank != local.rank]
    before = [operator.progress(rank) for rank in peers]
    time.sleep(SAMPLE)
    after = [operator.progress(rank) for rank in peers]
    outside = [
        rank
        for rank, first, then in zip(peers, before, after, strict=True)
        if first is None or then is None or first.wait_clock == then.wait_clock
    ]
    places = local.describe_activity(outside)
    names = []
    for rank in outside:
        pid = local.pid(rank)
        process = f" (pid {pid})" if pid else ""
        names.append(f"rank {ranks[rank]}{process} {places[rank]}")
    finished = operator.finished_rounds()
    started = (header.epoch - operator.first_epoch) & EPOCH_MASK
    call = "a call" if started == finished else "the second half of a round"
    limit = operator.timeouts[1 if finished == 0 else 0]
    _log.warning(
        "rank %d has waited %.0f s of at most %g s in %s of its %s, of which it has finished %d "
        "rounds, for other ranks: %s",
        *(group.rank, waited, limit, call, operator.kind, finished),
        "; ".join(names) or "all of them wait in it, too",
    )


WATCHER = Watcher()
