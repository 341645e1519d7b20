"""Notices at once when the process of a peer ends.

Every rank hands its peers a descriptor that becomes readable when its process ends: a pidfd of
itself, which means the same process in every PID namespace and is not fooled by forked children.
Where the kernel or a container refuses pidfds it is the end of a pipe, which a forked child that
outlives its parent keeps open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping

_log = logging.getLogger(__name__)


class LivenessFd:
    """A descriptor that shows the end of this process, for the peers."""

    def __init__(self) -> None:
        self._open: tuple[int, ...]
        try:
            self.fd = os.pidfd_open(os.getpid())
            self._open = (self.fd,)
        except OSError as error:
            _log.warning(
                "pidfd_open is refused (%s): peers see by a pipe when this process ends, and only "
                "when its forked children have ended, too",
                error.strerror,
            )
            self._open = os.pipe()
            self.fd = self._open[0]

    def close(self) -> None:
        """Give up what this process keeps open for its peers. Idempotent."""
        kept, self._open = self._open, ()
        for fd in kept:
            os.close(fd)


class Liveness:
    """The processes of the peers, and a thread that calls `ended(rank)` once for each that ends.

    Takes over the descriptors of `peers`. `ended` is called in that thread, until `close`.
    """

    def __init__(self, peers: Mapping[int, int], ended: Callable[[int], None]) -> None:
        self._owner = os.getpid()
        self._fds = dict(peers)
        self._tell = ended
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="weft-liveness", daemon=True)
        self._thread.start()

    def ended(self, rank: int) -> bool:
        """Has the process of a rank ended? Nothing that it did is under way then."""
        poller = select.poll()
        poller.register(self._fds[rank], select.POLLIN)
        return bool(poller.poll(0))

    def fd(self, rank: int) -> int:
        """What becomes readable when the process of a rank ends; stays this object's."""
        return self._fds[rank]

    def kill(self, rank: int) -> None:
        """End the process of a rank. Raises OSError where the kernel refuses, or without pidfds."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fds[rank], signal.SIGKILL)

    def close(self) -> None:
        """End the thread and close all descriptors. Idempotent; a forked child does nothing."""
        with self._lock:
            if self._closed or os.getpid() != self._owner:
                return
            self._closed = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()
        os.close(self._wake)

    def _watch(self) -> None:
        poller = select.poll()
        ranks = {fd: rank for rank, fd in self._fds.items()}
        for fd in (self._wake, *ranks):
            poller.register(fd, select.POLLIN)
        try:
            while True:
                ready = [fd for fd, _ in poller.poll()]
                if self._wake in ready:
                    return
                # One at a time: `ended` may close this, and then no other is called.
                poller.unregister(ready[0])
                self._tell(ranks[ready[0]])
        finally:
            for fd in ranks:
                with contextlib.suppress(OSError):
                    os.close(fd)
