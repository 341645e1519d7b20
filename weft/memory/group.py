"""The ranks of one job: who they are, and the small messages between them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from weft.arguments import flags, function, instance, integer, integers, seconds, shown
from weft.errors import (
    CreationFailed,
    GeometryMismatch,
    InvalidArgument,
    OutOfOrder,
    RecoveryFailed,
    RendezvousFailed,
    UsageError,
    WeftError,
)
from weft.memory.agreement import MAX_AGREEING, Agreement, Recovery
from weft.memory.collective import OwnProcessGroup, TorchControl
from weft.memory.control_plane import ControlPlane
from weft.memory.creation import Creation, Step
from weft.memory.discovery import default_device, find
from weft.memory.hosts import Hosts, by_host, open_process_groups, whereabouts
from weft.memory.liveness import Liveness, LivenessFd, Peers
from weft.memory.meeting import Meeting, meet
from weft.memory.membership import Membership
from weft.memory.store import StoreExchange, environment, store_of_environment
from weft.memory.wire import JSON, encode

T = TypeVar("T")
_TEXT_LIMIT = 4000  # characters of an error's text that a vote carries


class Control(Protocol):
    """What carries a group's control messages."""

    def gather(self, op: str, value: JSON, timeout: float) -> list[Any]: ...
    def exchange_fds(self, fd: int, timeout: float) -> list[int | None]: ...
    def close(self, why: str | None = None) -> None: ...


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


class Group:
    """Ranks of one job, of one host, which share memory, or of several. A context manager.

    `rank` of `size` ranks; `device` is the rank's memory, "cpu" or "cuda:i"; `timeout` is the
    deadline in seconds of every control message that names none. The methods that talk are
    collective: every rank calls the same ones in the same order, each rank from one thread at a
    time. When a rank dies they raise RendezvousFailed naming it, until the survivors `recover`.

    With several hosts (`from_torch`), `local` is the group of this rank's host, and `rail` the
    torch process group of the ranks that have this one's place on each host.
    """

    def __init__(
        self,
        control: Control,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float,
        process_group: dist.ProcessGroup | None = None,
        threads: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout = timeout
        self._control = control
        self._process_group = process_group
        self._own: OwnProcessGroup | None = None
        self._threads = threads
        self._hosts: Hosts | None = None  # where there are several
        self._generation = 0
        self._closed = False
        # By generation: the same key on every rank, and the order of creation.
        self._members: weakref.WeakValueDictionary[str, Member] = weakref.WeakValueDictionary()
        self._living = (1 << size) - 1  # bit r: rank r takes part
        self._ended: set[int] = set()  # ranks whose processes have ended
        self._fate = threading.Lock()  # of the three above
        self._creations: list[Creation] = []
        self._creation: Creation | None = None  # that is under way
        self.joining: frozenset[int] = frozenset()  # ranks that new processes take now
        self._process: LivenessFd | None = None
        self._membership: Membership | None = None
        self._fresh: Membership | None = None  # with new ranks, until all take them in or none
        self._opened: Meeting | None = None  # by this rank, for new processes
        self._undecided = False  # whether they do, because the deadline was over
        # A group that is dropped unclosed gives its sockets back without a warning. At exit the
        # system does.
        weakref.finalize(self, control.close).atexit = False
        if isinstance(control, ControlPlane) and not threads and size > 1:
            self._process = LivenessFd()
            weakref.finalize(self, self._process.close).atexit = False
            self._membership = self._watch(control, timeout)

    @classmethod
    def from_meeting(
        cls,
        meeting: Meeting,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float,
        threads: bool = False,
    ) -> Group:
        """The group of the ranks that come to `meeting`. Collective. Raises RendezvousFailed."""
        instance("meeting", meeting, Meeting)
        size = integer("size", size, 1)
        rank, timeout = integer("rank", rank, 0, size - 1), seconds("timeout", timeout)
        instance("device", device, torch.device)
        flags(threads=threads)
        control = meet(meeting, rank=rank, size=size, device=device.type, timeout=timeout)
        return cls(control, rank=rank, size=size, device=device, timeout=timeout, threads=threads)

    @classmethod
    def from_torch(
        cls,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: float = 120.0,
    ) -> Group:
        """The ranks of a torch process group (default: the world). Collective.

        The process group only carries where to meet; it stays the caller's. `device` defaults to the current CUDA device where there is
        one. Ranks of several hosts find out who shares one, by boot id and WEFT_HOST; between hosts
        the group's control messages and its operators' rows go over torch process groups alone
        (docs/several-hosts.md).
        Raises RendezvousFailed when the ranks do not meet, or hosts have unequal numbers of them.
        """
        timeout, where = seconds("timeout", timeout), default_device(device)
        group = dist.group.WORLD if process_group is None else process_group
        if group is None:
            raise InvalidArgument(
                "torch.distributed is not initialised: call init_process_group first, or use "
                "Group.from_env() or weft.launch"
            )
        instance("process_group", group, dist.ProcessGroup)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise InvalidArgument("this process is no member of the given process group")
        over_torch = TorchControl(group)
        said = over_torch.gather("Group.from_torch", whereabouts(group), timeout)
        ranks, names = by_host(said)
        if len(ranks) > 1:
            made = cls(
                over_torch, rank=rank, size=size, device=where, timeout=timeout, process_group=group
            )
            made._find_hosts(ranks, names, said)
            return made

        def exchange(value: JSON) -> list[Any]:
            return over_torch.gather("Group.from_torch", value, timeout)

        control = find(exchange, rank, size, where.type, timeout)
        return cls(
            control, rank=rank, size=size, device=where, timeout=timeout, process_group=group
        )

    def _find_hosts(
        self, ranks: tuple[tuple[int, ...], ...], names: tuple[str, ...], said: list[Any]
    ) -> None:
        """Meet the ranks of this host, and open the rail. Collective over all hosts."""
        whole, timeout = self.process_group(), self.timeout

        def meet_on_host() -> Hosts:
            gpus = self.device.type == "cuda"
            shared, rail = open_process_groups(whole, ranks, self.rank, said, timeout, gpus=gpus)
            local = Group.from_torch(shared, device=self.device, timeout=timeout)
            index = next(i for i, each in enumerate(ranks) if self.rank in each)
            return Hosts(ranks, names, index, local, rail, said[0]["token"])

        self._hosts = self.together(meet_on_host, doing="meeting on each host")

    @property
    def hosts(self) -> int:
        """How many hosts the ranks are on."""
        return 1 if self._hosts is None else len(self._hosts.ranks)

    @property
    def host(self) -> int:
        """This rank's host; hosts are numbered by their first ranks."""
        return 0 if self._hosts is None else self._hosts.index

    @property
    def host_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host."""
        return (tuple(range(self.size)),) if self._hosts is None else self._hosts.ranks

    @property
    def local(self) -> Group:
        """The ranks of this rank's host, which share memory; on one host this group itself."""
        return self if self._hosts is None else self._hosts.local

    @property
    def rail(self) -> dist.ProcessGroup:
        """The ranks that have this one's place on each host, by host. Raises InvalidArgument."""
        if self._hosts is None:
            raise InvalidArgument("this group is on one host, and has no rail to another")
        return self._hosts.rail

    def one_host(
        self,
        what: str,
        *,
        fix: str = "pass group.local, or take weft.AllToAll, weft.LowLatencyAllToAll or weft.MoE, "
        "which serve several",
    ) -> Group:
        """This group. Raises InvalidArgument where it has several hosts: `what` serves one."""
        if self.hosts > 1:
            raise InvalidArgument(
                f"{what} takes ranks of one host, and these are on {self.hosts}: {fix}"
            )
        return self

    @property
    def token(self) -> str:
        """Of a group of several hosts, a word that no other one has."""
        return "" if self._hosts is None else self._hosts.token

    def _host_name(self, host: int) -> str:
        """A host as errors name it."""
        return f"host {host}" + ("" if self._hosts is None else f" ({self._hosts.names[host]})")

    @classmethod
    def from_env(cls, *, device: torch.device | str | None = None, timeout: float = 120.0) -> Group:
        """The ranks that torchrun (or a like launcher) started on this host. Collective.

        Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. `device` defaults to
        cuda:LOCAL_RANK where there is one. Without torchrun's agent rank 0 serves the store in
        which the ranks find each other, on the address of MASTER_ADDR alone: 127.0.0.1 keeps other
        machines out. WEFT_SECRET, any text that is the same on every rank, authenticates what they
        write there (docs/environment.md). Raises RendezvousFailed when a variable is missing, the
        ranks are on several hosts, one of them dies or they do not meet in time.
        """
        timeout = seconds("timeout", timeout)
        default_device(device)
        rank, size, local_rank = environment()
        where = default_device(device, local_rank)
        store, name = store_of_environment(rank, timeout)
        with Peers() as peers:
            exchange = StoreExchange(store, name, rank, size, timeout, peers)
            control = find(exchange, rank, size, where.type, timeout, peers)
        return cls(control, rank=rank, size=size, device=where, timeout=timeout)

    def all_gather(self, value: JSON, *, timeout: float | None = None) -> list[Any]:
        """Every rank's `value`, in rank order; at most 1 MiB of JSON a rank.

        None for a rank that is gone. Tuples come back as lists. Raises InvalidArgument for what
        JSON cannot say and RendezvousFailed when a rank died, closed its group or did not come in
        time.
        """
        _check_json(value)
        with self.noted(lambda group: group._gather("all_gather", value, timeout)):
            return self._gather("all_gather", value, timeout)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank is here. Raises RendezvousFailed as all_gather does."""
        with self.noted(lambda group: group._gather("barrier", None, timeout)):
            self._gather("barrier", None, timeout)

    def vote(
        self, error: BaseException | None, *, doing: str, undo: Callable[[], None] | None = None
    ) -> None:
        """Go on only if every rank can.

        Each rank passes what stopped it in `doing`, or None. If any passed an error, every rank
        raises the same: where all passed UsageErrors of one class, that class, with the first
        rank's text, for then the call is wrong on each; else CreationFailed naming the ranks. A
        rank's own error is the cause. On ranks that passed none `undo` gives back first what they
        had made; so it does if the vote itself fails.
        """
        if error is not None:
            instance("error", error, BaseException)
        instance("doing", doing, str)
        if undo is not None:
            function("undo", undo, "which gives back what was made")
        try:
            with self.noted(lambda group: group._vote(None, doing)):
                self._vote(error, doing)
        except BaseException:
            if error is None and undo is not None:
                undo()
            raise

    def _vote(
        self,
        error: BaseException | None,
        doing: str,
        timeout: float | None = None,
        *,
        alike: type[WeftError] = UsageError,
    ) -> None:
        """alike: errors that are raised as what they are where every rank has the same one."""
        mine = None if error is None else [type(error).__name__, str(error)[:_TEXT_LIMIT]]
        said = self._gather("vote", {"doing": doing, "error": mine}, timeout)
        votes = {rank: said[rank] for rank in self.living}
        failed = [r for r, vote in votes.items() if vote["error"] is not None]
        if not failed:
            return
        first = failed[0]
        name, text = votes[first]["error"]
        if isinstance(error, alike) and all(
            vote["error"] is not None and vote["error"][0] == name for vote in votes.values()
        ):
            raise type(error)(text) from error
        others = f" (and on rank {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
        raise CreationFailed(
            f"{votes[first]['doing']} failed on rank {first} of {self.size}{others}: {name}: {text}"
        ) from error

    def together(self, step: Callable[[], T], *, doing: str) -> T:
        """Run `step` on every rank, vote on how it went, and return its result.

        Raises as `vote` does, the same on every rank, if `step` raised on any.
        """
        function("step", step, "which every rank runs")
        instance("doing", doing, str)
        result, problem = None, None
        try:
            result = step()
        except Exception as error:
            problem = error
        try:
            self.vote(problem, doing=doing)
        finally:
            problem = None  # its traceback holds this frame, and its callers' frames
        return cast("T", result)

    def agree(self, value: JSON, *, what: str) -> None:
        """Check that every rank passes an equal `value`; `what` names it in the error.

        Raises GeometryMismatch with the same text on every rank, naming two ranks and, key by key
        for dicts, both values.
        """
        instance("what", what, str)
        _check_json(value)
        with self.noted(lambda group: group.agree(value, what=what)):
            values = self._gather(f"agreement on {what}", value, None)
        first = self.living[0]
        for rank in self.living:
            if values[rank] != values[first]:
                theirs, ours = _difference(values[rank], values[first])
                raise GeometryMismatch(
                    f"{what} differs: rank {first} has {ours} and rank {rank} has {theirs}; pass "
                    "the same on every rank"
                )

    def exchange_fds(self, fd: int, *, timeout: float | None = None) -> list[int | None]:
        """One file descriptor of every rank, in rank order; the own entry is a duplicate.

        None for a rank that is gone. The caller closes all of them. Raises RendezvousFailed as
        all_gather does, and InvalidArgument for a group without shared memory.
        """
        fd = integer("fd", fd, 0, (1 << 31) - 1)
        try:
            os.fstat(fd)
        except OSError as error:
            raise InvalidArgument(f"fd is {fd}; it must be an open descriptor: {error}") from error
        return self._control.exchange_fds(fd, self._deadline(timeout))

    def process_group(self) -> dist.ProcessGroup:
        """The torch process group of these ranks. Collective at the first call.

        A group from from_torch returns the one it was made from. Else the process's default group
        is made: NCCL for CUDA ranks that each have a GPU, gloo for CPU ranks and for ranks that
        share a GPU. Raises InvalidArgument for ranks that are threads, because torch.distributed
        needs processes.
        """
        if self._process_group is not None:
            return self._process_group
        if self._threads:
            raise InvalidArgument(
                "these ranks are threads of one process and torch.distributed needs processes; "
                'use weft.launch(..., device="cpu")'
            )
        if self._closed:
            raise OutOfOrder("the group is closed; make a new one")
        if dist.is_initialized():
            raise InvalidArgument(
                "torch.distributed is initialised already; make this group with "
                "weft.Group.from_torch() so that both are the same ranks"
            )

        def exchange(value: JSON) -> list[Any]:
            return self._gather("process_group", value, None)

        self._own = OwnProcessGroup(self.rank, self.size, self.device, exchange, self.timeout)
        self._process_group = self._own.process_group
        return self._process_group

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

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks that take part: all, until a recovery goes on without the dead."""
        return tuple(self._taking_part(range(self.size)))

    @property
    def ended(self) -> frozenset[int]:
        """The ranks whose processes have ended, as far as this one has heard; of those `living`.

        With several hosts, those of this rank's host.
        """
        if self._hosts is not None:
            return frozenset(self.host_ranks[self.host][place] for place in self.local.ended)
        with self._fate:
            return frozenset(self._taking_part(self._ended))

    def _taking_part(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if self._living >> rank & 1]

    def recover(self, *, suspects: Sequence[int] = (), timeout: float = 10.0) -> Recovery:
        """Go on without the ranks that died. Collective over those that live.

        To be called on every rank after one of them died, or stalled, under a call. The survivors
        agree on who is gone, wait for their own calls to end, write the memory of all operators as
        at creation, and take calls again. The control messages go on among the living; where they
        return a value of each rank, a rank that is gone has None.

        suspects: ranks to kill if they do not call this, too, within half a second. Those that an
        operator waited for in vain (PeerTimeout) are among them without being named. One that
        waits in a control message raises RendezvousFailed at once, so that it can come. Nobody
        else is killed, and no living rank is left out.
        timeout: seconds, in all.

        Raises RecoveryFailed where a rank neither came nor ended, or cannot be killed, naming it;
        then end its process and call this again. Raises what an operator raises that cannot go on
        without the dead, when all others have recovered: the same on every rank, or CreationFailed
        naming those that did. Raises InvalidArgument for ranks that are threads or that share no
        memory.
        """
        began, timeout = time.monotonic(), seconds("timeout", timeout)
        doubted = set(integers("suspects", suspects, 0, self.size - 1))
        self._recoverable()
        with self._fate:
            members = self._attached()
        doubted |= {rank for member in members for rank in member._suspects()}
        deadline = began + timeout
        if self._undecided and self._take_in(doubted, deadline):
            self._recoverable()[0].leave(f"rank {self.rank} gave up waiting in replace")
        control, liveness, agreement = self._recoverable()
        if doubted:  # one of them may only wait for another, in a message with a longer deadline
            control.interrupt(doubted, f"{control.name(self.rank)} left its calls to recover")
        while True:
            era, dead, _ = agreement.decide(liveness, doubted, deadline)
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
        """A place for `replace` and `join` to meet in. Collective over the living.

        Its `address` is for the new processes alone: who knows it may join.
        Raises CreationFailed where a rank is at its limit of descriptors.
        """

        def make() -> None:
            if self.rank == self.living[0]:
                self._close_meeting()
                self._opened = Meeting.open(self.rank)

        self.together(make, doing="opening a meeting")
        mine = self._opened if self.rank == self.living[0] else None
        said = self._gather("open_meeting", mine.address if mine else None, None)
        return mine or Meeting.at(said[self.living[0]])

    def _close_meeting(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def replace(self, meeting: Meeting, *, timeout: float = 120.0) -> None:
        """Take in new processes for all ranks that are gone. Collective over the living.

        Meanwhile each new process calls `Group.join` with the number of a rank that is gone, makes
        the operators of this group in the same order, and calls `enter`. Their memory is mapped
        where that of the dead was, so addresses, and the graphs that have them, stay valid. On
        return every operator is as at creation, on all ranks.

        timeout: seconds for all to meet, and then for each step of the new process.

        Raises OutOfOrder if no rank is gone, RendezvousFailed where one does not come in time or
        dies, and GeometryMismatch or CreationFailed, on every rank, where it makes other operators.
        RecoveryFailed where a survivor does not come. Then end the new processes and call
        `recover`. A new process that ends before it has come is only noticed if the process that
        started it calls `meeting.end`, which says why; else at the deadline.
        """
        instance("meeting", meeting, Meeting)
        timeout = seconds("timeout", timeout)
        self._recoverable()
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
            for creation in [each for each in self._creations if each.exists]:
                for step in creation.steps:
                    step(self)
        finally:
            self.joining, self.timeout = frozenset(), before
        self._go_on(time.monotonic() + timeout)

    @classmethod
    def join(
        cls,
        meeting: Meeting | str,
        *,
        rank: int,
        size: int,
        device: torch.device | str,
        timeout: float = 120.0,
    ) -> Group:
        """The group of a process that takes the number of a rank that is gone, for `replace`.

        meeting: what `open_meeting` returned to the survivors, or its `address`. Make the same
        operators as they have, in the same order, then call `enter`.
        Raises RendezvousFailed where the ranks do not meet, or have nobody to replace.
        """
        group = cls.from_meeting(
            Meeting.at(meeting) if isinstance(meeting, str) else meeting,
            rank=rank,
            size=size,
            device=default_device(device),
            timeout=timeout,
        )
        try:
            group._recoverable()
            _check_joining(group._gather("replace", None, timeout))
        except BaseException as error:
            group._leave(reason(error))
            raise
        return group

    def enter(self, *, timeout: float = 120.0) -> None:
        """Begin to take calls, after `join` and the constructors. Collective with `replace`."""
        self._go_on(time.monotonic() + seconds("timeout", timeout))

    def _meet_again(self, meeting: Meeting, gone: frozenset[int], timeout: float) -> Membership:
        """This rank's sockets and pages with the other survivors and new processes for `gone`."""
        control, liveness, _ = self._recoverable()
        with Peers() as peers:
            for rank in self.living:
                if rank != self.rank:
                    peers.hold(rank, control.pids[rank], liveness.fd(rank))
            control = meet(
                meeting,
                rank=self.rank,
                size=self.size,
                device=self.device.type,
                timeout=timeout,
                peers=peers,
            )
        fresh = self._watch(control, timeout)
        try:
            _check_joining(fresh.control.gather("replace", sorted(gone), timeout))
        except BaseException as error:
            fresh.close(str(error))
            raise
        return fresh

    def _take_in(self, suspects: Collection[int], deadline: float) -> bool:
        """Go on with new processes, if every survivor has met them: all survivors do, or none.

        A new process that dies may have met some of them only. Raises RecoveryFailed.
        """
        control, liveness, agreement = self._recoverable()
        self._undecided = True
        decided = agreement.decide(liveness, suspects, deadline, keep=self._fresh is not None)
        self._undecided = False
        fresh, self._fresh = self._fresh, None
        if not decided.keep:
            if fresh is not None:
                fresh.close("went on without new processes, which not every survivor had met")
            # A survivor that has given up waiting is in this era already, in a recovery.
            control.resume(decided.round, set(self.living) - decided.dead)
            control.leave(f"rank {self.rank} could not take in new processes; call recover")
            return False
        assert fresh is not None
        with self._fate:
            members = self._attached()
        for member in members:  # before its memory changes
            member._quiesce()
        self._move(fresh)
        return True

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

    def _go_on(self, deadline: float) -> dict[str, int]:
        """Make the living equal, and resume the operators that all of them still have."""

        def left() -> float:
            return max(0.001, deadline - time.monotonic())

        heard: list[Exception] = []  # of a peer

        def barrier() -> None:
            try:
                self._vote(None, "recovering", left())
            except (RendezvousFailed, CreationFailed) as error:
                heard.append(error)
                raise

        with self._fate:
            own = {name: member._finished() for name, member in self._members.items()}
        said = self._gather("recover", own, left())
        states = [said[rank] for rank in self.living]
        finished = {
            name: min(state[name] for state in states)
            for name in own
            if all(name in state for state in states)
        }
        problem: Exception | None = None
        try:
            self._resume(self._living, barrier, finished)
        except Exception as error:
            if error in heard:
                raise
            problem = error
        self._vote(problem, "recovering", left(), alike=WeftError)
        return finished

    def _resume(
        self, living: int, barrier: Callable[[], None], names: Collection[str] | None = None
    ) -> None:
        """Let operators start anew among the ranks of `living`, bit r for rank r.

        Collective over the living, when no process but theirs can store into their memory.
        barrier: returns when all of the living have called it.
        names: of the operators that all of them have; all where nobody says.

        Raises what the first operator raised that cannot go on, when the others have recovered.
        """
        with self._fate:
            items = list(self._members.items())
        members = [member for name, member in items if names is None or name in names]
        for member in members:
            member._quiesce()
        barrier()  # no kernel of the living runs: none stores into a share
        self._living = living
        failures: list[Exception] = []
        for member in members:
            try:
                member._recover(living)
            except Exception as error:  # the peers wait in the barrier
                failures.append(error)
        barrier()  # every share is as at creation: calls may store into it
        with self._fate:
            for rank in self._ended:
                if living >> rank & 1:  # ended meanwhile: `_recover` has forgotten it
                    for member in members:
                        member._peer_ended(rank)
        if failures:
            raise failures[0]

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

    def next_generation(self) -> int:
        """1, 2, ... 65535, 1, ...: the same on every rank. Collective."""
        following = self._generation % 0xFFFF + 1
        # The most of all: a creation that was interrupted was begun on some ranks only, and a rank
        # that joins has made none.
        with self.noted(lambda group: group._gather("generation", following, None)):
            said = self._gather("generation", following, None)
        self._generation = max(said[rank] for rank in self.living)
        return self._generation

    @contextlib.contextmanager
    def creation(self) -> Iterator[Creation]:
        """Inside, control messages are noted for a rank that makes the same object later."""
        if self._creation is not None:  # part of another object
            yield self._creation
            return
        self._creation = Creation()
        try:
            yield self._creation
            self._creations = [each for each in self._creations if each.exists]
            self._creations.append(self._creation)
        finally:
            self._creation = None

    @contextlib.contextmanager
    def noted(self, step: Step) -> Iterator[None]:
        """Inside are the messages of `step`, which says them to a rank that joins."""
        creation, self._creation = self._creation, None
        try:
            yield
        finally:
            self._creation = creation
        if creation is not None:
            creation.steps.append(step)

    def abort(self, why: str) -> None:
        """Make every later or blocked control call of this rank raise. Callable from any thread."""
        instance("why", why, str)
        stop = getattr(self._control, "abort", None)
        if stop is not None:
            stop(why)

    def close(self) -> None:
        """Give up sockets and an own torch group. Local and idempotent; never waits for a peer."""
        self._leave(None)

    def _leave(self, why: str | None) -> None:
        """Close; ranks that wait for this one in a control message get the reason at once."""
        if self._closed:
            return
        self._closed = True
        with self._fate:
            members = self._attached()
        for member in members:
            member._tell_left(why or "closed its group", settled=why is None)
        self._close_meeting()
        self._control.close(None if why is None else f"it {why}")
        for each in (self._membership, self._fresh):
            if each is not None:
                each.close()
        if self._process is not None:
            self._process.close()
        if self._hosts is not None:
            self._hosts.close(why)
        if self._own is not None:
            self._own.destroy()
            self._own = self._process_group = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(None if error is None else reason(error))

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}, device={self.device})"

    def _gather(self, op: str, value: JSON, timeout: float | None) -> list[Any]:
        return self._control.gather(op, value, self._deadline(timeout))

    def _deadline(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else seconds("timeout", timeout)


def _check_json(value: JSON) -> None:
    """Raises InvalidArgument for what no message can carry."""
    try:
        encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"value is {shown(value)}, which is not JSON: {error}") from error


def _check_joining(said: list[list[int] | None]) -> None:
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


def reason(error: BaseException) -> str:
    """An exception that ends a rank, in a line for its peers."""
    text = " ".join(str(error).split())
    return f"raised {type(error).__name__}" + (f": {text}" if text else "")


def _difference(other: Any, first: Any) -> tuple[str, str]:
    """How two unequal values differ, as texts: key by key where both are dicts."""
    if not (isinstance(other, dict) and isinstance(first, dict)):
        return repr(other), repr(first)
    unset = object()
    keys = [k for k in {**first, **other} if other.get(k, unset) != first.get(k, unset)]
    theirs, ours = (
        ", ".join(f"{k}={d[k]!r}" if k in d else f"no {k}" for k in keys) for d in (other, first)
    )
    return theirs, ours
