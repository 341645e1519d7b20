# SPDX-License-Identifier: Apache-2.0
"""Detects and logs the death of a rank, and ends the server."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from weft.group import Group

_log = logging.getLogger(__name__)
# Seconds between a fault and the end of the server. The engine itself ends a rank that raises, and
# logs its traceback; this is for ranks that wait in another library's collective without an abort.
GRACE_SECONDS = 10.0
# Seconds between the first sign of a fault and the critical log entry. When a user stops a server,
# all ranks end at nearly the same time, and nothing should be logged.
SETTLE_SECONDS = 0.5
# Polling period in seconds. An engine may end all other ranks a tenth of a second after the first,
# and only a running rank can log which rank was first.
POLL_SECONDS = 0.05


class Watch:
    """A thread that polls for ended peer processes and for a broken group.

    It logs a fault immediately. After a grace period it ends the server, unless this rank has ended
    or recovered.

    Args:
        group: The group to watch.
        end_server: Function that ends the server.
        broken_reason: Function that returns the error that broke the group, or "". Needed if the
            engine does not call weft while it replays graphs.
        grace_seconds: Seconds before the server is ended. Default: GRACE_SECONDS.
        can_recover: Whether the other ranks may continue without a dead rank.
    """

    def __init__(
        self,
        group: Group,
        *,
        end_server: Callable[[], None],
        broken_reason: Callable[[], str] | None = None,
        grace_seconds: float | None = None,
        can_recover: bool = False,
    ) -> None:
        self.group, self._end_server = group, end_server
        self._grace_seconds = GRACE_SECONDS if grace_seconds is None else grace_seconds
        self._broken_reason, self._can_recover = broken_reason, can_recover
        self._parent = os.getppid()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join()

    def _run(self) -> None:
        rank, size = self.group.rank, self.group.size
        while True:
            fault = ""
            while not fault:
                if self._stopped.wait(POLL_SECONDS):
                    return
                if os.getppid() != self._parent:  # for example vLLM's EngineCore
                    _log.critical(
                        "rank %d of %d: process %d, which started this rank, has ended, so the "
                        "engine ends this rank, too", rank, size, self._parent,
                    )  # fmt: skip
                    return
                fault = self._describe_fault()
            _log.warning("rank %d of %d: %s", self.group.rank, self.group.size, fault)
            if self._stopped.wait(SETTLE_SECONDS):
                return
            if self._can_recover and not self._describe_fault():
                continue
            outcome = "so no layer can run; ending this server"
            if self._can_recover:
                outcome = f"and the other ranks have {self._grace_seconds:g} s to recover"
            _log.critical("rank %d of %d: %s, %s", self.group.rank, self.group.size, fault, outcome)
            end = time.monotonic() + self._grace_seconds
            while time.monotonic() < end:
                if self._stopped.wait(min(SETTLE_SECONDS, self._grace_seconds)):
                    return
                if self._can_recover and not self._describe_fault():
                    break
            else:
                self._end_server()
                return

    def _describe_fault(self) -> str:
        """Return a description of the current fault, or ""."""
        ended_ranks = sorted(self.group.ended)
        if ended_ranks:
            return f"the process of rank {', '.join(map(str, ended_ranks))} has ended"
        return "" if self._broken_reason is None else self._broken_reason()
