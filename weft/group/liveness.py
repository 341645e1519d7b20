# SPDX-License-Identifier: Apache-2.0
"""Detection of the end of a peer's process, before and after the rendezvous.

After the rendezvous, every rank sends its peers a pidfd of itself, which becomes readable when
its process has ended. A pidfd refers to the same process in every PID namespace, and forked
children do not count. A process with a GPU ends a tenth of a second or more after it was killed,
because its GPU context is torn down first. Each rank therefore also sends a pipe that only it can
write, which the kernel closes as soon as it tears the process down. Either one reports a death;
only the pidfd counts for the agreement. Before the rendezvous, a rank is known by the process id
that it sent, which is valid in one PID namespace.
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

_MAX_FILES = 4096  # upper bound of descriptor numbers used; the kernel's table then takes 32 KiB
_END_SECONDS = 0.5  # allowed delay from the end of a dead rank's sockets to that of its process


class Liveness:
    """Watcher thread that reports the end of each peer's process. Owns the descriptors."""

    def __init__(
        self,
        processes: Mapping[int, int],
        pipes: Mapping[int, int],
        own_pipe: tuple[int, int],
        on_end: Callable[[int], None],
    ) -> None:
        """Start the thread.

        Args:
            processes: Pidfd of each peer.
            pipes: Reading end of each peer's lifetime pipe.
            own_pipe: Both ends of this process's lifetime pipe, see `create_lifetime_pipe`.
            on_end: Called in the thread, until `close`, once for each rank whose process ends.
        """
        self._owner = os.getpid()
        self._fds = dict(processes)
        self._pipes = dict(pipes)
        self._own_pipe = own_pipe
        self._on_end = on_end
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="weft-liveness", daemon=True)
        self._thread.start()

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a rank has ended. No store of it can arrive after that."""
        return bool(_ended_fds([self._fds[rank]]))

    def pidfd(self, rank: int) -> int:
        """Return the pidfd of a rank, which this object owns."""
        return self._fds[rank]

    def kill(self, rank: int) -> None:
        """Kill the process of a rank. Raises OSError if that is not permitted."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fds[rank], signal.SIGKILL)

    def close(self) -> None:
        """End the thread, which closes all descriptors. Idempotent; a forked child does nothing."""
        with self._lock:
            if self._closed or os.getpid() != self._owner:
                return
            self._closed = True
            try:
                # Wakes the thread, and shows peers that the end of this pipe is not a death.
                os.write(self._own_pipe[1], b".")
            except OSError:  # other code closed the pipe, so nothing can wake the thread
                return
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        poller = select.poll()
        ranks = {fd: rank for fds in (self._fds, self._pipes) for rank, fd in fds.items()}
        for fd in (self._own_pipe[0], *ranks):
            poller.register(fd, select.POLLIN)
        reported: set[int] = set()
        while self._own_pipe[0] not in (ready := dict(poller.poll())):
            # One event per poll: `on_end` may close this object, and must not be called again then.
            fd, events = next(iter(ready.items()))
            poller.unregister(fd)
            rank = ranks[fd]
            closed_group = fd == self._pipes.get(rank) and events & select.POLLIN
            if not closed_group and rank not in reported:
                reported.add(rank)
                self._on_end(rank)
        for fd in (*ranks, *self._own_pipe):
            with contextlib.suppress(OSError):
                os.close(fd)


def create_lifetime_pipe() -> tuple[int, int]:
    """Create a pipe that ends with this process, and return its reading and writing end.

    The reading end is for peers. When a process is killed, the kernel closes its highest
    descriptors first, and those of a GPU take long. The writing end is therefore a high descriptor
    if the limit allows. Raises OSError.
    """
    reader, low = os.pipe2(os.O_CLOEXEC)
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MAX_FILES)
    try:
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, limit * 3 // 4)
    except OSError:
        return reader, low
    os.close(low)
    return reader, high


class Peers:
    """Processes of ranks during the rendezvous, as far as known; owns their pidfds.

    A context manager. The death of a rank in another PID namespace cannot be observed: only the
    deadline ends the wait for it, and errors state that.
    """

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._dead: set[int] = set()
        self._unwatched: dict[int, str] = {}  # reason why a rank's death cannot be observed

    def watch(self, rank: int, report: Any) -> None:
        """Watch a rank by the `process_identity` that it sent; a malformed report is ignored.

        Only the first report counts, since the identity of a process does not change.
        """
        pid = report.get("pid") if isinstance(report, dict) else None
        if rank in self._pids or type(pid) is not int or not 0 < pid < 1 << 31:
            return
        self._pids[rank] = pid
        if report.get("namespace") != process_identity()["namespace"]:
            self._unwatched[rank] = "it runs in another pid namespace"
            return
        try:
            self._pidfds[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._dead.add(rank)
        except OSError as error:
            self._unwatched[rank] = f"pidfd_open: {error.strerror}"

    def watch_pidfd(self, rank: int, pid: int, fd: int) -> None:
        """Watch a rank by a duplicate of its pidfd `fd`."""
        self._pids[rank], self._pidfds[rank] = pid, os.dup(fd)

    def pidfds(self) -> list[int]:
        """Return the pidfds of the watched ranks; they become readable when the process ends."""
        return list(self._pidfds.values())

    def pidfd(self, rank: int) -> int | None:
        """Return the pidfd of a rank, or None if it is not watched."""
        return self._pidfds.get(rank)

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a rank is known to have ended. Its messages have all arrived."""
        fd = self._pidfds.get(rank)
        return rank in self._dead or (fd is not None and bool(_ended_fds([fd])))

    def check(self, connected: Iterable[int] = ()) -> None:
        """Raise RendezvousFailed if a rank outside `connected` is known to have died."""
        ended = _ended_fds(self.pidfds())
        self._dead.update(rank for rank, fd in self._pidfds.items() if fd in ended)
        for rank in sorted(self._dead.difference(connected)):
            raise RendezvousFailed(
                f"rank {rank} (pid {self._pids[rank]}) died before all ranks had connected"
            )

    def check_repeatedly(self) -> None:
        """Run `check` for 0.5 s, since a process ends shortly after its connection closes."""
        until = time.monotonic() + _END_SECONDS
        while self._pidfds and time.monotonic() < until:
            self.check()
            time.sleep(0.01)
        self.check()

    def describe_unwatched(self, ranks: Iterable[int]) -> str:
        """Return text for an error on the `ranks` whose death cannot be observed, or ""."""
        reasons = [f"rank {r}: {self._unwatched[r]}" for r in ranks if r in self._unwatched]
        return f" (this rank cannot see whether they run: {'; '.join(reasons)})" if reasons else ""

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])


def _ended_fds(fds: Iterable[int]) -> set[int]:
    """Return the pidfds whose processes have ended. Raises RecoveryFailed if one was closed."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    ready = dict(poller.poll(0))
    if any(events & select.POLLNVAL for events in ready.values()):
        raise RecoveryFailed(
            "descriptors of this rank's group were closed (os.closerange?), so it cannot detect "
            "which ranks have died: end this process, and the others recover without it"
        )
    return set(ready)


def process_identity() -> dict[str, Any]:
    """Return the id of this process and the PID namespace in which it is valid."""
    return {"pid": os.getpid(), "namespace": os.readlink("/proc/self/ns/pid")}
