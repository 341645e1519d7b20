"""Who the ranks of a group are: processes that share memory, each watched by all others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Protocol

from weft.memory.agreement import Agreement
from weft.memory.control_plane import ControlPlane
from weft.memory.liveness import Liveness


class Member(Protocol):
    """What shares the fate of a group: an operator on a heap of it."""

    def _peer_ended(self, rank: int) -> None:
        """The process of a rank has ended."""

    def _tell_left(self, why: str, *, settled: bool = False) -> None:
        """Notify the peers that no more calls come; settled: once those made are done."""

    def _suspects(self) -> set[int]:
        """The ranks that did not do their part of a call before its deadline."""

    def _quiesce(self) -> None:
        """Wait until nothing of this rank's calls runs any more; until `_recover` calls raise."""

    def _finished(self) -> int:
        """Rounds that this rank has finished."""

    def _recover(self, living: int) -> None:
        """Write this rank's share as at creation, with the mask `living`, and take calls again."""


class Membership:
    """Ranks that have met, each a process, and watched from now on. Collective. Owns `control`.

    Raises RendezvousFailed where a peer dies meanwhile, or cannot do its part, and OSError or
    HandleUnsupported where this one cannot.
    """

    def __init__(
        self, control: ControlPlane, process: int, ended: Callable[[int], None], timeout: float
    ) -> None:
        """process: a descriptor that shows the end of this process.

        ended: called in another thread with the rank of each process that ends.
        """

        def of_peers(fd: int) -> Mapping[int, int]:
            fds = control.exchange_fds(fd, timeout)
            found = {rank: each for rank, each in enumerate(fds) if each is not None}
            os.close(found.pop(control.rank))
            return found

        self.control = control
        with contextlib.ExitStack() as undo:
            try:
                self.liveness = Liveness(of_peers(process), ended)
                undo.callback(self.liveness.close)
                self.agreement = Agreement(control, self.liveness, of_peers)
            except BaseException as error:
                control.close(f"could not watch its peers: {error}")
                raise
            undo.pop_all()

    def close(self, why: str | None = None) -> None:
        """Give everything back. Idempotent; peers that wait for this rank get the reason."""
        self.control.close(why)
        self.liveness.close()
        self.agreement.close()
