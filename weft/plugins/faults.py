# SPDX-License-Identifier: Apache-2.0
"""Ends a server that has lost a rank, and logs which one."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from weft.group import Group

_log = logging.getLogger(__name__)
# The engine itself ends a rank that raises, and logs its traceback. A rank that waits in another
# library's collective, which has no abort, is ended after this many seconds.
GRACE_SECONDS = 10.0
# Seconds between the first sign of a fault and the decision. A server that is stopped ends all of
# its ranks at nearly the same time, and then no decision is needed.
SETTLE_SECONDS = 0.5
# Polling period in seconds. An engine may end all other ranks a tenth of a second after the first,
# and only a rank that still runs can log which rank was first.
POLL_SECONDS = 0.05


class Watch:
    """A thread that polls for ended peer processes and for a broken group.

    It logs the fault at once. After the grace period it ends the server if this rank still runs and
    has not recovered.

    Args:
        group: The group to watch.
        end: Ends the server.
        broken: Returns the error that broke the group, or ""; for an engine that does not call
            weft while it replays graphs.
        grace: Seconds before the server is ended, instead of GRACE_SECONDS.
        recovers: Whether the other ranks may continue without a dead rank.
    """

    def __init__(
        self,
        group: Group,
        *,
        end: Callable[[], None],
        broken: Callable[[], str] | None = None,
        grace: float | None = None,
        recovers: bool = False,
    ) -> None:
        self.group, self._grace = group, GRACE_SECONDS if grace is None else grace
        self._end, self._broken, self._recovers = end, broken, recovers
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
                        "rank %d of %d: process %d, which started this rank, has ended; the engine "
                        "ends this rank with it", rank, size, self._parent,
                    )  # fmt: skip
                    return
                fault = self._fault()
            _log.warning("rank %d of %d: %s", self.group.rank, self.group.size, fault)
            if self._stopped.wait(SETTLE_SECONDS):
                return
            if self._recovers and not self._fault():
                continue
            then = "so no layer can be served; this server ends"
            if self._recovers:
                then = f"and the others have {self._grace:g} s to continue without it"
            _log.critical("rank %d of %d: %s, %s", self.group.rank, self.group.size, fault, then)
            end = time.monotonic() + self._grace
            while time.monotonic() < end:
                if self._stopped.wait(min(SETTLE_SECONDS, self._grace)):
                    return
                if self._recovers and not self._fault():
                    break
            else:
                self._end()
                return

    def _fault(self) -> str:
        """Return a description of the current fault, or ""."""
        gone = sorted(self.group.ended)
        if gone:
            return f"the process of rank {', '.join(map(str, gone))} has ended"
        return "" if self._broken is None else self._broken()
