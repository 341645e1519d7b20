# SPDX-License-Identifier: Apache-2.0
"""Who the ranks of a group are: processes that share memory, each watched by all others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from weft.errors import SetupError, WeftError
from weft.group.agreement import Agreement
from weft.group.control import ControlPlane
from weft.group.liveness import Liveness, lifelong_pipe


class Member(Protocol):
    """What shares the fate of a group: an operator on a heap of it."""

    def _peer_ended(self, rank: int) -> None:
        """The process of a rank has ended."""

    def _tell_left(self, why: str, *, settled: bool = False) -> None:
        """Notify the peers that no more calls come; settled: once those made are done."""

    def _suspects(self) -> set[int]:
        """The ranks that did not do their part of a call before its deadline."""

    def _waiting_ns(self, ranks: Collection[int]) -> dict[int, int]:
        """A number of each of these ranks that changes while it waits in a call."""

    def _quiesce(self) -> None:
        """Wait until nothing of this rank's calls runs any more; until `_recover` calls raise."""

    def _finished(self) -> int:
        """Rounds that this rank has finished."""

    def _recover(self, living: int) -> None:
        """Write this rank's share as at creation, with the mask `living`, and take calls again."""


class Membership:
    """Ranks that have met, each a process, and watched from now on. Collective. Owns `control`.

    Raises RendezvousFailed where a peer dies meanwhile, or cannot do its part, and SetupError or
    HandleUnsupported where this one cannot.
    """

    def __init__(self, control: ControlPlane, ended: Callable[[int], None], timeout: float) -> None:
        """ended: called in another thread with the rank of each process that ends."""

        def of_peers(fd: int) -> Mapping[int, int]:
            fds = control.exchange_fds(fd, timeout)
            found = {rank: each for rank, each in enumerate(fds) if each is not None}
            os.close(found.pop(control.rank))
            return found

        def peer_ended(rank: int) -> None:
            control.end(rank)
            ended(rank)

        self.control = control
        with contextlib.ExitStack() as undo:
            try:
                mine = lifelong_pipe()
                for fd in mine:
                    undo.callback(os.close, fd)
                pipes = of_peers(mine[0])
                for fd in pipes.values():
                    undo.callback(os.close, fd)
                own = _own_pidfd()
                try:  # peers get copies
                    processes = of_peers(own)
                finally:
                    os.close(own)
                for fd in processes.values():
                    undo.callback(os.close, fd)
                self.liveness = Liveness(processes, pipes, mine, peer_ended)
                undo.pop_all()
                undo.callback(self.liveness.close)
                self.agreement = Agreement(control, self.liveness, of_peers)
            except BaseException as error:
                control.close(f"could not watch its peers: {error}")
                if isinstance(error, WeftError) or not isinstance(error, OSError | RuntimeError):
                    raise
                raise SetupError(
                    f"rank {control.rank} cannot watch the other ranks: {error}; it needs free "
                    "descriptors (ulimit -n) and a thread (ulimit -u)"
                ) from error
            undo.callback(self.agreement.close)
            self._held = undo.pop_all()

    def close(self, why: str | None = None) -> None:
        """Give everything back. Idempotent; peers that wait for this rank get the reason."""
        with self._held:
            self.control.close(why)


def _own_pidfd() -> int:
    """Raises SetupError."""
    try:
        return os.pidfd_open(os.getpid())
    except OSError as error:
        raise SetupError(
            f"pidfd_open is refused ({error.strerror}), by which ranks see each other's deaths: "
            "allow it in the container's seccomp profile, as Docker's own does"
        ) from error
