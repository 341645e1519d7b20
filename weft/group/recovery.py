# SPDX-License-Identifier: Apache-2.0
"""Recovery of a group: the survivors of a death continue, with or without new processes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import MappingProxyType

import torch

from weft.errors import InvalidArgument, OutOfOrder, RecoveryFailed, RendezvousFailed, WeftError
from weft.group.agreement import Recovery
from weft.group.control import ControlPlane
from weft.group.liveness import Peers
from weft.group.meeting import Meeting, meet
from weft.group.membership import Membership, Roster
from weft.group.messages import Messages

_log = logging.getLogger(__name__)


class GroupRecovery:
    """Recovery of one group, and the connections that a recovery replaces.

    Methods are those of `Group`, whose docstrings tell what they do and raise.
    """

    def __init__(
        self, messages: Messages, roster: Roster, device: torch.device, job_machines: int
    ) -> None:
        self.closed = False
        self._messages = messages
        self._roster = roster
        self._device = device
        self._job_machines = job_machines  # of the group, or of the one whose host it is
        self._owner = os.getpid()
        self._lock = threading.Lock()  # held by the thread that recovers
        self._membership: Membership | None = None
        self._fresh: Membership | None = None  # with new processes, until the survivors decide
        self._meeting: Meeting | None = None  # that this rank has opened for new processes
        self._is_undecided = False  # whether the decision on `_fresh` missed its deadline

    def watch(self, control: ControlPlane, ranks: Sequence[int] | None = None) -> None:
        """Notice from now on when the process of a peer ends. Collective.

        Args:
            control: Sockets to the peers.
            ranks: Rank in this group of each rank of `control`. Default: the same numbers.
        """
        self._membership = self._watch(control, self._messages.timeout, ranks)

    def close(self, reason: str | None = None) -> None:
        """Release all connections. Idempotent; peers that wait for this rank get the reason."""
        self.closed = True
        with contextlib.ExitStack() as last:
            for membership in (self._fresh, self._membership):
                if membership is not None:
                    last.callback(membership.close)
            last.callback(self._messages.control.close, None if reason is None else f"it {reason}")
            last.callback(self._close_meeting)

    def recover(self, suspects: Collection[int], timeout: float) -> Recovery:
        """See `Group.recover`."""
        began = time.monotonic()
        _warn_of_torchrun()
        with self._exclusive():
            return self._recover(set(suspects), began, timeout)

    def _recover(self, suspects: set[int], began: float, timeout: float) -> Recovery:
        for member in self._roster.members().values():
            suspects |= member.suspected_ranks()
        deadline, rank = began + timeout, self._messages.rank
        if self._is_undecided and self._admit_newcomers(suspects, deadline):
            self._require().control.leave(f"rank {rank} gave up waiting in replace")
        membership = self._require()
        control = membership.control
        if suspects:  # a suspect may only wait for another rank, in a message with a later deadline
            control.interrupt(suspects, f"{control.name(rank)} left its calls to recover")
        while True:
            recovery_id, dead, _ = membership.agreement.decide(suspects, deadline)
            self._roster.remove(dead)
            living = self._roster.living
            control.resume(recovery_id, set(living))
            try:
                finished = self._resume(deadline)
            except RendezvousFailed as error:  # another rank died or gave up: agree again
                if time.monotonic() < deadline:
                    continue
                raise RecoveryFailed(f"{error}; call recover again") from error
            seconds = time.monotonic() - began
            return Recovery(tuple(sorted(dead)), living, MappingProxyType(finished), seconds)

    def open_meeting(self) -> Meeting:
        """See `Group.open_meeting`."""
        messages = self._messages
        hub = messages.living[0]

        def open_at_hub() -> None:
            if messages.rank == hub:
                self._close_meeting()
                self._meeting = Meeting.open(hub)

        messages.run_collective(open_at_hub, action="opening a meeting")
        own = self._meeting if messages.rank == hub else None
        addresses = messages.gather("open_meeting", own.address if own else None)
        return own or Meeting.from_address(addresses[hub])

    def _close_meeting(self) -> None:
        # A forked child would end the meeting for all others.
        if self._meeting is not None and os.getpid() == self._owner:
            self._meeting.close()

    def join(self, timeout: float) -> None:
        """Join the survivors in `replace`, as a new process. Collective."""
        self._require()
        _check_joining(self._messages.gather("replace", None, timeout))
        self._messages.is_newcomer = True

    def replace(self, meeting: Meeting, timeout: float) -> None:
        """See `Group.replace`."""
        with self._exclusive():
            self._replace(meeting, timeout)

    def _replace(self, meeting: Meeting, timeout: float) -> None:
        messages = self._messages
        dead = frozenset(range(messages.size)) - set(messages.living)
        if not dead:
            raise OutOfOrder("no rank is gone: call recover first, which finds out who is")
        problem: Exception | None = None
        try:
            self._fresh = self._connect_newcomers(meeting, dead, timeout)
        except Exception as error:
            problem = error
        # Another survivor may wait for a new process for `timeout` before it comes.
        if not self._admit_newcomers((), time.monotonic() + 2 * timeout):
            raise problem or RendezvousFailed(
                f"another survivor did not meet all new processes, for ranks {sorted(dead)}: end "
                "them, call recover and begin again"
            )
        before = messages.timeout
        messages.joining, messages.timeout = dead, timeout
        try:
            messages.replay_creations()
        finally:
            messages.joining, messages.timeout = frozenset(), before
        self._resume(time.monotonic() + timeout)

    def enter(self, timeout: float) -> None:
        """See `Group.enter`."""
        with self._exclusive():
            self._resume(time.monotonic() + timeout)
            self._messages.is_newcomer = False

    def _connect_newcomers(
        self, meeting: Meeting, dead: frozenset[int], timeout: float
    ) -> Membership:
        """Connect to the other survivors and to new processes for `dead`."""
        membership, messages = self._require(), self._messages
        with Peers() as peers:
            for rank in messages.living:
                if rank != messages.rank:
                    pid = membership.control.pids[rank]
                    peers.watch_pidfd(rank, pid, membership.liveness.pidfd(rank))
            control = meet(
                meeting,
                rank=messages.rank,
                size=messages.size,
                device=self._device.type,
                timeout=timeout,
                peers=peers,
            )
        fresh = self._watch(control, timeout)
        try:
            _check_joining(control.gather("replace", sorted(dead), timeout))
        except BaseException as error:
            fresh.close(str(error))
            raise
        return fresh

    def _admit_newcomers(self, suspects: Collection[int], deadline: float) -> bool:
        """Continue with the new processes if every survivor has met them, else on none.

        A new process that dies may have met some of the survivors only. Raises RecoveryFailed.
        """
        membership = self._require()
        self._is_undecided = True
        decision = membership.agreement.decide(suspects, deadline, admit=self._fresh is not None)
        self._is_undecided = False
        fresh, self._fresh = self._fresh, None
        if not decision.admit:
            if fresh is not None:
                fresh.close("went on without new processes, which not every survivor had met")
            # A survivor that has given up waiting is in this era already, in a recovery.
            control, rank = membership.control, self._messages.rank
            control.resume(decision.round, set(self._messages.living) - decision.dead)
            control.leave(f"rank {rank} could not take in new processes; call recover")
            return False
        assert fresh is not None
        with contextlib.ExitStack() as last:
            last.callback(self._connect, fresh)  # whatever is raised here, since all have decided
            for member in self._roster.members().values():  # before its memory changes
                member.quiesce()
        return True

    def _connect(self, fresh: Membership) -> None:
        """Replace the connections by `fresh`, with all ranks taking part."""
        old, self._membership = self._membership, fresh
        with contextlib.ExitStack() as last:
            if old is not None:
                last.callback(old.close)
            self._messages.control = fresh.control
            self._roster.restore(fresh.liveness.has_ended)

    def _resume(self, deadline: float) -> dict[str, int]:
        """Restart the operators that all living ranks have; return the rounds that all finished.

        No process of a dead rank can store into their memory now. If operators cannot restart,
        the first one's error is raised after the others have restarted.
        """
        messages, roster = self._messages, self._roster

        def seconds_left() -> float:
            return max(0.001, deadline - time.monotonic())

        def barrier(problems: list[Exception]) -> None:
            problem = problems[0] if problems else None
            messages.vote_unrecorded(problem, "recovering", seconds_left(), common_error=WeftError)

        members = roster.members()
        own = {name: member.finished_rounds() for name, member in members.items()}
        reports = messages.gather("recover", own, seconds_left())
        rounds = [reports[rank] for rank in messages.living]
        finished = {
            name: min(each[name] for each in rounds)
            for name in own
            if all(name in each for each in rounds)
        }
        common = [members[name] for name in finished]
        barrier(_run_all([member.quiesce for member in common]))  # now no rank stores into a share
        problems = _run_all([partial(member.restart, roster.living_mask) for member in common])
        roster.renotify_ended(common)  # `restart` has reset what operators know of deaths
        barrier(problems)  # every share is as at creation: calls may store into it
        return finished

    def _watch(
        self, control: ControlPlane, timeout: float, ranks: Sequence[int] | None = None
    ) -> Membership:
        roster = self._roster

        def on_end(rank: int) -> None:
            roster.report_end(rank if ranks is None else ranks[rank])

        control.describe_activity = roster.describe_activity
        return Membership(control, on_end, timeout)

    def _require(self) -> Membership:
        """Return the membership, or raise if this group cannot recover."""
        if self.closed:
            raise OutOfOrder("the group is closed; make a new one")
        if self._job_machines > 1:
            raise InvalidArgument(
                f"a group of {self._job_machines} machines cannot recover, nor can the local "
                "group of one of its hosts: restart the job on all of them, with new process "
                "groups and a new group"
            )
        if self._membership is None:
            raise InvalidArgument(
                "this group cannot recover: it needs two ranks or more, each a process, of one "
                "machine"
            )
        self._membership.control.check_process()
        return self._membership

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Exclude other threads of this rank, which peers would mistake for this one."""
        self._require()
        if not self._lock.acquire(blocking=False):
            raise OutOfOrder(
                f"two threads of rank {self._messages.rank} recover one group at a time; call it "
                "from one"
            )
        try:
            yield
        finally:
            self._lock.release()


@functools.cache
def _warn_of_torchrun() -> None:
    """Log, once, that an agent of torchrun ends all ranks after the first that fails."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _log.warning(
            "recover under torchrun: its agent ends all ranks of this machine as soon as one has "
            "failed. Start the ranks with weft.launch(..., tolerate_deaths=True) or another "
            "launcher that lets the survivors live"
        )


def _run_all(steps: list[Callable[[], None]]) -> list[Exception]:
    """Run every step and return the errors: peers wait in a barrier."""
    problems: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as error:
            problems.append(error)
    return problems


def _check_joining(dead_by_rank: list[list[int] | None]) -> None:
    """Raise RendezvousFailed unless the ranks that join are those that every survivor lacks.

    A survivor reports the dead ranks, a rank that joins reports None.
    """
    joining = [rank for rank, dead in enumerate(dead_by_rank) if dead is None]
    for rank, dead in enumerate(dead_by_rank):
        if dead is not None and dead != joining:
            raise RendezvousFailed(
                f"rank {rank} goes on without ranks {dead}, and ranks {joining} join: start one "
                "new process for each that is gone, with its number"
            )
    if len(joining) == len(dead_by_rank):
        raise RendezvousFailed("all ranks join and none is there to join: make a new group")
