# SPDX-License-Identifier: Apache-2.0
"""Ranks of one job: how they meet, what they tell each other, and on which hosts they are."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weft.arguments import check_bools, check_instance, check_int, check_ints, check_seconds
from weft.cuda import memory as cuda
from weft.errors import InvalidArgument, OutOfOrder, RendezvousFailed
from weft.group.agreement import Recovery
from weft.group.control import Control, ControlPlane
from weft.group.hosts import (
    Topology,
    abort_rail,
    connect_machine,
    group_by_host,
    group_by_machine,
    open_process_groups,
    report_location,
    resolve_device,
)
from weft.group.meeting import Meeting, meet
from weft.group.membership import Lifecycle, Roster
from weft.group.messages import Creation, Messages
from weft.group.recovery import GroupRecovery
from weft.group.torch_groups import ManagedProcessGroup, TorchControl
from weft.group.wire import JSON
from weft.keywords import internal
from weft.shape import MAX_RANKS

T = TypeVar("T")


class Group:
    """Hold the ranks of one job: ranks of one host, which share memory, or of several hosts.

    Make a group with `Group.from_torch`, `Group.join`, or inside `weft.launch`. Methods that
    communicate are collective: every rank calls the same ones in the same order, each from one
    thread at a time. When a rank dies they raise RendezvousFailed naming it, until the survivors
    call `recover`. A group is a context manager that closes it.

    Machines whose GPUs one NVLink domain joins count as one host. With several hosts
    (`from_torch`), `local` is the group of this rank's host and `rail` the torch process group of
    the ranks with the same place on each host.

    Attributes:
        rank: Rank of this process.
        size: Number of ranks.
        device: Device of this rank's memory, "cpu" or "cuda:i".
        machines: Number of machines. It exceeds `hosts` if NVLink joins some.
    """

    def __init__(
        self,
        control: Control,
        *,
        device: torch.device,
        timeout: float,
        process_group: dist.ProcessGroup | None = None,
        threads: bool = False,
        machines: int = 1,
        job_machines: int | None = None,
    ) -> None:
        self.rank = control.rank
        self.size = control.size
        self.device = device
        self.machines = machines
        # Machines of the group of which this one is a host.
        self.job_machines = machines if job_machines is None else job_machines
        self._threads = threads
        self._process_group = process_group
        self._own: ManagedProcessGroup | None = None
        self._local: Group | None = None  # where there are several hosts
        self._topology = Topology((tuple(range(self.size)),))
        self._roster = Roster(self.rank, self.size)
        self._messages = Messages(control, self._roster, timeout=timeout)
        self._recovery = GroupRecovery(self._messages, self._roster, device, self.job_machines)
        # A group that is dropped unclosed releases its connections; at exit the system does.
        weakref.finalize(self, self._recovery.close).atexit = False
        if isinstance(control, ControlPlane):
            control.describe_activity = self._roster.describe_activity
            if self.size > 1 and not threads:
                self._recovery.watch(control)

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
        """Make the group of the ranks that come to `meeting`. Collective.

        Raises:
            RendezvousFailed: a rank does not come, or differs.
        """
        check_instance("meeting", meeting, Meeting)
        size = check_int("size", size, 1, MAX_RANKS)
        rank, timeout = check_int("rank", rank, 0, size - 1), check_seconds("timeout", timeout)
        check_instance("device", device, torch.device)
        check_bools(threads=threads)
        control = meet(meeting, rank=rank, size=size, device=device.type, timeout=timeout)
        return cls(control, device=device, timeout=timeout, threads=threads)

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
        """Join as the replacement of a dead rank, in a new process.

        Make the same operators as the survivors have, in the same order, then call `enter`.

        Args:
            meeting: What `open_meeting` returned to the survivors, or its `address`.
            rank: Number of the dead rank.
            size: Number of ranks of the group.
            device: Device of this rank's memory.
            timeout: Seconds to meet, and the group's `timeout`.

        Returns:
            The group.

        Raises:
            RendezvousFailed: the ranks do not meet, or no rank has to be replaced.
        """
        group = cls.from_meeting(
            Meeting.from_address(meeting) if isinstance(meeting, str) else meeting,
            rank=rank,
            size=size,
            device=resolve_device(device),
            timeout=timeout,
        )
        try:
            group._recovery.join(timeout)
        except BaseException as error:
            group.leave(format_reason(error))
            raise
        return group

    @classmethod
    def from_torch(
        cls,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: float = 120.0,
    ) -> Group:
        """Make a group of the ranks of a torch process group. Collective.

        On one host weft uses the process group only to meet. Ranks find out who shares a host by
        boot id and `WEFT_HOST`, and by fabric handles if NVLink joins machines. Between hosts,
        control messages and rows travel over torch process groups.

        Args:
            process_group: Ranks of the group. Default: the world. It stays the caller's.
            device: Device of this rank's memory. Default: the current CUDA device if there is one,
                else the CPU.
            timeout: Seconds to meet, and the group's `timeout`.

        Returns:
            The group.

        Raises:
            InvalidArgument: torch.distributed is not initialised, or this process is no member.
            RendezvousFailed: the ranks do not meet, or hosts have different numbers of ranks.
        """
        timeout, place = check_seconds("timeout", timeout), resolve_device(device)
        group = dist.group.WORLD if process_group is None else process_group
        if group is None:
            raise InvalidArgument(
                "torch.distributed is not initialised: call init_process_group first, or use "
                "weft.launch"
            )
        check_instance("process_group", group, dist.ProcessGroup)
        if dist.get_rank(group) < 0:
            raise InvalidArgument("this process is no member of the given process group")
        return cls._over(group, place, timeout)

    @classmethod
    def _over(
        cls,
        process_group: dist.ProcessGroup,
        device: torch.device,
        timeout: float,
        job_machines: int | None = None,
    ) -> Group:
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        control = TorchControl(process_group, rank, size)
        exchange = partial(control.gather, "Group.from_torch", timeout=timeout)
        reports = exchange(report_location(process_group, device))
        machines = group_by_machine(reports)
        make = partial(
            cls,
            device=device,
            timeout=timeout,
            process_group=process_group,
            machines=len(machines),
            job_machines=job_machines,
        )
        if len(machines) == 1:
            return make(connect_machine(exchange, rank, size, device.type, timeout))

        reached: list[list[int]] = [[] for _ in reports]
        if device.type == "cuda":
            reached = cuda.find_reachable_ranks(
                device, exchange, [machine[0] for machine in machines]
            )
        ranks, names = group_by_host(reports, reached)
        group = make(control)
        if len(ranks) > 1:
            group._meet_host(process_group, ranks, names, reports)
        else:
            group._watch_machine(next(each for each in machines if rank in each))
        return group

    def _watch_machine(self, ranks: Sequence[int]) -> None:
        """Notice the deaths of `ranks`, which share this rank's machine. Collective over all.

        Ranks of other machines learn of them from the ranks that are in a call.
        """

        def exchange(value: JSON) -> list[Any]:
            values = self._messages.gather("Group.from_torch", value)
            return [values[rank] for rank in ranks]

        def meet_on_machine() -> None:
            place, count = ranks.index(self.rank), len(ranks)
            control = connect_machine(exchange, place, count, self.device.type, self.timeout)
            self._recovery.watch(control, ranks)

        action = f"meeting on one machine, its ranks {list(ranks)} numbered from 0,"
        self.run_collective(meet_on_machine, action=action)

    def _meet_host(
        self,
        whole: dist.ProcessGroup,
        ranks: tuple[tuple[int, ...], ...],
        names: tuple[str, ...],
        reports: list[Any],
    ) -> None:
        """Make the group of this rank's host, and open the rail. Collective over all hosts."""
        index = next(i for i, each in enumerate(ranks) if self.rank in each)

        def meet_on_host() -> tuple[Group, dist.ProcessGroup]:
            gpus = self.device.type == "cuda"
            shared, rail = open_process_groups(
                whole, ranks, self.rank, reports, self.timeout, gpus=gpus
            )
            local = Group._over(shared, self.device, self.timeout, self.machines)
            if local.hosts > 1:
                raise RendezvousFailed(
                    f"the ranks of {names[index]} could map each other's memory and now cannot: "
                    "look at the NVLink domain's IMEX service (nvidia-imex-ctl -N), and restart "
                    "the job"
                )
            return local, rail

        action = f"meeting on one host, its ranks {list(ranks[index])} numbered from 0,"
        self._local, rail = self.run_collective(meet_on_host, action=action)
        # torch numbers the ranks of the rail by rank, which need not be the order of hosts.
        world, place = dist.get_process_group_ranks(whole), ranks[index].index(self.rank)
        peers = tuple(world[each[place]] for each in ranks)
        self._topology = Topology(ranks, names, index, rail, peers, reports[0]["token"])

    @property
    def timeout(self) -> float:
        """Seconds that a control message may take if the call names no timeout."""
        return self._messages.timeout

    @timeout.setter
    def timeout(self, value: float) -> None:
        self._messages.timeout = value

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that take part: all of them until a recovery continues without the dead."""
        return self._roster.living

    @property
    def living_mask(self) -> int:
        """Mask of the ranks that take part, bit r for rank r."""
        return self._roster.living_mask

    @property
    def ended(self) -> frozenset[int]:
        """Ranks whose processes have ended, as far as this rank knows, among those that take part.

        With several hosts, those of this rank's host.
        """
        if self._local is not None:
            return frozenset(self.host_ranks[self.host][place] for place in self._local.ended)
        return self._roster.ended

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self._topology.ranks)

    @property
    def host(self) -> int:
        """Index of this rank's host. Hosts are numbered by their first ranks."""
        return self._topology.index

    @property
    def host_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host."""
        return self._topology.ranks

    @internal
    def host_name(self, host: int) -> str:
        """Return a host as errors name it."""
        return self._topology.host_name(host)

    @property
    def local(self) -> Group:
        """Group of this rank's host; on one host the group itself."""
        return self if self._local is None else self._local

    @property
    def rail(self) -> dist.ProcessGroup:
        """Process group of the ranks with this rank's place on each host, ordered by rank.

        Raises:
            InvalidArgument: the group is on one host.
        """
        return self._topology.require_rail()

    @property
    def rail_peers(self) -> tuple[int, ...]:
        """Rank of `rail` on each host, as torch's default process group numbers it.

        Raises:
            InvalidArgument: the group is on one host.
        """
        self._topology.require_rail()
        return self._topology.rail_peers

    @property
    def token(self) -> str:
        """Word that no other group has, equal on all ranks; "" on one host."""
        return self._topology.token

    @internal
    def require_one_host(
        self,
        what: str,
        *,
        fix: str = "pass group.local, or take weft.AllToAll, weft.LowLatencyAllToAll or weft.MoE, "
        "which serve several",
    ) -> Group:
        """Return this group, or raise InvalidArgument if it has several hosts.

        `what` names the object that serves one host.
        """
        if self.hosts > 1:
            raise InvalidArgument(
                f"{what} takes ranks of one host, and these are on {self.hosts}: {fix}"
            )
        return self

    @internal
    def require_one_machine(self, what: str, *, fix: str) -> Group:
        """Return this group, or raise InvalidArgument if it has several machines.

        `what` names the object that needs `recover`, which serves one machine.
        """
        if self.machines > 1:
            raise InvalidArgument(
                f"{what} takes ranks of one machine, and these are on {self.machines}: {fix}"
            )
        return self

    def pid(self, rank: int) -> int | None:
        """Return the process id of a rank as the kernel reported it, or None if unknown."""
        return self._messages.control.pid(rank)

    @internal
    def describe_activity(self, ranks: Collection[int]) -> dict[int, str]:
        """Return, in words, what each of `ranks` is doing as far as this rank can see.

        Takes 0.1 s.
        """
        return self._roster.describe_activity(ranks, self._messages.control.current_call)

    @internal
    def find_diverged_operators(
        self, member: Lifecycle, rank: int
    ) -> tuple[str, dict[str, Lifecycle]]:
        """Return `Roster.find_diverged_operators`."""
        return self._roster.find_diverged_operators(member, rank)

    def all_gather(self, value: JSON, *, timeout: float | None = None) -> list[Any]:
        """Return every rank's value in rank order; None for a dead rank. Collective.

        Args:
            value: At most 1 MiB of JSON. Tuples return as lists.
            timeout: Seconds to wait. Default: the group's `timeout`.

        Raises:
            InvalidArgument: JSON cannot represent the value.
            RendezvousFailed: a rank died, closed its group or did not come in time.
        """
        return self._messages.all_gather(value, timeout=timeout)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has called it. Collective.

        Args:
            timeout: Seconds to wait. Default: the group's `timeout`.

        Raises:
            RendezvousFailed: a rank died, closed its group or did not come in time.
        """
        self._messages.barrier(timeout=timeout)

    def vote(
        self, error: BaseException | None, *, action: str, undo: Callable[[], None] | None = None
    ) -> None:
        """Continue only if every rank can. Collective.

        Args:
            error: What stopped this rank, or None. It becomes the cause of the error raised here.
            doing: What the ranks are doing, for errors.
            undo: Called before an error is raised on a rank that passed none, to release what it
                made; also if the vote itself fails.

        Raises:
            CreationFailed: a rank passed an error. The same text on every rank, naming the ranks.
            UsageError: every rank passed an error of this same class, so the call is wrong on each.
        """
        self._messages.vote(error, action=action, undo=undo)

    def run_collective(self, step: Callable[[], T], *, action: str) -> T:
        """Run `step` on every rank, vote on how it went, and return its result. Collective.

        Raises as `vote` does, the same on every rank, if `step` raised on any.
        """
        return self._messages.run_collective(step, action=action)

    def agree(self, value: JSON, *, what: str) -> None:
        """Check that every rank passes an equal `value`; `what` names it in the error. Collective.

        Raises:
            GeometryMismatch: values differ. The same text on every rank, naming two ranks and, key
                by key for dicts, both values.
        """
        self._messages.agree(value, what=what)

    def exchange_fds(self, fd: int, *, timeout: float | None = None) -> list[int | None]:
        """Return one file descriptor of every rank, in rank order. Collective.

        The own entry is a duplicate; that of a dead rank is None. The caller closes all of them.

        Raises:
            InvalidArgument: the group spans several machines, or `fd` is not open.
            RendezvousFailed: a rank died, closed its group or did not come in time.
        """
        return self._messages.exchange_fds(fd, timeout=timeout)

    @internal
    def map_shares(
        self,
        export: Callable[[], int],
        map_fds: Callable[[Mapping[int, int]], None],
        *,
        action: str,
    ) -> None:
        """Pass a descriptor of every rank's share to all ranks, which map them. Collective.

        No descriptor stays open: it would keep the memory alive after its owner's death.

        Args:
            export: Returns a new descriptor of the own share.
            map_fds: Maps shares, given the descriptor of each rank.
            doing: What the ranks are doing, for errors.

        Raises:
            CreationFailed: a rank failed. Raised on every rank.
        """

        def exchange(messages: Messages) -> None:
            with contextlib.ExitStack() as opened:

                def export_share() -> int:
                    fd = export()
                    opened.callback(os.close, fd)
                    return fd

                fds = messages.exchange_fds(
                    messages.run_collective(export_share, action="exporting memory")
                )
                by_rank = {rank: fd for rank, fd in enumerate(fds) if fd is not None}
                for fd in by_rank.values():
                    opened.callback(os.close, fd)
                new = {rank: by_rank[rank] for rank in messages.ranks_to_map}
                messages.run_collective(lambda: map_fds(new), action=action)

        self._messages.record(exchange)

    def next_generation(self) -> int:
        """Return 1, 2, ... 65535, 1, ...: the same on every rank. Collective."""
        return self._messages.next_generation()

    @internal
    def next_number(self, what: str, last: int, limit: int) -> int:
        """Return the number after `last`, from 1 to `limit`, the same on every rank. Collective.

        A new process gets the number that the survivors gave to the same object.
        """
        return self._messages.next_number(what, last, limit)

    @internal
    def creation(
        self, *, is_workspace: bool = False, workspace: Creation | None = None
    ) -> AbstractContextManager[Creation]:
        """Record the control messages inside the context, for a new process that makes the object.

        Args:
            is_workspace: The object is memory that others share. A new process makes it with the
                first of them that is open.
            workspace: Creation of the memory that the object shares.
        """
        return self._messages.creation(is_workspace=is_workspace, workspace=workspace)

    @internal
    def record(self, step: Callable[[Messages], T]) -> T:
        """Run `step` and record it as part of the creation under way. Collective.

        `step` runs again for a rank that joins. It must not hold the group: a group that is dropped
        is released at once.
        """
        return self._messages.record(step)

    def attach(self, member: Lifecycle) -> None:
        """Notify `member` of deaths, of this rank's leaving and of recoveries.

        Call it once for each heap, after its creation.
        """
        self._roster.attach(f"{type(member).__name__} {self._messages.generation}", member)

    def process_group(self) -> dist.ProcessGroup:
        """Return the torch process group of these ranks. Collective at the first call.

        A group from `from_torch` returns the one it was made from. Otherwise the process's default
        group is made: NCCL if each rank has a GPU of its own, else gloo.

        Raises:
            InvalidArgument: the ranks are threads, or torch.distributed is already initialised.
        """
        if self._process_group is not None:
            return self._process_group
        if self._threads:
            raise InvalidArgument(
                "these ranks are threads of one process and torch.distributed needs processes; "
                'use weft.launch(..., device="cpu")'
            )
        if self._recovery.closed:
            raise OutOfOrder("the group is closed; make a new one")
        if dist.is_initialized():
            raise InvalidArgument(
                "torch.distributed is initialised already; make this group with "
                "weft.Group.from_torch() so that both are the same ranks"
            )

        self._own = ManagedProcessGroup(self._messages, self.device)
        self._process_group = self._own.process_group
        return self._process_group

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
        timeout = check_seconds("timeout", timeout)
        ranks = check_ints("suspects", suspects, 0, self.size - 1)
        return self._recovery.recover(ranks, timeout)

    def open_meeting(self) -> Meeting:
        """Open a meeting for `replace` and `join`. Collective over the living ranks.

        Returns:
            The meeting. Pass its `address` to the new processes only: it admits a process of this
                user.

        Raises:
            CreationFailed: a rank has no file descriptor left.
        """

        return self._recovery.open_meeting()

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
        check_instance("meeting", meeting, Meeting)
        timeout = check_seconds("timeout", timeout)
        self._recovery.replace(meeting, timeout)

    def enter(self, *, timeout: float = 120.0) -> None:
        """Start to take calls, after `join` and the constructors. Collective with `replace`.

        Args:
            timeout: Seconds to wait for the other ranks.
        """
        self._recovery.enter(check_seconds("timeout", timeout))

    def abort(self, reason: str) -> None:
        """Make every later or blocked control message of this rank raise. Any thread may call it.

        Args:
            reason: Reason for the error.
        """
        check_instance("reason", reason, str)
        self._messages.control.abort(reason)

    def close(self) -> None:
        """Close sockets and an own torch process group. Local and idempotent; never waits for a
        peer.
        """
        self.leave(None)

    @internal
    def leave(self, reason: str | None) -> None:
        """Close; ranks that wait for this one in a control message get the reason at once."""
        if self._recovery.closed:
            return
        self._recovery.closed = True
        for member in self._roster.members().values():
            member.announce_leave(reason or "closed its group", drain=reason is None)
        self._recovery.close(reason)
        if self._local is not None:
            self._local.leave(reason)
            if reason is not None:
                abort_rail(self.rail)
        if self._own is not None:
            self._own.destroy()
            self._own = self._process_group = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.leave(None if error is None else format_reason(error))

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}, device={self.device})"


def format_reason(error: BaseException) -> str:
    """Return an exception that ends a rank as one line for its peers."""
    text = " ".join(str(error).split())
    return f"raised {type(error).__name__}" + (f": {text}" if text else "")
