"""A server that has lost a rank ends soon, and says which."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Iterable

from weft.memory import Group
from weft.memory.peers import Peers, identity

_log = logging.getLogger(__name__)
# A rank that raises is ended by the engine itself, with its traceback. One that waits in another
# library's collective, which has no abort, is ended after this many seconds.
GRACE = 10.0
# A server that is stopped ends all its ranks nearly at once: then there is nothing to tell.
PAUSE = 0.5


class Watch:
    """A thread that hears of the end of a peer's process at once, and soon of a broken group.

    It logs which, and ends the server after GRACE seconds if this rank is still there and did not
    go on without that peer. Making one is collective.

    end: what ends the server.
    broken: says what broke the group, or nothing; asked twice a second, for an engine that runs
        nothing of weft's while it replays graphs.
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
        self._peers = Peers()
        for rank, said in enumerate(group.all_gather(identity())):
            if rank != group.rank:
                self._peers.watch(rank, said)
        self._begin(range(group.size))

    def go_on(self, living: Iterable[int]) -> None:
        """Watch these ranks alone: the server serves without the others."""
        self._stop()
        self._begin(living)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if not self._stopped.is_set():
            self._stop()
            self._peers.close()

    def _begin(self, living: Iterable[int]) -> None:
        self._living, self._stopped = list(living), threading.Event()
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="weft-watch", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        self._stopped.set()
        os.write(self._waker, b"\0")
        self._thread.join()
        os.close(self._wake)
        os.close(self._waker)

    def _run(self) -> None:
        poller, by_fd = select.poll(), self._peers.pidfds(self._living)
        for fd in (self._wake, *by_fd):
            poller.register(fd, select.POLLIN)
        gone: list[int] = []
        said = ""
        while not (gone or said or self._stopped.is_set()):
            ready = poller.poll(None if self._broken is None else 1000 * PAUSE)
            gone = sorted(by_fd[fd] for fd, _ in ready if fd in by_fd)
            said = "" if self._broken is None else self._broken()
        if self._stopped.wait(PAUSE):
            return
        if gone:
            said = f"the process of rank {', '.join(map(str, gone))} has ended"
        then = "so no layer can be served; this server ends"
        if self._recovers:
            then = f"and the others have {self._grace:g} s to go on without it"
        _log.critical("rank %d of %d: %s, %s", self.group.rank, self.group.size, said, then)
        if not self._stopped.wait(self._grace):
            self._end()
