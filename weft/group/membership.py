# SPDX-License-Identifier: Apache-2.0
"""Participating and dead ranks of a group, and the operators that are notified of deaths."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from weft.errors import SetupError, WeftError
from weft.group.agreement import Agreement
from weft.group.control import ControlPlane
from weft.group.liveness import Liveness, create_lifetime_pipe
from weft.group.waits import Waits

_SAMPLE = 0.1  # seconds between two readings of a peer's wait clock


@dataclass(frozen=True)
class Progress:
    """State of a rank's calls of one operator, read from its header.

    Attributes:
        wait_clock: Advances while the rank waits in a call.
        finished: Number of dispatches, combines and all-reduces that the rank has finished.
        failed: Whether a call of the rank failed.
        begins_early: Whether a call may have begun that neither waits nor has finished.
        last_call: The last call that the rank has finished, such as "combine 12", or "".
        last_end_ns: When it ended, in nanoseconds of the rank's clock.
    """

    wait_clock: int
    finished: int
    failed: bool
    begins_early: bool
    last_call: str
    last_end_ns: int


class Lifecycle(Protocol):
    """Interface of an operator to its group, which reports deaths and restarts it in a recovery.

    `Group.attach` registers an operator. A recovery calls `quiesce` on every operator of every
    living rank, then `restart`, each between two barriers, so that no rank stores into a share that
    another rank resets.
    """

    def mark_peer_dead(self, rank: int) -> None:
        """Stop waiting for a rank whose process has ended. Called in the watcher thread."""

    def announce_leave(self, reason: str, *, drain: bool = False) -> None:
        """Notify the peers that this rank makes no further calls.

        Args:
            reason: Text of the error that the peers raise.
            drain: Whether to wait first until all enqueued calls have finished.
        """

    def suspected_ranks(self) -> set[int]:
        """Return the ranks that missed the deadline of a call."""

    def read_progress(self, rank: int) -> Progress | None:
        """Return the state of a living rank's calls of this operator, or None after close.

        Acquires no lock.
        """

    def leave_for_mismatch(self, reason: str) -> None:
        """Leave the group because the ranks' calls differ. Peers raise the same text."""

    def quiesce(self) -> None:
        """End this rank's calls and wait until none is running. Calls raise until `restart`."""

    def count_finished_rounds(self) -> int:
        """Return the number of rounds that this rank has finished."""

    def waits(self) -> Waits:
        """Return the waits of this rank for its peers. Raises OutOfOrder after close."""

    def restart(self, living: int) -> None:
        """Reset this rank's share to its initial state and accept calls again.

        Args:
            living: Mask of the ranks that take part from now on, bit r for rank r.
        """

    @property
    def heap_generation(self) -> int:
        """Generation of the operator's heap."""

    def exclude_calls(self) -> AbstractContextManager[None]:
        """Return a context that waits for this rank's work and excludes calls.

        Raises the error that broke the operator, or OutOfOrder if a call runs.
        """

    def mark_asleep(self) -> None:
        """Make calls raise until `restart`, and access the heap no more. Idempotent."""

    def leave_closed(self, rank: int) -> None:
        """Make calls raise PeerLeft: `rank` closed the operator while the group was asleep."""


class Roster:
    """Participating ranks, ended ranks, and the operators to notify. Thread-safe."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._lock = threading.Lock()
        self._living = (1 << size) - 1
        self._ended: set[int] = set()
        # Keys are kind and generation, equal on every rank, in order of creation. The dictionary
        # is replaced rather than modified, so that threads read it without the lock.
        self._members: weakref.WeakValueDictionary[str, Lifecycle] = weakref.WeakValueDictionary()

    @property
    def living_mask(self) -> int:
        """Mask of the ranks that take part, bit r for rank r."""
        return self._living

    @property
    def living(self) -> tuple[int, ...]:
        """Participating ranks, ascending."""
        return tuple(self._among_living(range(self.size)))

    @property
    def ended(self) -> frozenset[int]:
        """Participating ranks whose processes have ended."""
        with self._lock:
            return frozenset(self._among_living(self._ended))

    def attach(self, name: str, member: Lifecycle) -> None:
        """Register an operator by a weak reference, and notify it of the deaths so far."""
        with self._lock:
            members = self.members()
            self._members = weakref.WeakValueDictionary({**members, name: member})
            for rank in self._among_living(self._ended):
                member.mark_peer_dead(rank)

    def members(self) -> dict[str, Lifecycle]:
        """Return the operators that exist, by name, in order of creation."""
        return dict(self._members.items())  # by key, one may end in between

    def report_end(self, rank: int) -> None:
        """Record that the process of a rank has ended, and notify all operators."""
        with self._lock:
            self._ended.add(rank)
            if self._living >> rank & 1:  # a recovery may have removed the rank already
                for member in list(self._members.values()):
                    member.mark_peer_dead(rank)

    def renotify_ended(self, members: Iterable[Lifecycle]) -> None:
        """Notify restarted operators of participating ranks whose processes have ended."""
        with self._lock:
            for rank in self._among_living(self._ended):
                for member in members:
                    member.mark_peer_dead(rank)

    def remove(self, dead: Collection[int]) -> None:
        """Exclude the ranks `dead`; all others participate."""
        with self._lock:
            self._living = sum(1 << rank for rank in range(self.size) if rank not in dead)

    def restore(self, has_ended: Callable[[int], bool]) -> None:
        """Make all ranks participate again after new processes have replaced the dead ones."""
        with self._lock:
            self._living = (1 << self.size) - 1
            others = set(range(self.size)) - {self.rank}
            self._ended = {rank for rank in others if has_ended(rank)}

    def describe_activity(
        self,
        ranks: Collection[int],
        current_call: Callable[[int], str | None],
        last_call: Callable[[int], str | None],
    ) -> dict[int, str]:
        """Describe the state of each of `ranks` as seen from this rank, for errors.

        Blocks for 0.1 s.

        Args:
            ranks: Ranks to describe.
            current_call: Returns the control call in which a rank waits, or None.
            last_call: Returns the last control call that a rank has entered, or None.
        """
        with self._lock:
            ended = set(self._ended)
        all_waits = self._sample_waits(ranks)
        states = {}
        for rank in ranks:
            waits = [name for name, waiting in all_waits.items() if rank in waiting]
            call = current_call(rank)
            if rank in ended:
                states[rank] = "has ended"
            elif waits:
                states[rank] = f"waits in a call of {' and of '.join(waits)}"
            elif call is not None:
                states[rank] = f"waits in {call}"
            else:
                last_calls = filter(None, (last_call(rank), self._find_last_call(rank)))
                states[rank] = "is in no call of this group that waits for others"
                if text := " and ".join(last_calls):
                    states[rank] += f" (last in {text})"
        return states

    def find_diverged_operators(
        self, member: Lifecycle, rank: int
    ) -> tuple[str, dict[str, Lifecycle]]:
        """Find other operators in which `rank` waits while this rank waits for it in `member`.

        If both ranks have finished the same calls of another operator, and `rank` waits or failed
        there while this rank does not wait, the two ranks make their calls in different orders.
        Blocks for 0.1 s; acquires no lock.

        Returns:
            The name of `member`, and the other operators by name.
        """
        waits = self._sample_waits((self.rank, rank))
        own_name, others = "", {}
        for name, other in self.members().items():
            own_name = name if other is member else own_name
            own, theirs = other.read_progress(self.rank), other.read_progress(rank)
            if other is member or own is None or theirs is None or own.begins_early:
                continue
            stuck = theirs.failed or rank in waits.get(name, ())
            if stuck and self.rank not in waits.get(name, ()) and own.finished <= theirs.finished:
                others[name] = other
        return own_name, others

    def _find_last_call(self, rank: int) -> str | None:
        """Return the operator call that a rank has finished last, or None."""
        calls = []
        for name, member in self.members().items():
            progress = member.read_progress(rank)
            if progress is not None and progress.last_call:
                calls.append((progress.last_end_ns, f"{progress.last_call} of {name}"))
        return max(calls)[1] if calls else None

    def _sample_waits(self, ranks: Iterable[int]) -> dict[str, set[int]]:
        """Return, for each operator, the ranks whose wait clocks advance within 0.1 s."""
        before = {
            (name, rank): member.read_progress(rank)
            for name, member in self.members().items()
            for rank in ranks
        }
        time.sleep(_SAMPLE)
        waits: dict[str, set[int]] = {}
        for name, member in self.members().items():
            for rank in ranks:
                first, last = before.get((name, rank)), member.read_progress(rank)
                if first is not None and last is not None and first.wait_clock != last.wait_clock:
                    waits.setdefault(name, set()).add(rank)
        return waits

    def _among_living(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if self._living >> rank & 1]


class Membership:
    """Sockets, liveness and agreement pages of connected ranks. Owns `control`. Collective."""

    def __init__(
        self, control: ControlPlane, on_end: Callable[[int], None], timeout: float
    ) -> None:
        """Watch the peers of `control`.

        Args:
            control: Sockets of connected ranks.
            on_end: Called in another thread with the rank of each process that ends.
            timeout: Seconds for each of three exchanges of descriptors.

        Raises:
            RendezvousFailed: a peer died or failed.
            SetupError: this rank is out of descriptors or threads, or pidfd_open is forbidden.
            HandleUnsupported: a peer sent memory that it could resize.
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
        """Release all resources; peers that wait for this rank get `reason`. Idempotent."""
        with self._resources:
            self.control.close(reason)


def _open_own_pidfd() -> int:
    try:
        return os.pidfd_open(os.getpid())
    except OSError as error:
        raise SetupError(
            f"pidfd_open is forbidden ({error.strerror}), but ranks need it to detect deaths: "
            "allow it in the container's seccomp profile, as Docker's default profile does"
        ) from error
