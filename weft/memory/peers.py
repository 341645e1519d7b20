"""The processes of ranks that are about to meet: whether they live, and what they have mounted.

A rank that is connected shows its death by its socket. Before that only the system knows of it:
each rank sends the others its process id, and they hold a pidfd of it. That works within one pid
namespace; elsewhere the deadline alone remains, and errors say so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
from collections.abc import Iterable
from typing import Any

from weft.errors import RendezvousFailed
from weft.memory.wire import JSON

_ELSEWHERE = "it runs in another pid namespace"


def identity() -> dict[str, JSON]:
    """What this process sends of itself: its id, when it started, and where both are valid."""
    pid = os.getpid()
    return {"pid": pid, "started": _started(pid), "namespace": _namespace()}


class Peers:
    """What is known of the other ranks' processes. Owns their pidfds; a context manager."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._dead: set[int] = set()
        self._unseen: dict[int, str] = {}  # ranks whose death cannot be seen, and why

    def watch(self, rank: int, said: Any) -> None:
        """Watch rank `rank`, which sent what `identity` returned there; anything else is ignored.

        Only the first counts: a process keeps its identity.
        """
        if rank in self._pids or not isinstance(said, dict):
            return
        pid, started = said.get("pid"), said.get("started")
        if type(pid) is not int or type(started) is not int or not 0 < pid < 1 << 31:
            return
        self._pids[rank] = pid
        if said.get("namespace") != _namespace():
            self._unseen[rank] = _ELSEWHERE
            return
        try:
            self._pidfds[rank] = os.pidfd_open(pid)
            if _started(pid) not in (0, started):  # the id went to another process
                self._dead.add(rank)
        except ProcessLookupError:
            self._dead.add(rank)
        except OSError as error:
            self._unseen[rank] = f"pidfd_open: {error.strerror}"

    def hold(self, rank: int, pid: int, fd: int) -> None:
        """Watch rank `rank` by what `LivenessFd` gave its peers; duplicates `fd`."""
        self._pids[rank], self._pidfds[rank] = pid, os.dup(fd)

    def knows(self, rank: int) -> bool:
        """Whether rank `rank` has sent its identity."""
        return rank in self._pids

    def pidfds(self, ranks: Iterable[int]) -> dict[int, int]:
        """Of those of `ranks` that are watched: pidfd -> rank. Readable once the process ended."""
        return {self._pidfds[r]: r for r in ranks if r in self._pidfds}

    def dead(self) -> list[int]:
        """The ranks that are known to have died, in rank order. Never waits."""
        poller, by_fd = select.poll(), self.pidfds(self._pidfds)
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        self._dead.update(by_fd[fd] for fd, _ in poller.poll(0))
        return sorted(self._dead)

    def check(self) -> None:
        """Raise RendezvousFailed if a rank is known to have died."""
        for rank in self.dead():
            raise RendezvousFailed(self.died(rank))

    def died(self, rank: int) -> str:
        """The text that says so."""
        return f"rank {rank} (pid {self._pids[rank]}) died before all ranks had met"

    def unseen(self, ranks: Iterable[int]) -> str:
        """For an error at the deadline: of which of `ranks` it cannot be said that they live."""
        known = [f"rank {r}: {self._unseen[r]}" for r in ranks if r in self._unseen]
        return f" (whether they live cannot be seen from here: {'; '.join(known)})" if known else ""

    def root(self, rank: int) -> int:
        """An O_PATH descriptor of the root directory of a rank's process; the caller closes it.

        Below it is what that process has mounted. The kernel asks for the right to read the
        process, which ranks of one user with equal capabilities have. It does not ask for the right
        to attach to it, which pidfd_getfd needs and which Yama and the default seccomp profile of
        Docker refuse. Raises RendezvousFailed saying why it cannot be had.
        """
        pid = self._pids.get(rank)
        if pid is None:
            raise RendezvousFailed(f"rank {rank} has not sent its process id")
        if self._unseen.get(rank) == _ELSEWHERE:
            raise RendezvousFailed(_ELSEWHERE)
        try:
            process = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise RendezvousFailed(
                f"/proc/{pid}: {error.strerror}; mount the /proc of this pid namespace"
            ) from error
        try:
            # Root may read every process. Without this check another user who writes in
            # the store could lead it into the mounts of a process of theirs.
            owner = os.fstat(process).st_uid
            if owner != os.geteuid():
                raise PermissionError(errno.EACCES, f"it belongs to user {owner}")
            return os.open("root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=process)
        except OSError as error:
            raise RendezvousFailed(
                f"/proc/{pid}/root: {error.strerror}; all ranks need one user "
                f"(this one is {os.geteuid()}) and equal capabilities, and rank {rank} must be "
                "dumpable (prctl(PR_SET_DUMPABLE), which a change of user without exec ends)"
            ) from error
        finally:
            os.close(process)

    def close(self) -> None:
        """Give the pidfds back. Idempotent."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _started(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Counted from the end of the name, which may hold anything, this is the 22nd field.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _namespace() -> str:
    """Where process ids and start times mean the same."""
    found = []
    for kind in ("pid", "time"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without time namespaces
            found.append(os.readlink(f"/proc/self/ns/{kind}"))
    return " ".join(found)
