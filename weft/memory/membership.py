"""Who the ranks of a group are: processes that share memory, each watched by all others."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

from weft.errors import InvalidArgument, OutOfOrder
from weft.memory.agreement import MAX_AGREEING, Agreement
from weft.memory.control_plane import ControlPlane
from weft.memory.liveness import Liveness, LivenessFd
from weft.memory.messages import Control, Messages


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

    `agreement` is None for more ranks than can agree. Raises RendezvousFailed where a peer dies
    meanwhile, or cannot do its part, and OSError or HandleUnsupported where this one cannot.
    """

    def __init__(
        self,
        control: ControlPlane,
        process: int,
        ended: Callable[[int], None],
        timeout: float,
    ) -> None:
        """process: a descriptor that shows the end of this process.

        ended: called in another thread with the rank of each process that ends.
        """
        self.control = control
        self.liveness: Liveness | None = None
        self.agreement: Agreement | None = None
        try:
            self.liveness = Liveness(self._of_peers(process, timeout), ended)
            if control.size <= MAX_AGREEING:
                self.agreement = Agreement(control.rank, control.size, control.name)
                page = self.agreement.take_fd()
                try:
                    pages = self._of_peers(page, timeout)
                finally:
                    os.close(page)
                try:
                    self.agreement.map(pages)
                finally:
                    for fd in pages.values():
                        os.close(fd)
        except BaseException as error:
            self.close(f"could not watch its peers: {error}")
            raise

    def close(self, why: str | None = None) -> None:
        """Give everything back. Idempotent; peers that wait for this rank get the reason."""
        self.control.close(why)
        if self.liveness is not None:
            self.liveness.close()
        if self.agreement is not None:
            self.agreement.close()

    def _of_peers(self, fd: int, timeout: float) -> Mapping[int, int]:
        """The descriptor of every peer that corresponds to `fd` here."""
        fds = self.control.exchange_fds(fd, timeout)
        found = {rank: each for rank, each in enumerate(fds) if each is not None}
        os.close(found.pop(self.control.rank))
        return found


class Members(Messages):
    """Ranks that have met, and the operators that share their fate."""

    def __init__(
        self, control: Control, *, rank: int, size: int, timeout: float, watched: bool
    ) -> None:
        super().__init__(control, rank=rank, size=size, timeout=timeout)
        # By generation: the same key on every rank, and the order of creation.
        self._members: weakref.WeakValueDictionary[str, Member] = weakref.WeakValueDictionary()
        self._ended: set[int] = set()  # ranks whose processes have ended
        self._fate = threading.Lock()  # of these two and of the living
        self._closed = False
        self._process: LivenessFd | None = None
        self._membership: Membership | None = None
        # A group that is dropped unclosed gives its sockets back without a warning. At exit the
        # system does.
        weakref.finalize(self, control.close).atexit = False
        if watched and isinstance(control, ControlPlane) and size > 1:
            self._process = LivenessFd()
            weakref.finalize(self, self._process.close).atexit = False
            self._membership = self._watch(control, timeout)

    def _watch(self, control: ControlPlane, timeout: float) -> Membership:
        """From now on the end of a peer's process is noticed at once, and can be agreed on."""
        assert self._process is not None
        ended = weakref.WeakMethod(self._peer_ended)

        def peer_ended(rank: int) -> None:
            method = ended()
            if method is not None:
                method(rank)

        membership = Membership(control, self._process.fd, peer_ended, timeout)
        weakref.finalize(self, membership.close).atexit = False
        return membership

    def attach(self, member: Member) -> None:
        """Notify `member` of deaths, of this rank's leaving and of recoveries; one a heap."""
        with self._fate:
            self._members[f"{type(member).__name__} {self._generation}"] = member
            for rank in self._taking_part(self._ended):
                member._peer_ended(rank)

    def pid(self, rank: int) -> int | None:
        """The process id of a rank as the kernel reported it, where it is known."""
        pids = getattr(self._control, "pids", None)
        return None if pids is None else int(pids[rank])

    def _peer_ended(self, rank: int) -> None:
        with self._fate:
            self._ended.add(rank)
            if self._living >> rank & 1:  # else heard late, after a recovery
                for member in self._attached():
                    member._peer_ended(rank)

    def _attached(self) -> list[Member]:
        """What shares the fate of this group, in order of creation."""
        return list(self._members.values())

    def _move(self, fresh: Membership) -> None:
        """Go on with all ranks, on new sockets."""
        assert fresh.liveness is not None
        old, self._control, self._membership = self._membership, fresh.control, fresh
        with self._fate:
            self._living = (1 << self.size) - 1
            others = set(range(self.size)) - {self.rank}
            self._ended = {rank for rank in others if fresh.liveness.ended(rank)}
        if old is not None:
            old.close()

    def _recoverable(self) -> tuple[ControlPlane, Liveness, Agreement]:
        """What a recovery needs. Raises OutOfOrder and InvalidArgument."""
        if self._closed:
            raise OutOfOrder("the group is closed; make a new one")
        found = self._membership
        if found is None or found.liveness is None or found.agreement is None:
            raise InvalidArgument(
                f"this group cannot recover: it needs 2 to {MAX_AGREEING} ranks, each a process, "
                "that share memory"
            )
        return found.control, found.liveness, found.agreement
