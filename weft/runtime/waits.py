# SPDX-License-Identifier: Apache-2.0
"""Log messages about long waits, such as for a rank that skips its first call.

A thread of the process polls the header of each operator's own share once a second, which kernels
update while they wait. Calls have no overhead. An operator on GPUs, whose header must be copied, is
polled after its first round only if later waits have a long timeout, too.
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

SAMPLE_SECONDS = 0.1  # between two reads of a peer; a waiting peer updates its header every 16 us
_JOIN_SECONDS = 2.0  # timeout for the poll thread at process exit
_BRIEF_SECONDS = 30.0  # a wait with a shorter timeout ends with an error soon after its first log
_log = logging.getLogger(__name__)


class WatchedOperator(Protocol):
    """Interface of an operator that the poll thread uses."""

    group: Group
    kind: str
    first_epoch: int
    timeouts: tuple[float, float]

    def read_own_header(self) -> ctypes.Structure | None: ...
    def count_finished_rounds(self) -> int: ...
    def read_progress(self, rank: int) -> Progress | None: ...


class _PollState:
    """State of an operator at the last poll."""

    def __init__(self) -> None:
        self.waiting_ns = 0
        self.progress = b""
        self.timer: logs.WaitLogTimer | None = None


class WaitWatcher:
    """Operators of this process, and the thread that polls them."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # a child does not inherit the thread
        atexit.register(self._end)

    def _reset(self) -> None:
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._states: weakref.WeakKeyDictionary[WatchedOperator, _PollState] = (
            weakref.WeakKeyDictionary()
        )
        self._thread: threading.Thread | None = None

    def watch(self, operator: WatchedOperator) -> None:
        """Poll an operator as long as it is alive."""
        with self._lock:
            self._states[operator] = _PollState()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weft-waits", daemon=True)
                self._thread.start()

    def _end(self) -> None:
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, logs.FIRST_LOG_SECONDS / 5)):
            for operator, state in list(self._states.items()):
                try:
                    polls_again = _poll(operator, state)
                except (WeftError, AttributeError):  # closed by another thread, or its GPU failed
                    polls_again = False
                if not polls_again:
                    self._states.pop(operator, None)
                del operator
            with self._lock:
                if not self._states:
                    self._thread = None
                    return


def _poll(operator: WatchedOperator, state: _PollState) -> bool:
    """Log a long wait of an operator, and return whether to poll the operator again."""
    header = operator.read_own_header()
    if header is None:
        return False
    is_gpu, is_brief = operator.group.device.type == "cuda", operator.timeouts[0] < _BRIEF_SECONDS
    if is_gpu and is_brief and any(record.phase for record in header.ring):
        return False
    header_type: Any = type(header)
    epoch, ring = header_type.epoch, header_type.ring
    content = bytes(header)
    progress = content[epoch.offset :][:8] + content[ring.offset : ring.offset + ring.size]
    if header.waiting_ns == state.waiting_ns:  # no kernel is waiting
        state.timer = None
    elif state.timer is None or progress != state.progress:
        state.timer = logs.WaitLogTimer()
    elif (waited := state.timer.due()) is not None:
        _log_wait(operator, header, waited)
    state.waiting_ns, state.progress = header.waiting_ns, progress
    return True


def _log_wait(operator: WatchedOperator, header: Any, waited: float) -> None:
    group, local = operator.group, operator.group.local
    ranks = group.host_ranks[group.host]
    peers = [rank for rank in local.living if rank != local.rank]
    before = [operator.read_progress(rank) for rank in peers]
    time.sleep(SAMPLE_SECONDS)
    after = [operator.read_progress(rank) for rank in peers]
    late_ranks = [
        rank
        for rank, earlier, later in zip(peers, before, after, strict=True)
        if earlier is None or later is None or earlier.wait_clock == later.wait_clock
    ]
    activities = local.describe_activity(late_ranks)
    descriptions = []
    for rank in late_ranks:
        pid = local.pid(rank)
        process = f" (pid {pid})" if pid else ""
        descriptions.append(f"rank {ranks[rank]}{process} {activities[rank]}")
    finished = operator.count_finished_rounds()
    started = (header.epoch - operator.first_epoch) & EPOCH_MASK
    call = "a call" if started == finished else "the second half of a round"
    timeout = operator.timeouts[1 if finished == 0 else 0]
    _log.warning(
        "rank %d has waited %.0f s (timeout %g s) in %s of its %s, after %d finished rounds, for "
        "other ranks: %s",
        *(group.rank, waited, timeout, call, operator.kind, finished),
        "; ".join(descriptions) or "all of them also wait in it",
    )


WAIT_WATCHER = WaitWatcher()
