# SPDX-License-Identifier: Apache-2.0
"""The public `Group` of a job's ranks: rendezvous, collectives, hosts and recovery."""

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
from weft.group.sleep import GroupSleep, LocalBuffers, SymmetricMemory
from weft.group.status import STATUS_SERVER
from weft.group.torch_groups import ManagedProcessGroup, TorchControl
from weft.group.waits import CONTROL, Waits
from weft.group.wire import JSON
from weft.keywords import internal
from weft.shape import MAX_RANKS

T = TypeVar("T")


class Group:
    """Ranks of one job, on one host with shared memory or on several hosts.

    Create a group with `Group.from_torch` or inside `weft.launch`. Methods that
    communicate are collective: every rank calls the same methods in the same order, from one
    thread at a time. After a rank dies they raise RendezvousFailed with its rank, until the
    survivors call `recover`. Use a group as a context manager to close it.

    Machines whose GPUs are connected by one NVLink domain count as one host. With several hosts
    (`from_torch`), `local` is the group of this rank's host and `rail` the torch process group of
    the ranks that have this rank's local rank on each host.

    Attributes:
        rank: Rank of this process.
        size: Number of ranks.
        device: Device of this rank's memory, "cpu" or "cuda:i".
        machines: Number of machines. It exceeds `hosts` if NVLink connects some of them.
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
        is_replacement: bool = False,
    ) -> None:
        self.rank = control.rank
        self.size = control.size
        self.device = device
        self.machines = machines
        # Number of machines of the whole job, of which this group may be one host.
        self.job_machines = machines if job_machines is None else job_machines
        self._threads = threads
        self._process_group = process_group
        self._managed_group: ManagedProcessGroup | None = None
        self._local: Group | None = None  # set if the group has several hosts
        self._topology = Topology((tuple(range(self.size)),))
        self._roster = Roster(self.rank, self.size)
        self._messages = Messages(control, self._roster, timeout=timeout)
        self._sleep = GroupSleep(self._messages, self._roster)
        self._recovery = GroupRecovery(
            self._messages,
            self._roster,
            self._sleep,
            device,
            self.job_machines,
            is_replacement=is_replacement,
        )
        # Releases the connections of an unclosed group; at exit the system does.
        weakref.finalize(self, self._recovery.close).atexit = False
        if isinstance(control, ControlPlane):
            control.describe_activity = self._roster.describe_activity
            if self.size > 1 and not threads and not is_replacement:
                self._recovery.watch(control)
        STATUS_SERVER.add(self)

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
        """Create the group of the ranks that join `meeting`. Collective.

        Raises:
            RendezvousFailed: a rank does not join, or was built for another group.
        """
        check_instance("meeting", meeting, Meeting)
        size = check_int("size", size, 1, MAX_RANKS)
        rank, timeout = check_int("rank", rank, 0, size - 1), check_seconds("timeout", timeout)
        check_instance("device", device, torch.device)
        check_bools(threads=threads)
        control = meet(meeting, rank=rank, size=size, device=device.type, timeout=timeout)
        return cls(control, device=device, timeout=timeout, threads=threads)

    @classmethod
    def for_replacement(
        cls, *, rank: int, size: int, device: torch.device | str, timeout: float = 120.0
    ) -> Group:
        """Create the group of a new process that will replace a dead rank. Local.

        Until `join`, this rank is the only participating one, and the survivors run without it.
        Create the objects that the survivors have created, load weights and capture graphs, then
        call `join`.

        Args:
            rank: Number of the dead rank.
            size: Number of ranks of the survivors' group.
            device: Device of this rank's memory.
            timeout: The group's `timeout` in seconds.

        Returns:
            The group.
        """
        size = check_int("size", size, 2, MAX_RANKS)
        rank, timeout = check_int("rank", rank, 0, size - 1), check_seconds("timeout", timeout)
        control = ControlPlane(rank, size)
        return cls(control, device=resolve_device(device), timeout=timeout, is_replacement=True)

    @classmethod
    def from_torch(
        cls,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: float = 120.0,
    ) -> Group:
        """Create a group of the ranks of a torch process group. Collective.

        On one host weft uses the process group only for the rendezvous. Ranks share a host if they
        have the same boot id and `WEFT_HOST`, or if NVLink connects their machines (fabric
        handles). Between hosts, control messages and rows are sent over torch process groups.

        Args:
            process_group: Ranks of the group; owned by the caller. Default: the world.
            device: Device of this rank's memory. Default: the current CUDA device if there is one,
                else the CPU.
            timeout: Seconds for the rendezvous, and the group's `timeout`.

        Returns:
            The group.

        Raises:
            InvalidArgument: torch.distributed is not initialised, or this process is not a member.
            RendezvousFailed: the rendezvous failed, or hosts have different numbers of ranks.
        """
        timeout, rank_device = check_seconds("timeout", timeout), resolve_device(device)
        group = dist.group.WORLD if process_group is None else process_group
        if group is None:
            raise InvalidArgument(
                "torch.distributed is not initialised: call init_process_group first, or use "
                "weft.launch"
            )
        check_instance("process_group", group, dist.ProcessGroup)
        if dist.get_rank(group) < 0:
            raise InvalidArgument("this process is not a member of the process group")
        return cls._from_process_group(group, rank_device, timeout)

    @classmethod
    def _from_process_group(
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
        create = partial(
            cls,
            device=device,
            timeout=timeout,
            process_group=process_group,
            machines=len(machines),
            job_machines=job_machines,
        )
        if len(machines) == 1:
            return create(connect_machine(exchange, rank, size, device.type, timeout))

        reachable: list[list[int]] = [[] for _ in reports]
        if device.type == "cuda":
            reachable = cuda.find_reachable_ranks(
                device, exchange, [machine[0] for machine in machines]
            )
        ranks, names = group_by_host(reports, reachable)
        group = create(control)
        if len(ranks) > 1:
            group._connect_host(process_group, ranks, names, reports)
        else:
            group._watch_machine(next(machine for machine in machines if rank in machine))
        return group

    def _watch_machine(self, ranks: Sequence[int]) -> None:
        """Watch `ranks`, which share this rank's machine, for deaths. Collective over all ranks.

        Ranks of other machines get the deaths from the ranks that are in a call.
        """

        def exchange(value: JSON) -> list[Any]:
            values = self._messages.gather("Group.from_torch", value)
            return [values[rank] for rank in ranks]

        def connect_and_watch() -> None:
            local_rank, count = ranks.index(self.rank), len(ranks)
            control = connect_machine(exchange, local_rank, count, self.device.type, self.timeout)
            self._recovery.watch(control, ranks)

        action = f"connecting the ranks of one machine, {list(ranks)} numbered from 0,"
        self.run_collective(connect_and_watch, action=action)

    def _connect_host(
        self,
        parent: dist.ProcessGroup,
        ranks: tuple[tuple[int, ...], ...],
        names: tuple[str, ...],
        reports: list[Any],
    ) -> None:
        """Create the group of this rank's host, and open the rail. Collective over all hosts."""
        index = next(i for i, host_ranks in enumerate(ranks) if self.rank in host_ranks)

        def connect() -> tuple[Group, dist.ProcessGroup]:
            use_gpus = self.device.type == "cuda"
            shared, rail = open_process_groups(
                parent, ranks, self.rank, reports, self.timeout, use_gpus=use_gpus
            )
            local = Group._from_process_group(shared, self.device, self.timeout, self.machines)
            if local.hosts > 1:
                raise RendezvousFailed(
                    f"the ranks of {names[index]} can no longer map each other's memory: check the "
                    "NVLink domain's IMEX service (nvidia-imex-ctl -N), and restart the job"
                )
            return local, rail

        action = f"connecting the ranks of one host, {list(ranks[index])} numbered from 0,"
        self._local, rail = self.run_collective(connect, action=action)
        STATUS_SERVER.remove(self._local)  # this group reports its operators
        # torch numbers the ranks of the rail by rank, which need not be the order of hosts.
        world, local_rank = dist.get_process_group_ranks(parent), ranks[index].index(self.rank)
        peers = tuple(world[host_ranks[local_rank]] for host_ranks in ranks)
        self._topology = Topology(ranks, names, index, rail, peers, reports[0]["token"])

    @property
    def timeout(self) -> float:
        """Default timeout of a control message in seconds."""
        return self._messages.timeout

    @timeout.setter
    def timeout(self, value: float) -> None:
        self._messages.timeout = value

    @property
    def living(self) -> tuple[int, ...]:
        """Participating ranks: all of them until a recovery excludes the dead."""
        return self._roster.living

    @property
    def living_mask(self) -> int:
        """Mask of the ranks that take part, bit r for rank r."""
        return self._roster.living_mask

    @property
    def ended(self) -> frozenset[int]:
        """Participating ranks whose processes are known to have ended.

        With several hosts, only ranks of this rank's host are known.
        """
        if self._local is not None:
            return frozenset(self.host_ranks[self.host][rank] for rank in self._local.ended)
        return self._roster.ended

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self._topology.ranks)

    @property
    def host(self) -> int:
        """Index of this rank's host. Hosts are ordered by their first ranks."""
        return self._topology.index

    @property
    def host_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host."""
        return self._topology.ranks

    @internal
    def host_name(self, host: int) -> str:
        """Return the name of a host for errors."""
        return self._topology.host_name(host)

    @property
    def local(self) -> Group:
        """Group of this rank's host: the group itself if there is one host."""
        return self if self._local is None else self._local

    @property
    def rail(self) -> dist.ProcessGroup:
        """Process group of the ranks with this rank's local rank on each host, ordered by rank.

        Raises:
            InvalidArgument: the group is on one host.
        """
        return self._topology.require_rail()

    @property
    def rail_peers(self) -> tuple[int, ...]:
        """Rank of each host's member of `rail` in torch's default process group.

        Raises:
            InvalidArgument: the group is on one host.
        """
        self._topology.require_rail()
        return self._topology.rail_peers

    @property
    def token(self) -> str:
        """Unique id of this group, equal on all ranks; "" on one host."""
        return self._topology.token

    @internal
    def require_one_host(
        self,
        label: str,
        *,
        fix: str = "pass group.local, or use weft.AllToAll, weft.LowLatencyAllToAll or weft.MoE, "
        "which support several hosts",
    ) -> Group:
        """Return this group, or raise InvalidArgument if it has several hosts.

        `label` names the object that needs one host, for the error.
        """
        if self.hosts > 1:
            raise InvalidArgument(
                f"{label} needs ranks on one host, but they are on {self.hosts}: {fix}"
            )
        return self

    @internal
    def require_one_machine(self, label: str, *, fix: str) -> Group:
        """Return this group, or raise InvalidArgument if it has several machines.

        `label` names the object that needs `recover`, which supports one machine.
        """
        if self.machines > 1:
            raise InvalidArgument(
                f"{label} needs ranks on one machine, but they are on {self.machines}: {fix}"
            )
        return self

    def pid(self, rank: int) -> int | None:
        """Return the process id of a rank as the kernel reported it, or None if unknown."""
        return self._messages.control.pid(rank)

    @internal
    def describe_activity(self, ranks: Collection[int]) -> dict[int, str]:
        """Describe the state of each of `ranks` as seen from this rank, for errors.

        Blocks for 0.1 s.
        """
        control = self._messages.control
        return self._roster.describe_activity(ranks, control.current_call, control.last_call)

    @internal
    def find_diverged_operators(
        self, member: Lifecycle, rank: int
    ) -> tuple[str, dict[str, Lifecycle]]:
        """See `Roster.find_diverged_operators`."""
        return self._roster.find_diverged_operators(member, rank)

    def all_gather(self, value: JSON, *, timeout: float | None = None) -> list[Any]:
        """Return every rank's value in rank order; None for a dead rank. Collective.

        Args:
            value: At most 1 MiB of JSON. Tuples are returned as lists.
            timeout: Seconds to wait. Default: the group's `timeout`.

        Raises:
            InvalidArgument: JSON cannot represent the value.
            RendezvousFailed: a rank died, closed its group or did not call in time.
        """
        return self._messages.all_gather(value, timeout=timeout)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Block until every rank has called it. Collective.

        Args:
            timeout: Seconds to wait. Default: the group's `timeout`.

        Raises:
            RendezvousFailed: a rank died, closed its group or did not call in time.
        """
        self._messages.barrier(timeout=timeout)

    def vote(
        self, error: BaseException | None, *, action: str, undo: Callable[[], None] | None = None
    ) -> None:
        """Raise on every rank if any rank passes an error. Collective.

        Args:
            error: Error of this rank, or None. It becomes the cause of the error raised here.
            action: Description of the step, for errors: "creating a heap".
            undo: Releases this rank's resources. Called before the raise on a rank that passed no
                error, also if the vote itself fails.

        Raises:
            CreationFailed: a rank passed an error. Every rank raises the same text with the ranks.
            UsageError: every rank passed an error of this same class, so the call is wrong on each.
        """
        self._messages.vote(error, action=action, undo=undo)

    def run_collective(self, step: Callable[[], T], *, action: str) -> T:
        """Run `step` on every rank and return its result, or raise on all of them. Collective.

        If `step` raises on any rank, every rank raises as `vote` does.
        """
        return self._messages.run_collective(step, action=action)

    def agree(self, value: JSON, *, label: str) -> None:
        """Check that every rank passes an equal `value`. Collective.

        Args:
            value: JSON value of this rank.
            label: Name of the value, for errors.

        Raises:
            GeometryMismatch: values differ. Every rank raises the same text with two ranks and both
                values; for dicts, only the keys that differ.
        """
        self._messages.agree(value, label=label)

    def exchange_fds(self, fd: int, *, timeout: float | None = None) -> list[int | None]:
        """Return one file descriptor of every rank, in rank order. Collective.

        This rank's entry is a duplicate, and that of a dead rank is None. The caller closes all.

        Raises:
            InvalidArgument: the group spans several machines, or `fd` is not open.
            RendezvousFailed: a rank died, closed its group or did not call in time.
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
        """Send a descriptor of this rank's share to all ranks, and map all shares. Collective.

        All descriptors are closed: an open one would keep the memory alive after its owner's death.

        Args:
            export: Returns a new descriptor of this rank's share.
            map_fds: Maps shares, given the descriptor of each rank.
            action: Description of the step, for errors.

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
    def next_number(self, label: str, last: int, limit: int) -> int:
        """Return the number after `last`, from 1 to `limit`, equal on every rank. Collective.

        Args:
            label: Name of the counter, for errors.
            last: This rank's previous number.
            limit: Largest number; 1 follows it.
        """
        return self._messages.next_number(label, last, limit)

    @internal
    def creation(
        self, *, is_workspace: bool = False, workspace: Creation | None = None
    ) -> AbstractContextManager[Creation]:
        """Record the control messages of a constructor, so that a new process can replay them.

        Args:
            is_workspace: Whether the object is memory that several objects share. A new process
                creates this memory when it creates the first open object that uses it.
            workspace: Creation of the memory that the object shares.
        """
        self._sleep.check_awake("an object is created")
        return self._messages.creation(is_workspace=is_workspace, workspace=workspace)

    @internal
    def record(self, step: Callable[[Messages], T]) -> T:
        """Run `step` and record it in the current creation. Collective.

        `step` runs again when a new process joins. It must not reference the group, which could
        then not be released when its last user drops it.
        """
        return self._messages.record(step)

    def waits(self) -> dict[str, Waits]:
        """Return how long this rank has waited for each peer, in control calls and in operators.

        Local: reads counters and stops nothing. On GPUs, each operator's counters are copied.

        Returns:
            The waits by name: "control" for this group's control calls, unless the group spans
                several machines, and "AllToAll 1", "AllReduce 2" ... for its open operators, with
                the number of the operator's heap.
        """
        control, waits = self._messages.control, {}
        if isinstance(control, ControlPlane):
            waits[CONTROL] = control.waits.read()
        for name, member in self.local.members().items():
            with contextlib.suppress(OutOfOrder):  # closed by another thread
                waits[name] = member.waits()
        return waits

    @internal
    def members(self) -> dict[str, Lifecycle]:
        """Return the open operators of this group, by name."""
        return self._roster.members()

    def attach(self, member: Lifecycle) -> None:
        """Register `member` to be notified of deaths, recoveries and the close of this group.

        Call it once for each heap, after its creation.
        """
        self._roster.attach(f"{type(member).__name__} {self._messages.generation}", member)

    @internal
    def add_heap(self, heap: SymmetricMemory) -> None:
        """Register a heap of all ranks, which `sleep` frees, by a weak reference."""
        self._sleep.add_heap(heap)

    @internal
    def add_buffers(self, buffers: LocalBuffers) -> None:
        """Register memory of this rank, which `sleep` frees, by a weak reference."""
        self._sleep.add_buffers(buffers)

    @property
    def asleep(self) -> bool:
        """Whether `sleep` has freed the memory of this group and `wake` has not restored it."""
        return self._sleep.asleep

    def sleep(self) -> None:
        """Free the memory of all objects of this group, and keep their addresses. Collective.

        Call it on every rank, between steps, with no call and no graph replay running. The heaps
        and buffers of all operators and MoE layers go back to the driver. Objects, compiled kernels
        and captured graphs stay valid for `wake`. Expert weights belong to the caller and stay.

        Until `wake`, calls raise OutOfOrder. Do not replay graphs, and do not access views of freed
        memory, such as received or grouped rows: both fault. Results that were not combined are
        lost.

        Raises:
            OutOfOrder: the group is already asleep, or a call is running.
            GroupError: an operator is broken; call `recover` first.
            CreationFailed: a rank could not free its memory, or has a broken operator. Every rank
                raises it.
            RendezvousFailed: a rank died or did not call in time. Call `recover`, then `wake` if
                the group is `asleep`.
            InvalidArgument: the group has several hosts.
        """
        self._check_sleep_support()
        self._sleep.sleep()

    def wake(self) -> None:
        """Allocate the memory that `sleep` freed, at the same addresses. Collective.

        Operators start in their initial state, as after `recover`: epochs and `history` start
        again, and the first round may take `first_timeout`. An operator that another rank has
        closed meanwhile raises PeerLeft.

        Raises:
            OutOfOrder: the group is awake.
            CreationFailed: a rank failed, for example because its GPU has too little free memory.
                Every rank raises it, and all stay asleep: free memory and call `wake` again.
            RendezvousFailed: a rank died or did not call in time. Call `recover`, then `wake` if
                the group is `asleep`.
            ExpertsLost: a layer cannot continue without dead ranks. All other objects are awake.
        """
        self._check_sleep_support()
        self._sleep.wake()

    def _check_sleep_support(self) -> None:
        if self.hosts > 1 or self.job_machines > self.machines:
            raise InvalidArgument(
                "a group of several hosts cannot sleep, nor can the local group of one of its "
                "hosts: close its operators, and create them again"
            )

    def process_group(self) -> dist.ProcessGroup:
        """Return the torch process group of these ranks. Collective at the first call.

        A group from `from_torch` returns the process group that it was created from. Otherwise
        torch's default group is initialised: NCCL if each rank has its own GPU, else gloo.

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
            raise OutOfOrder("the group is closed; create a new one")
        if dist.is_initialized():
            raise InvalidArgument(
                "torch.distributed is initialised already; create this group with "
                "weft.Group.from_torch() so that both have the same ranks"
            )

        self._managed_group = ManagedProcessGroup(self._messages, self.device)
        self._process_group = self._managed_group.process_group
        return self._process_group

    def recover(self, *, suspects: Sequence[int] = (), timeout: float = 10.0) -> Recovery:
        """Continue without the ranks that died. Collective over the living ranks.

        Call it on every survivor after a `GroupError` or `RendezvousFailed`, while no call and no
        graph replay runs. The survivors agree on the dead ranks, end their own calls, and reset the
        memory of all operators to its initial state, at the same addresses. Control messages
        continue among the living; results with one value per rank have None for a dead rank.
        If a survivor is asleep, the group is asleep afterwards: call `wake`.

        Args:
            suspects: Ranks to kill unless they call `recover` within half a second. Ranks that an
                operator timed out on (PeerTimeout) are included. No other rank is killed.
            timeout: Total seconds.

        Returns:
            The dead and living ranks, the rounds that all survivors finished, and the elapsed
                seconds.

        Raises:
            RecoveryFailed: a rank neither called `recover` nor ended. End its process and call
                `recover` again.
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
            The meeting. Pass its `address` to the new processes only: any process of this user that
                has the address can join.

        Raises:
            CreationFailed: a rank has no file descriptor left.
        """
        return self._recovery.open_meeting()

    def replace(self, meeting: Meeting, *, timeout: float = 120.0) -> None:
        """Admit new processes in place of all dead ranks. Collective over the living ranks.

        Each new process creates its group with `Group.for_replacement` and the objects of this
        group, and calls `join`. `replace` blocks until all of them have: call it once
        `meeting.find_waiting_ranks()` returns them on rank `meeting.hub`. Their memory is mapped at
        the addresses of the dead ranks' memory, so captured graphs stay valid. If `replace` raises,
        end the new processes and call `recover`.

        Args:
            meeting: Meeting from `open_meeting`.
            timeout: Seconds for the rendezvous, and then for each step of the new processes.

        Raises:
            OutOfOrder: no rank is dead, or the group is asleep.
            RendezvousFailed: a new process does not join in time, or dies.
            GeometryMismatch: a new process has created other objects.
            CreationFailed: a step failed on a rank. Every rank raises it.
            RecoveryFailed: a survivor does not call `replace`.
        """
        check_instance("meeting", meeting, Meeting)
        timeout = check_seconds("timeout", timeout)
        self._sleep.check_awake("a rank is replaced")
        self._recovery.replace(meeting, timeout)

    def join(
        self,
        meeting: Meeting | str,
        *,
        timeout: float = 120.0,
        rendezvous_timeout: float | None = None,
    ) -> None:
        """Join the survivors as the replacement of a dead rank. Collective with `replace`.

        Before, create the objects that the survivors have created, in the same order, also those
        that they have closed. Graphs that this process has captured stay valid. If `join` raises,
        end the process.

        Args:
            meeting: Meeting from the survivors' `open_meeting`, or its `address`.
            timeout: Seconds for each step of the other ranks.
            rendezvous_timeout: Seconds until the survivors call `replace`. Pass a long time if they
                may be asleep, or wait for other replacements: if they end, or recover again, `join`
                raises at once. Default: `timeout`.

        Raises:
            OutOfOrder: the group is not from `for_replacement`, has joined, or is asleep.
            RendezvousFailed: the rendezvous failed, or this rank does not have to be replaced.
            GeometryMismatch: the survivors have created other objects.
            CreationFailed: a step failed on a rank. Every rank raises it.
        """
        if isinstance(meeting, str):
            meeting = Meeting.from_address(meeting)
        check_instance("meeting", meeting, Meeting)
        self._sleep.check_awake("it joins the survivors")
        timeout = check_seconds("timeout", timeout)
        if rendezvous_timeout is not None:
            rendezvous_timeout = check_seconds("rendezvous_timeout", rendezvous_timeout)
        self._recovery.join(meeting, timeout, rendezvous_timeout or timeout)

    def abort(self, reason: str) -> None:
        """Make current and later control messages of this rank raise. Any thread may call it.

        Args:
            reason: Text of the error.
        """
        check_instance("reason", reason, str)
        self._messages.control.abort(reason)

    def close(self) -> None:
        """Close the group's sockets and the process group that it created. Idempotent.

        Local: never waits for a peer.
        """
        self.leave(None)

    @internal
    def leave(self, reason: str | None) -> None:
        """Close the group; peers that wait for this rank in a control message get `reason`."""
        if self._recovery.closed:
            return
        self._recovery.closed = True
        STATUS_SERVER.remove(self)
        for member in self._roster.members().values():
            member.announce_leave(reason or "closed its group", drain=reason is None)
        self._recovery.close(reason)
        if self._local is not None:
            self._local.leave(reason)
            if reason is not None:
                abort_rail(self.rail)
        if self._managed_group is not None:
            self._managed_group.destroy()
            self._managed_group = self._process_group = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.leave(None if error is None else format_reason(error))

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}, device={self.device})"


def format_reason(error: BaseException) -> str:
    """Format an exception that ends a rank as one line for its peers."""
    text = " ".join(str(error).split())
    return f"raised {type(error).__name__}" + (f": {text}" if text else "")
