# SPDX-License-Identifier: Apache-2.0
"""Notices at once when the process of a peer ends, before all ranks have met and after that.

Once they have met, every rank hands its peers a pidfd of itself, which becomes readable when its
process has ended. It means the same process in every PID namespace, and forked children do not
count. Of a process with a GPU that is a tenth of a second or more after it was killed, since its
GPU context is torn down before. So each hands out a pipe as well, which only it can write: it ends
as soon as the process is being taken down. Deaths are announced by either, and agreed on by the
pidfd alone. Before they have met a rank is known by the process id that it has sent, which means
that process within one PID namespace.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weft.errors import RecoveryFailed, RendezvousFailed

_MOST_FILES = 4096  # of one process, of which few have as many; a table of these takes 32 KiB
_LAST_WORDS = 0.5  # seconds between the end of a dead rank's sockets and that of its process


class Liveness:
    """The processes of the peers, and a thread that calls `ended(rank)` once for each that ends.

    Takes over the descriptors. `ended` is called in that thread, until `close`.
    """

    def __init__(
        self,
        processes: Mapping[int, int],
        pipes: Mapping[int, int],
        mine: tuple[int, int],
        ended: Callable[[int], None],
    ) -> None:
        """processes, pipes: of the peers, pidfds and the first ends of their `lifelong_pipe`.

        mine: this process's own pipe.
        """
        self._owner = os.getpid()
        self._fds = dict(processes)
        self._pipes = dict(pipes)
        self._mine = mine
        self._tell = ended
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="weft-liveness", daemon=True)
        self._thread.start()

    def ended(self, rank: int) -> bool:
        """Has the process of a rank ended? Nothing that it did is under way then."""
        return bool(_ended([self._fds[rank]]))

    def fd(self, rank: int) -> int:
        """What becomes readable when the process of a rank ends; stays this object's."""
        return self._fds[rank]

    def kill(self, rank: int) -> None:
        """End the process of a rank. Raises OSError where the kernel refuses."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fds[rank], signal.SIGKILL)

    def close(self) -> None:
        """End the thread, which closes all descriptors. Idempotent; a forked child does nothing."""
        with self._lock:
            if self._closed or os.getpid() != self._owner:
                return
            self._closed = True
            try:
                # To the thread, and to peers: a pipe with something in it tells of no death.
                os.write(self._mine[1], b".")
            except OSError:  # closed by somebody else, and with it what would wake the thread
                return
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        poller = select.poll()
        ranks = {fd: rank for each in (self._fds, self._pipes) for rank, fd in each.items()}
        for fd in (self._mine[0], *ranks):
            poller.register(fd, select.POLLIN)
        told: set[int] = set()
        while self._mine[0] not in (ready := dict(poller.poll())):
            # One at a time: `ended` may close this, and then no other is called.
            fd, events = next(iter(ready.items()))
            poller.unregister(fd)
            rank = ranks[fd]
            left = fd == self._pipes.get(rank) and events & select.POLLIN
            if not left and rank not in told:
                told.add(rank)
                self._tell(rank)
        for fd in (*ranks, *self._mine):
            with contextlib.suppress(OSError):
                os.close(fd)


def lifelong_pipe() -> tuple[int, int]:
    """A pipe that ends with this process: the end that peers get copies of, and the one written.

    When a process is killed the kernel closes its highest descriptors first, and a GPU's take long:
    the end that is written is a high one, where the limit leaves any. Raises OSError.
    """
    reader, low = os.pipe2(os.O_CLOEXEC)
    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MOST_FILES)
    try:
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, most * 3 // 4)
    except OSError:
        return reader, low
    os.close(low)
    return reader, high


class Peers:
    """The processes of ranks that have yet to meet, as far as they are known. A context manager.

    Owns their pidfds. A rank in another PID namespace has the deadline, and errors say so.
    """

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._dead: set[int] = set()
        self._unseen: dict[int, str] = {}  # ranks whose death cannot be seen, and why

    def watch(self, rank: int, said: Any) -> None:
        """Watch a rank that sent what `identity` returned there; anything else is ignored.

        Only the first counts: a process keeps its identity.
        """
        pid = said.get("pid") if isinstance(said, dict) else None
        if rank in self._pids or type(pid) is not int or not 0 < pid < 1 << 31:
            return
        self._pids[rank] = pid
        if said.get("namespace") != identity()["namespace"]:
            self._unseen[rank] = "it runs in another pid namespace"
            return
        try:
            self._pidfds[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._dead.add(rank)
        except OSError as error:
            self._unseen[rank] = f"pidfd_open: {error.strerror}"

    def hold(self, rank: int, pid: int, fd: int) -> None:
        """Watch a rank by its pidfd `fd`, which is duplicated."""
        self._pids[rank], self._pidfds[rank] = pid, os.dup(fd)

    def pidfds(self) -> list[int]:
        """Of the ranks that are watched: readable once the process ended."""
        return list(self._pidfds.values())

    def pidfd(self, rank: int) -> int | None:
        """Of one rank, if it is watched."""
        return self._pidfds.get(rank)

    def ended(self, rank: int) -> bool:
        """Is the process of a rank known to have ended? All that it sent has arrived then."""
        fd = self._pidfds.get(rank)
        return rank in self._dead or (fd is not None and bool(_ended([fd])))

    def check(self, connected: Iterable[int] = ()) -> None:
        """Raise RendezvousFailed if a rank is known to have died that is not `connected`."""
        over = _ended(self.pidfds())
        self._dead.update(rank for rank, fd in self._pidfds.items() if fd in over)
        for rank in sorted(self._dead.difference(connected)):
            raise RendezvousFailed(
                f"rank {rank} (pid {self._pids[rank]}) died before all ranks had met"
            )

    def check_ended(self) -> None:
        """As `check`, for a rank whose connection has ended: its process does so a moment later."""
        until = time.monotonic() + _LAST_WORDS
        while self._pidfds and time.monotonic() < until:
            self.check()
            time.sleep(0.01)
        self.check()

    def unseen(self, ranks: Iterable[int]) -> str:
        """For an error at the deadline: of which of `ranks` it cannot be said that they live."""
        known = [f"rank {r}: {self._unseen[r]}" for r in ranks if r in self._unseen]
        return f" (whether they live cannot be seen from here: {'; '.join(known)})" if known else ""

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])


def _ended(fds: Iterable[int]) -> set[int]:
    """Those of `fds` whose processes have ended. Raises RecoveryFailed for one that was closed."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    found = dict(poller.poll(0))
    if any(events & select.POLLNVAL for events in found.values()):
        raise RecoveryFailed(
            "descriptors of this rank's group were closed (os.closerange?), so it cannot see who "
            "lives: end this process, and the others recover without it"
        )
    return set(found)


def identity() -> dict[str, Any]:
    """What this process sends of itself: its id, and where that is valid."""
    return {"pid": os.getpid(), "namespace": os.readlink("/proc/self/ns/pid")}
