"""A server that has lost a rank ends soon, and says which."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Callable

from weft.memory import Group
from weft.memory.peers import Peers, identity

_log = logging.getLogger(__name__)
# A rank that raises is ended by SGLang itself, with its traceback. One that waits in a collective
# of another library, which has no abort, is ended after this many seconds.
GRACE = 10.0
# A server that is stopped ends all its ranks nearly at once: then there is nothing to tell.
PAUSE = 0.5


class Watch:
    """A thread that hears of the end of a peer's process at once.

    It logs the rank, and ends the server after GRACE seconds if this rank is still there. Making
    one is collective.
    """

    def __init__(
        self, group: Group, *, end: Callable[[], None] | None = None, grace: float | None = None
    ) -> None:
        self.group, self._grace = group, GRACE if grace is None else grace
        self._end = end or end_server(os.getppid())
        self._peers, self._stopped = Peers(), threading.Event()
        for rank, said in enumerate(group.all_gather(identity())):
            if rank != group.rank:
                self._peers.watch(rank, said)
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="weft-sglang-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if not self._stopped.is_set():
            self._stopped.set()
            os.write(self._waker, b"\0")
            self._thread.join()
            os.close(self._wake)
            os.close(self._waker)
            self._peers.close()

    def _run(self) -> None:
        poller, by_fd = select.poll(), self._peers.pidfds(range(self.group.size))
        for fd in (self._wake, *by_fd):
            poller.register(fd, select.POLLIN)
        gone = sorted(by_fd[fd] for fd, _ in poller.poll() if fd in by_fd)
        if not gone or self._stopped.wait(PAUSE):
            return
        ranks = ", ".join(map(str, gone))
        _log.critical(
            "rank %d of %d: the process of rank %s has ended, so no layer can be served; this "
            "server ends", self.group.rank, self.group.size, ranks
        )  # fmt: skip
        if not self._stopped.wait(self._grace):
            self._end()


def end_server(parent: int) -> Callable[[], None]:
    """What ends a server from one of its schedulers, as SGLang's own do: SIGQUIT to the parent."""

    def end() -> None:
        if os.getppid() == parent:
            os.kill(parent, signal.SIGQUIT)

    return end
