# SPDX-License-Identifier: Apache-2.0
"""A server that has lost a rank ends soon, and says which."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from weft.memory import Group

_log = logging.getLogger(__name__)
# A rank that raises is ended by the engine itself, with its traceback. One that waits in another
# library's collective, which has no abort, is ended after this many seconds.
GRACE = 10.0
# Seconds between the first sign and the decision: a server that is stopped ends all its ranks
# nearly at once, and then there is nothing to decide.
PAUSE = 0.5
# Seconds between two looks. An engine may end all other ranks a tenth of a second after the first,
# and only a rank that still runs can say which one that was.
LOOK = 0.05


class Watch:
    """A thread that hears soon of the end of a peer's process, and of a broken group.

    It logs which at once, and ends the server after GRACE seconds if this rank is still there and
    did not go on without that peer.

    end: what ends the server.
    broken: says what broke the group, or nothing; for an engine that runs nothing of weft's while
        it replays graphs.
    grace: seconds, in place of GRACE.
    recovers: may the others go on without a rank?
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
        self.group, self._grace = group, GRACE if grace is None else grace
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
            said = ""
            while not said:
                if self._stopped.wait(LOOK):
                    return
                if os.getppid() != self._parent:  # such as vLLM's EngineCore of this worker
                    _log.critical(
                        "rank %d of %d: process %d, which started this rank, has ended; the engine "
                        "ends this rank with it", rank, size, self._parent,
                    )  # fmt: skip
                    return
                said = self._wrong()
            _log.warning("rank %d of %d: %s", self.group.rank, self.group.size, said)
            if self._stopped.wait(PAUSE):
                return
            if self._recovers and not self._wrong():
                continue
            then = "so no layer can be served; this server ends"
            if self._recovers:
                then = f"and the others have {self._grace:g} s to go on without it"
            _log.critical("rank %d of %d: %s, %s", self.group.rank, self.group.size, said, then)
            end = time.monotonic() + self._grace
            while time.monotonic() < end:
                if self._stopped.wait(min(PAUSE, self._grace)):
                    return
                if self._recovers and not self._wrong():
                    break
            else:
                self._end()
                return

    def _wrong(self) -> str:
        """What is wrong now, or nothing."""
        gone = sorted(self.group.ended)
        if gone:
            return f"the process of rank {', '.join(map(str, gone))} has ended"
        return "" if self._broken is None else self._broken()
