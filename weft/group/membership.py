# SPDX-License-Identifier: Apache-2.0
"""Ranks of a group: which take part, which have ended, and the operators that depend on them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from weft.errors import SetupError, WeftError
from weft.group.agreement import Agreement
from weft.group.control import ControlPlane
from weft.group.liveness import Liveness, create_lifetime_pipe

_SAMPLE = 0.1  # seconds between two readings of a peer's wait clock


@dataclass(frozen=True)
class Progress:
    """What a rank does in the calls of one operator, read from its header.

    Attributes:
        wait_clock: Advances while the rank waits in a call.
        finished: Number of dispatches, combines and all-reduces that it has finished.
        failed: Whether a call of the rank failed.
        begins_early: Whether a call may have begun that neither waits nor has finished.
    """

    wait_clock: int
    finished: int
    failed: bool
    begins_early: bool


class Lifecycle(Protocol):
    """An operator as its group sees it: notified of deaths, stopped and restarted by a recovery.

    `Group.attach` registers it. A recovery calls `quiesce` on every operator of every living rank,
    then `restart`, each between two barriers, so no rank stores into a share that another resets.
    """

    def peer_ended(self, rank: int) -> None:
        """Stop waiting for a rank whose process has ended. Called from the watcher's thread."""

    def announce_leave(self, reason: str, *, drain: bool = False) -> None:
        """Notify the peers that this rank begins no more calls.

        Args:
            why: Reason for their errors.
            settled: Wait first until the calls that were enqueued have finished.
        """

    def suspected_ranks(self) -> set[int]:
        """Return the ranks that missed the deadline of a call."""

    def progress(self, rank: int) -> Progress | None:
        """Return what a living rank does in this operator's calls, or None after close.

        Takes no lock.
        """

    def leave_for_mismatch(self, reason: str) -> None:
        """Leave the group because the ranks' calls differ; peers raise the same text."""

    def quiesce(self) -> None:
        """End this rank's calls and wait until none runs. Calls raise until `restart`."""

    def finished_rounds(self) -> int:
        """Return the number of rounds that this rank has finished."""

    def restart(self, living: int) -> None:
        """Reset this rank's share to its state at creation and take calls again.

        Args:
            living: Ranks that take part from now on, bit r for rank r.
        """


class Roster:
    """Ranks that take part, ranks whose processes have ended, and the operators to notify.

    Any thread may call it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._lock = threading.Lock()
        self._living = (1 << size) - 1
        self._ended: set[int] = set()
        # By kind and generation: the same names on every rank, in order of creation. Replaced, not
        # changed, so that threads read it without the lock.
        self._members: weakref.WeakValueDictionary[str, Lifecycle] = weakref.WeakValueDictionary()

    @property
    def living_mask(self) -> int:
        """Mask of the ranks that take part, bit r for rank r."""
        return self._living

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that take part, ascending."""
        return tuple(self._among_living(range(self.size)))

    @property
    def ended(self) -> frozenset[int]:
        """Ranks that take part although their processes have ended."""
        with self._lock:
            return frozenset(self._among_living(self._ended))

    def attach(self, name: str, member: Lifecycle) -> None:
        """Register an operator, and notify it of the deaths so far. It is held weakly."""
        with self._lock:
            members = self.members()
            self._members = weakref.WeakValueDictionary({**members, name: member})
            for rank in self._among_living(self._ended):
                member.peer_ended(rank)

    def members(self) -> dict[str, Lifecycle]:
        """Return the operators that exist, by name, in order of creation."""
        return dict(self._members)

    def report_end(self, rank: int) -> None:
        """Record that the process of a rank has ended, and notify all operators."""
        with self._lock:
            self._ended.add(rank)
            if self._living >> rank & 1:  # otherwise reported late, after a recovery
                for member in list(self._members.values()):
                    member.peer_ended(rank)

    def renotify_ended(self, members: Iterable[Lifecycle]) -> None:
        """Notify operators that have restarted of deaths since the ranks agreed on the living."""
        with self._lock:
            for rank in self._among_living(self._ended):
                for member in members:
                    member.peer_ended(rank)

    def remove(self, dead: Collection[int]) -> None:
        """Let all ranks take part except `dead`."""
        with self._lock:
            self._living = sum(1 << rank for rank in range(self.size) if rank not in dead)

    def restore(self, has_ended: Callable[[int], bool]) -> None:
        """Let all ranks take part again, some of them as new processes."""
        with self._lock:
            self._living = (1 << self.size) - 1
            others = set(range(self.size)) - {self.rank}
            self._ended = {rank for rank in others if has_ended(rank)}

    def describe_activity(
        self, ranks: Collection[int], current_call: Callable[[int], str | None]
    ) -> dict[int, str]:
        """Return, in words, what each of `ranks` is doing as far as this rank can see.

        Takes 0.1 s. `current_call` returns the control call in which a rank waits, or None.
        """
        with self._lock:
            ended = set(self._ended)
        all_waits = self._sample_waits(ranks)
        places = {}
        for rank in ranks:
            waits = [name for name, waiting in all_waits.items() if rank in waiting]
            call = current_call(rank)
            if rank in ended:
                places[rank] = "has ended"
            elif waits:
                places[rank] = f"waits in a call of {' and of '.join(waits)}"
            elif call is not None:
                places[rank] = f"waits in {call}"
            else:
                places[rank] = "is in no call of this group that waits for others"
        return places

    def find_diverged_operators(
        self, member: Lifecycle, rank: int
    ) -> tuple[str, dict[str, Lifecycle]]:
        """Return the name of `member`, and other operators in which `rank` is without this rank.

        This rank waits for `rank` in a call of `member`. If both have finished the same calls of
        another operator, and `rank` waits or failed there while this rank does not wait, then the
        two make their calls in different orders. Takes 0.1 s and no lock.
        """
        waits = self._sample_waits((self.rank, rank))
        own_name, others = "", {}
        for name, other in self.members().items():
            own_name = name if other is member else own_name
            own, theirs = other.progress(self.rank), other.progress(rank)
            if other is member or own is None or theirs is None or own.begins_early:
                continue
            stuck = theirs.failed or rank in waits.get(name, ())
            if stuck and self.rank not in waits.get(name, ()) and own.finished <= theirs.finished:
                others[name] = other
        return own_name, others

    def _sample_waits(self, ranks: Iterable[int]) -> dict[str, set[int]]:
        """Return, by operator, the ranks whose wait clocks advance within 0.1 s."""
        before = {
            (name, rank): member.progress(rank)
            for name, member in self.members().items()
            for rank in ranks
        }
        time.sleep(_SAMPLE)
        waits: dict[str, set[int]] = {}
        for name, member in self.members().items():
            for rank in ranks:
                first, then = before.get((name, rank)), member.progress(rank)
                if first is not None and then is not None and first.wait_clock != then.wait_clock:
                    waits.setdefault(name, set()).add(rank)
        return waits

    def _among_living(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if self._living >> rank & 1]


class Membership:
    """Connected processes that watch each other: sockets, liveness and pages to agree on deaths.

    Collective. Owns `control`.
    """

    def __init__(
        self, control: ControlPlane, on_end: Callable[[int], None], timeout: float
    ) -> None:
        """Watch the peers of `control`.

        Args:
            control: Sockets of ranks that have met.
            on_end: Called in another thread with the rank of each process that ends.
            timeout: Seconds for each of three exchanges of descriptors.

        Raises:
            RendezvousFailed: a peer died or could not do its part.
            SetupError: this rank lacks descriptors or threads, or pidfd_open is forbidden.
            HandleUnsupported: a peer sent memory that it could change.
        """

        def exchange(fd: int) -> Mapping[int, int]:
            fds = control.exchange_fds(fd, timeout)
            by_rank = {rank: fd for rank, fd in enumerate(fds) if fd is not None}
            os.close(by_rank.pop(control.rank))
            return by_rank

        def on_peer_end(rank: int) -> None:
            control.disconnect(rank)
            on_end(rank)

        self.control = control
        with contextlib.ExitStack() as undo:
            try:
                own_pipe = create_lifetime_pipe()
                for fd in own_pipe:
                    undo.callback(os.close, fd)
                pipes = exchange(own_pipe[0])
                for fd in pipes.values():
                    undo.callback(os.close, fd)
                own_pidfd = _open_own_pidfd()
                try:  # peers get copies
                    pidfds = exchange(own_pidfd)
                finally:
                    os.close(own_pidfd)
                for fd in pidfds.values():
                    undo.callback(os.close, fd)
                self.liveness = Liveness(pidfds, pipes, own_pipe, on_peer_end)
                undo.pop_all()
                undo.callback(self.liveness.close)
                self.agreement = Agreement(control, self.liveness, exchange)
            except BaseException as error:
                control.close(f"could not watch its peers: {error}")
                if isinstance(error, WeftError) or not isinstance(error, OSError | RuntimeError):
                    raise
                raise SetupError(
                    f"rank {control.rank} cannot watch the other ranks: {error}; it needs free "
                    "descriptors (ulimit -n) and a thread (ulimit -u)"
                ) from error
            undo.callback(self.agreement.close)
            self._resources = undo.pop_all()

    def close(self, reason: str | None = None) -> None:
        """Release everything. Idempotent; peers that wait for this rank get the reason."""
        with self._resources:
            self.control.close(reason)


def _open_own_pidfd() -> int:
    try:
        return os.pidfd_open(os.getpid())
    except OSError as error:
        raise SetupError(
            f"pidfd_open is refused ({error.strerror}), by which ranks see each other's deaths: "
            "allow it in the container's seccomp profile, as Docker's own does"
        ) from error
