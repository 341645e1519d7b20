"""What every operator has: errors that its device recorded, a past, and an end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from weft.memory.group import reason
from weft.memory.header import Record
from weft.runtime.watched import Watched


class Operator(ABC):
    """Calls of one rank on symmetric memory. A context manager: leaving it closes it."""

    @property
    @abstractmethod
    def _watched(self) -> Watched:
        """The heap, and the mailbox that its kernels report through."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Waits for this rank's own work, never for a peer. Idempotent.

        Any thread may call it. A call that waits in another one ends first, with Aborted. Peers
        that are in a call which this rank has not finished raise PeerLeft.
        """

    def check(self) -> None:
        """Raise what the device has recorded: a broken group, or input that was refused.

        Reads host memory only, so it costs nothing and sees the past: synchronise first to be sure
        of the last call. A refusal is raised once; a broken group stays broken.
        """
        self._watched.check()

    @property
    def broken(self) -> bool:
        """Would `check` raise that the group is broken? One read of host memory."""
        return self._watched.broken

    def abort(self) -> None:
        """Ask the kernels of all ranks to leave their waits. Waits for no peer.

        May be called from any thread. Every wait that is under way, and every later one that
        would last, ends with Aborted naming this rank; a call whose flags have all arrived may
        still finish, but on this rank every later call raises. Close the group after it.
        """
        self._watched.abort()

    def history(self, rank: int | None = None) -> list[Record]:
        """The last 128 calls of a rank (default: this one), oldest first; also of a dead one."""
        return self._watched.history(rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._watched.tell_left(reason(error))
        self.close()

    def _check_open(self) -> None:
        self._watched.check_open()
