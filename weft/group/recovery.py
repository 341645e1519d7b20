# SPDX-License-Identifier: Apache-2.0
"""Recovery of a group after deaths, with or without new processes for the dead ranks."""

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
from weft.group.sleep import GroupSleep

_log = logging.getLogger(__name__)


class GroupRecovery:
    """Recovery of one group; owns the connections that a recovery replaces.

    The public methods implement those of `Group`, whose docstrings describe them.
    """

    def __init__(
        self,
        messages: Messages,
        roster: Roster,
        sleep: GroupSleep,
        device: torch.device,
        job_machines: int,
        *,
        is_replacement: bool = False,
    ) -> None:
        self.closed = False
        self._must_join = is_replacement  # the only participating rank until `join`
        if is_replacement:
            roster.remove(set(range(messages.size)) - {messages.rank})
        self._messages = messages
        self._roster = roster
        self._sleep = sleep
        self._device = device
        self._job_machines = job_machines  # number of machines of the whole job
        self._owner = os.getpid()
        self._lock = threading.Lock()  # held by the thread that recovers
        self._membership: Membership | None = None
        self._pending: Membership | None = None  # with new processes, until the survivors decide
        self._meeting: Meeting | None = None  # opened by this rank for new processes
        self._is_undecided = False  # whether the decision on `_pending` missed its deadline

    def watch(self, control: ControlPlane, ranks: Sequence[int] | None = None) -> None:
        """Watch the peers for deaths from now on. Collective.

        Args:
            control: Sockets to the peers.
            ranks: Rank in this group of each rank of `control`. Default: the same numbers.
        """
        self._membership = self._watch(control, self._messages.timeout, ranks)

    def close(self, reason: str | None = None) -> None:
        """Release all connections; peers that wait for this rank get `reason`. Idempotent."""
        self.closed = True
        with contextlib.ExitStack() as cleanup:
            for membership in (self._pending, self._membership):
                if membership is not None:
                    cleanup.callback(membership.close)
            cleanup.callback(
                self._messages.control.close, None if reason is None else f"it {reason}"
            )
            cleanup.callback(self._close_meeting)

    def recover(self, suspects: Collection[int], timeout: float) -> Recovery:
        """See `Group.recover`."""
        began = time.monotonic()
        _warn_under_torchrun()
        with self._exclusive():
            return self._recover(set(suspects), began, timeout)

    def _recover(self, suspects: set[int], began: float, timeout: float) -> Recovery:
        for member in self._roster.members().values():
            suspects |= member.suspected_ranks()
        deadline, rank = began + timeout, self._messages.rank
        if self._is_undecided and self._admit_newcomers(suspects, deadline):
            self._require_membership().control.suspend(f"rank {rank} gave up waiting in replace")
        membership = self._require_membership()
        control = membership.control
        if suspects:  # a suspect may just wait for another rank in a message with a later deadline
            control.interrupt(suspects, f"{control.format_rank(rank)} left its calls to recover")
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

    def replace(self, meeting: Meeting, timeout: float) -> None:
        """See `Group.replace`."""
        with self._exclusive():
            self._replace(meeting, timeout)

    def _replace(self, meeting: Meeting, timeout: float) -> None:
        messages = self._messages
        dead = frozenset(range(messages.size)) - set(messages.living)
        if not dead:
            raise OutOfOrder("no rank is dead: call recover first, which determines the dead ranks")
        problem: Exception | None = None
        try:
            self._pending = self._connect_newcomers(meeting, dead, timeout)
        except Exception as error:
            problem = error
        # Another survivor may wait `timeout` for a new process before it takes part.
        if not self._admit_newcomers((), time.monotonic() + 2 * timeout):
            raise problem or RendezvousFailed(
                f"another survivor did not connect to all new processes, for ranks {sorted(dead)}: "
                "end them, call recover and try again"
            )
        self._replay_creations(dead, timeout)

    def join(self, meeting: Meeting, timeout: float, rendezvous_timeout: float) -> None:
        """See `Group.join`."""
        messages = self._messages
        if self.closed or not self._must_join:
            raise OutOfOrder("join needs a new group from Group.for_replacement")
        self._must_join = False
        membership = self._meet(meeting, None, timeout, Peers(), rendezvous_timeout)
        self._connect(membership)
        self._replay_creations(frozenset(range(messages.size)) - {messages.rank}, timeout)

    def _replay_creations(self, ranks: frozenset[int], timeout: float) -> None:
        """Map the memory of `ranks` into all open objects, and restart them. Collective."""
        messages = self._messages
        before = messages.timeout
        messages.ranks_to_map, messages.timeout = tuple(sorted(ranks)), timeout
        try:
            messages.replay_creations()
        finally:
            messages.ranks_to_map, messages.timeout = (), before
        self._resume(time.monotonic() + timeout)

    def _connect_newcomers(
        self, meeting: Meeting, dead: frozenset[int], timeout: float
    ) -> Membership:
        """Connect to the other survivors and to the processes that replace the ranks in `dead`."""
        membership, messages = self._require_membership(), self._messages
        with Peers() as peers:
            for rank in messages.living:
                if rank != messages.rank:
                    pid = membership.control.pids[rank]
                    peers.watch_pidfd(rank, pid, membership.liveness.pidfd(rank))
            return self._meet(meeting, dead, timeout, peers)

    def _meet(
        self,
        meeting: Meeting,
        dead: frozenset[int] | None,
        timeout: float,
        peers: Peers,
        rendezvous_timeout: float | None = None,
    ) -> Membership:
        """Connect to all ranks, and check that the joining ones are those that the others lack.

        Args:
            meeting: Meeting of the survivors and the new processes.
            dead: Ranks that this survivor lacks, or None in a new process.
            timeout: Seconds for each step.
            peers: Processes whose death ends the meeting.
            rendezvous_timeout: Seconds until all ranks must have connected. Default: `timeout`.
        """
        messages = self._messages
        control = meet(
            meeting,
            rank=messages.rank,
            size=messages.size,
            device=self._device.type,
            timeout=rendezvous_timeout or timeout,
            peers=peers,
        )
        membership = self._watch(control, timeout)
        try:
            own = None if dead is None else sorted(dead)
            _check_joining(control.gather("replace", own, timeout))
        except BaseException as error:
            membership.close(str(error))
            raise
        return membership

    def _admit_newcomers(self, suspects: Collection[int], deadline: float) -> bool:
        """Continue with the new processes if every survivor is connected to them.

        Returns whether they were admitted. A new process that dies may have connected to some of
        the survivors only. Raises RecoveryFailed.
        """
        membership = self._require_membership()
        self._is_undecided = True
        decision = membership.agreement.decide(suspects, deadline, admit=self._pending is not None)
        self._is_undecided = False
        pending, self._pending = self._pending, None
        if not decision.admit:
            if pending is not None:
                pending.close("continued without new processes: not every survivor was connected")
            # A survivor that gave up waiting has already resumed with this id, in a recovery.
            control, rank = membership.control, self._messages.rank
            control.resume(decision.round, set(self._messages.living) - decision.dead)
            control.suspend(f"rank {rank} could not admit new processes; call recover")
            return False
        assert pending is not None
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._connect, pending)  # even if this raises, since all have decided
            for member in self._roster.members().values():  # before memory is remapped
                member.quiesce()
        return True

    def _connect(self, pending: Membership) -> None:
        """Replace the connections by `pending`, and make all ranks participate."""
        old, self._membership = self._membership, pending
        with contextlib.ExitStack() as cleanup:
            if old is not None:
                pending.control.waits = old.control.waits  # counters never go back
                cleanup.callback(old.close)
            self._messages.control = pending.control
            self._roster.restore(pending.liveness.has_ended)

    def _resume(self, deadline: float) -> dict[str, int]:
        """Restart the operators that all living ranks have; return the rounds that all finished.

        At this point no dead rank can store into their memory any more. If operators cannot
        restart, the first error is raised after the others have restarted.
        """
        messages, roster = self._messages, self._roster

        def seconds_left() -> float:
            return max(0.001, deadline - time.monotonic())

        def barrier(problems: list[Exception]) -> None:
            problem = problems[0] if problems else None
            messages.vote_unrecorded(problem, "recovering", seconds_left(), common_error=WeftError)

        members = roster.members()
        own = {name: member.count_finished_rounds() for name, member in members.items()}
        reports = messages.gather("recover", [own, self._sleep.asleep], seconds_left())
        rounds = [reports[rank][0] for rank in messages.living]
        is_asleep = any(reports[rank][1] for rank in messages.living)
        finished = {
            name: min(counts[name] for counts in rounds)
            for name in own
            if all(name in counts for counts in rounds)
        }
        common = [members[name] for name in finished]
        barrier(_run_all([member.quiesce for member in common]))  # now no rank stores into a share
        if is_asleep:  # the death interrupted `sleep` or `wake`
            problem = self._sleep.fall_asleep()
            problems = [] if problem is None else [problem]
        else:
            problems = _run_all([partial(member.restart, roster.living_mask) for member in common])
        roster.renotify_ended(common)  # `restart` has cleared the deaths that operators recorded
        barrier(problems)  # every share is in its initial state: calls may store into it
        return finished

    def _watch(
        self, control: ControlPlane, timeout: float, ranks: Sequence[int] | None = None
    ) -> Membership:
        roster = self._roster

        def on_end(rank: int) -> None:
            roster.report_end(rank if ranks is None else ranks[rank])

        control.describe_activity = roster.describe_activity
        return Membership(control, on_end, timeout)

    def _require_membership(self) -> Membership:
        """Return the membership, or raise if this group cannot recover."""
        if self.closed:
            raise OutOfOrder("the group is closed; create a new one")
        if self._job_machines > 1:
            raise InvalidArgument(
                f"a group of {self._job_machines} machines cannot recover, nor can the local "
                "group of one of its hosts: restart the job on all machines, with new process "
                "groups and a new group"
            )
        if self._must_join:
            raise OutOfOrder("this group has not joined the survivors yet: call join first")
        if self._membership is None:
            raise InvalidArgument(
                "this group cannot recover: it needs at least two ranks that are processes of one "
                "machine"
            )
        self._membership.control.check_process()
        return self._membership

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Exclude other threads of this rank: peers cannot tell their messages apart."""
        self._require_membership()
        if not self._lock.acquire(blocking=False):
            raise OutOfOrder(
                f"two threads of rank {self._messages.rank} recover one group concurrently; call "
                "it from one thread"
            )
        try:
            yield
        finally:
            self._lock.release()


@functools.cache
def _warn_under_torchrun() -> None:
    """Warn once if torchrun's agent ends this rank as soon as another of its ranks has failed."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE") != "1":
        _log.warning(
            "recover under torchrun: its agent ends all of its ranks as soon as one has failed. "
            "Start one agent per rank (--nnodes RANKS --nproc-per-node 1 --node-rank R), or start "
            "the ranks with weft.launch(..., tolerate_deaths=True)"
        )


def _run_all(steps: list[Callable[[], None]]) -> list[Exception]:
    """Run every step and return the errors; peers wait in a barrier after all steps."""
    problems: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as error:
            problems.append(error)
    return problems


def _check_joining(dead_by_rank: list[list[int] | None]) -> None:
    """Raise RendezvousFailed unless the joining ranks are the dead ranks of every survivor.

    A survivor reports its dead ranks, a joining rank reports None.
    """
    joining = [rank for rank, dead in enumerate(dead_by_rank) if dead is None]
    for rank, dead in enumerate(dead_by_rank):
        if dead is not None and dead != joining:
            raise RendezvousFailed(
                f"rank {rank} continues without ranks {dead}, but ranks {joining} join: start one "
                "new process for each dead rank, with its number"
            )
    if len(joining) == len(dead_by_rank):
        raise RendezvousFailed("all ranks join, but there is no survivor: create a new group")
