# SPDX-License-Identifier: Apache-2.0
"""How the survivors of a death go on: without those that died, or with new processes for them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch

from weft.arguments import instance, integers, seconds
from weft.errors import (
    InvalidArgument,
    OutOfOrder,
    RecoveryFailed,
    RendezvousFailed,
    WeftError,
)
from weft.group.agreement import Recovery
from weft.group.control import ControlPlane
from weft.group.liveness import Peers
from weft.group.meeting import Meeting, meet
from weft.group.membership import Member, Membership
from weft.group.messages import Control, Messages

_log = logging.getLogger(__name__)
_SAMPLE = 0.1  # seconds between two looks at a peer that may wait


class Recovering(Messages):
    """Ranks that have met, and the operators that share their fate: a group that survives ranks."""

    _job_machines: int  # of this group, or of the one whose host it is

    def __init__(
        self, control: Control, *, device: torch.device, timeout: float, watched: bool
    ) -> None:
        super().__init__(control, timeout=timeout)
        self.device = device
        self.joining: frozenset[int] = frozenset()  # ranks that new processes take now
        # By generation: the same key on every rank, and the order of creation.
        self._members: weakref.WeakValueDictionary[str, Member] = weakref.WeakValueDictionary()
        self._ended: set[int] = set()  # ranks whose processes have ended
        self._fate = threading.Lock()  # of these two and of the living
        self._closed = False
        self._owner = os.getpid()
        self._recovering = threading.Lock()  # taken while a thread of this rank does
        self._membership: Membership | None = None
        self._fresh: Membership | None = None  # with new ranks, until all take them in or none
        self._opened: Meeting | None = None  # by this rank, for new processes
        self._undecided = False  # whether all take them in, because the deadline was over
        self._at_end(control.close)
        self._show_whereabouts(control)
        if watched and isinstance(control, ControlPlane) and self.size > 1:
            self._membership = self._watch(control)

    def _at_end(self, close: Callable[[], None]) -> None:
        """A group that is dropped unclosed gives back what it has; at exit the system does."""
        weakref.finalize(self, close).atexit = False

    def _watch(
        self,
        control: ControlPlane,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Membership:
        """From now on the end of a peer's process is noticed at once, and can be agreed on.

        ranks: this group's, of the ranks of `control`; all where nobody says.
        """
        ended = weakref.WeakMethod(self._peer_ended)

        def peer_ended(rank: int) -> None:
            method = ended()
            if method is not None:
                method(rank if ranks is None else ranks[rank])

        membership = Membership(control, peer_ended, self._deadline(timeout))
        self._at_end(membership.close)
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

    def _show_whereabouts(self, control: Control) -> None:
        """Let a control plane log where the ranks are that it waits for."""
        if isinstance(control, ControlPlane):
            method = weakref.WeakMethod(self.whereabouts)

            def whereabouts(ranks: Collection[int]) -> Mapping[int, str]:
                found = method()
                return {} if found is None else found(ranks)

            control.whereabouts = whereabouts

    def whereabouts(self, ranks: Collection[int]) -> dict[int, str]:
        """Return, in words, what these ranks are doing, as far as this one can see. Takes 0.1 s."""
        with self._fate:
            members, ended = list(self._members.items()), set(self._ended)
        before = {name: member._waiting_ns(ranks) for name, member in members}
        time.sleep(_SAMPLE)
        after = {name: member._waiting_ns(ranks) for name, member in members}
        found, control = {}, self._control
        for rank in ranks:
            waits = [name for name, ns in after.items() if ns.get(rank) != before[name].get(rank)]
            called = control.called(rank) if isinstance(control, ControlPlane) else None
            if rank in ended:
                found[rank] = "has ended"
            elif waits:
                found[rank] = f"waits in a call of {' and of '.join(waits)}"
            elif called is not None:
                found[rank] = f"waits in {called}"
            else:
                found[rank] = "is in no call of this group that waits for others"
        return found

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
        with contextlib.ExitStack() as last:
            if self._membership is not None:
                last.callback(self._membership.close)
            self._control, self._membership = fresh.control, fresh
            self._show_whereabouts(fresh.control)
            with self._fate:
                self._living = (1 << self.size) - 1
                others = set(range(self.size)) - {self.rank}
                self._ended = {rank for rank in others if fresh.liveness.ended(rank)}

    def _recoverable(self) -> Membership:
        """What a recovery needs. Raises OutOfOrder and InvalidArgument."""
        if self._closed:
            raise OutOfOrder("the group is closed; make a new one")
        if self._job_machines > 1:
            raise InvalidArgument(
                f"a group of {self._job_machines} machines cannot recover, nor can the local "
                "group of one of its hosts: end the job on all of them, start it anew and make new "
                "process groups and a new group"
            )
        if self._membership is None:
            raise InvalidArgument(
                "this group cannot recover: it needs two ranks or more, each a process, of one "
                "machine"
            )
        self._membership.control.check_process()
        return self._membership

    @contextlib.contextmanager
    def _one_recovery(self) -> Iterator[None]:
        """Peers would take two of one rank for one. Raises OutOfOrder and InvalidArgument."""
        self._recoverable()
        if not self._recovering.acquire(blocking=False):
            raise OutOfOrder(
                f"two threads of rank {self.rank} recover one group at a time; call it from one"
            )
        try:
            yield
        finally:
            self._recovering.release()

    def recover(self, *, suspects: Sequence[int] = (), timeout: float = 10.0) -> Recovery:
        """Continue without the ranks that died. Collective over the living ranks.

        Call it on every survivor after a `GroupError` or `RendezvousFailed`, while no call and no
        replay runs. The survivors agree on who is dead, end their own calls, and reset the memory
        of all operators to its state at creation, at the same addresses. Control messages continue
        among the living; where they return a value of each rank, a dead rank has None.

        Args:
            suspects: Ranks to kill unless they call `recover` within half a second. Ranks that an
                operator timed out on (PeerTimeout) are included. No other rank is killed.
            timeout: Seconds in all.

        Returns:
            The dead and living ranks, the rounds that all survivors finished, and the seconds it
                took.

        Raises:
            RecoveryFailed: a rank neither came nor ended. End its process and call `recover` again.
            ExpertsLost: a layer cannot continue without the dead. All others have recovered.
            CreationFailed: some operators could not recover; the text names the ranks.
            InvalidArgument: the ranks are threads, or on several machines.
            OutOfOrder: the process is a forked child, or another thread recovers.
        """
        began, timeout = time.monotonic(), seconds("timeout", timeout)
        _warn_of_torchrun()
        doubted = set(integers("suspects", suspects, 0, self.size - 1))
        with self._one_recovery():
            return self._agree_and_go_on(doubted, began, timeout)

    def _agree_and_go_on(self, doubted: set[int], began: float, timeout: float) -> Recovery:
        with self._fate:
            members = self._attached()
        doubted |= {rank for member in members for rank in member._suspects()}
        deadline = began + timeout
        if self._undecided and self._take_in(doubted, deadline):
            self._recoverable().control.leave(f"rank {self.rank} gave up waiting in replace")
        here = self._recoverable()
        control = here.control
        if doubted:  # one of them may only wait for another, in a message with a longer deadline
            control.interrupt(doubted, f"{control.name(self.rank)} left its calls to recover")
        while True:
            era, dead, _ = here.agreement.decide(doubted, deadline)
            with self._fate:
                self._living = sum(1 << rank for rank in range(self.size) if rank not in dead)
            control.resume(era, set(self.living))
            try:
                finished = self._go_on(deadline)
            except RendezvousFailed as error:  # another one died, or gave up: agree anew
                if time.monotonic() < deadline:
                    continue
                raise RecoveryFailed(f"{error}; call recover again") from error
            took = time.monotonic() - began
            return Recovery(tuple(sorted(dead)), self.living, MappingProxyType(finished), took)

    def open_meeting(self) -> Meeting:
        """Open a meeting for `replace` and `join`. Collective over the living ranks.

        Returns:
            The meeting. Pass its `address` to the new processes only: it admits a process of this
                user.

        Raises:
            CreationFailed: a rank has no file descriptor left.
        """

        def make() -> None:
            if self.rank == self.living[0]:
                self._close_opened()
                self._opened = Meeting.open(self.rank)
                self._at_end(partial(_close_in, self._owner, self._opened))

        self.together(make, doing="opening a meeting")
        mine = self._opened if self.rank == self.living[0] else None
        said = self._gather("open_meeting", mine.address if mine else None, None)
        return mine or Meeting.at(said[self.living[0]])

    def _close_opened(self) -> None:
        if self._opened is not None:
            _close_in(self._owner, self._opened)

    def replace(self, meeting: Meeting, *, timeout: float = 120.0) -> None:
        """Take in new processes for all dead ranks. Collective over the living ranks.

        Meanwhile each new process calls `Group.join` with the number of a dead rank, makes the
        operators of this group in the same order, and calls `enter`. Its memory is mapped where
        that of the dead rank was, so addresses and captured graphs stay valid. If it raises, end
        the new processes and call `recover`.

        Args:
            meeting: What `open_meeting` returned.
            timeout: Seconds for all to meet, and then for each step of the new processes.

        Raises:
            OutOfOrder: no rank is dead.
            RendezvousFailed: a new process does not come in time, or dies.
            GeometryMismatch: a new process makes other operators.
            CreationFailed: a rank cannot do its part. Every rank raises it.
            RecoveryFailed: a survivor does not come.
        """
        instance("meeting", meeting, Meeting)
        timeout = seconds("timeout", timeout)
        with self._one_recovery():
            self._replace(meeting, timeout)

    def _replace(self, meeting: Meeting, timeout: float) -> None:
        gone = frozenset(range(self.size)) - set(self.living)
        if not gone:
            raise OutOfOrder("no rank is gone: call recover first, which finds out who is")
        problem: Exception | None = None
        try:
            self._fresh = self._meet_again(meeting, gone, timeout)
        except Exception as error:
            problem = error
        # Another survivor that waits for a new process does so for `timeout`, and then comes.
        if not self._take_in((), time.monotonic() + 2 * timeout):
            raise problem or RendezvousFailed(
                f"another survivor did not meet all new processes, for ranks {sorted(gone)}: end "
                "them, call recover and begin again"
            )
        self.joining, before, self.timeout = gone, self.timeout, timeout
        try:
            for creation in self.creations_to_repeat():
                for step in creation.steps:
                    step(self)
        finally:
            self.joining, self.timeout = frozenset(), before
        self._go_on(time.monotonic() + timeout)

    def enter(self, *, timeout: float = 120.0) -> None:
        """Start to take calls, after `join` and the constructors. Collective with `replace`.

        Args:
            timeout: Seconds to wait for the other ranks.
        """
        timeout = seconds("timeout", timeout)
        with self._one_recovery():
            self._go_on(time.monotonic() + timeout)
            self._is_newcomer = False

    def _meet_again(self, meeting: Meeting, gone: frozenset[int], timeout: float) -> Membership:
        """This rank's sockets and pages with the other survivors and new processes for `gone`."""
        here = self._recoverable()
        with Peers() as peers:
            for rank in self.living:
                if rank != self.rank:
                    peers.hold(rank, here.control.pids[rank], here.liveness.fd(rank))
            control = meet(
                meeting,
                rank=self.rank,
                size=self.size,
                device=self.device.type,
                timeout=timeout,
                peers=peers,
            )
        fresh = self._watch(control, timeout=timeout)
        try:
            check_joining(fresh.control.gather("replace", sorted(gone), timeout))
        except BaseException as error:
            fresh.close(str(error))
            raise
        return fresh

    def _take_in(self, suspects: Collection[int], deadline: float) -> bool:
        """Go on with new processes, if every survivor has met them: all survivors do, or none.

        A new process that dies may have met some of them only. Raises RecoveryFailed.
        """
        here = self._recoverable()
        self._undecided = True
        decided = here.agreement.decide(suspects, deadline, keep=self._fresh is not None)
        self._undecided = False
        fresh, self._fresh = self._fresh, None
        if not decided.keep:
            if fresh is not None:
                fresh.close("went on without new processes, which not every survivor had met")
            # A survivor that has given up waiting is in this era already, in a recovery.
            here.control.resume(decided.round, set(self.living) - decided.dead)
            here.control.leave(f"rank {self.rank} could not take in new processes; call recover")
            return False
        assert fresh is not None
        with contextlib.ExitStack() as last:
            last.callback(self._move, fresh)  # as all have decided, whatever is raised here
            with self._fate:
                members = self._attached()
            for member in members:  # before its memory changes
                member._quiesce()
        return True

    def _go_on(self, deadline: float) -> dict[str, int]:
        """Make the living equal, and resume the operators that all of them still have.

        No process but theirs can store into their memory now. Raises what the first operator raised
        that cannot go on, when the others have recovered.
        """

        def left() -> float:
            return max(0.001, deadline - time.monotonic())

        def barrier(problems: list[Exception]) -> None:
            problem = problems[0] if problems else None
            self._vote(problem, "recovering", left(), alike=WeftError)

        with self._fate:
            members = dict(self._members)
            own = {name: member._finished() for name, member in members.items()}
        said = self._gather("recover", own, left())
        states = [said[rank] for rank in self.living]
        finished = {
            name: min(state[name] for state in states)
            for name in own
            if all(name in state for state in states)
        }
        both = [members[name] for name in finished]
        barrier(_tried([member._quiesce for member in both]))  # then none stores into a share
        problems = _tried([partial(member._recover, self._living) for member in both])
        with self._fate:
            for rank in self._taking_part(self._ended):  # `_recover` has forgotten that it ended
                for member in both:
                    member._peer_ended(rank)
        barrier(problems)  # every share is as at creation: calls may store into it
        return finished


@functools.cache
def _warn_of_torchrun() -> None:
    """Log, once, that an agent of torchrun ends all ranks after the first that fails."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _log.warning(
            "recover under torchrun: its agent ends all ranks of this machine as soon as one has "
            "failed. Start the ranks with weft.launch(..., tolerate_deaths=True) or another "
            "launcher that lets the survivors live"
        )


def _tried(steps: list[Callable[[], None]]) -> list[Exception]:
    """Take every step, and return what they raised: peers wait in a barrier."""
    problems: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as error:
            problems.append(error)
    return problems


def _close_in(process: int, meeting: Meeting) -> None:
    """Close a meeting that `process` opened. Its forked child would end it for all others."""
    if os.getpid() == process:
        meeting.close()


def check_joining(said: list[list[int] | None]) -> None:
    """Are those that join, and send nothing, the ranks that each survivor goes on without?"""
    joining = [rank for rank, gone in enumerate(said) if gone is None]
    for rank, gone in enumerate(said):
        if gone is not None and gone != joining:
            raise RendezvousFailed(
                f"rank {rank} goes on without ranks {gone}, and ranks {joining} join: start one "
                "new process for each that is gone, with its number"
            )
    if len(joining) == len(said):
        raise RendezvousFailed("all ranks join and none is there to join: make a new group")
