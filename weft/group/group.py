# SPDX-License-Identifier: Apache-2.0
"""The ranks of one job: how they find each other, and on which hosts they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from weft.arguments import flags, instance, integer, seconds
from weft.cuda import memory as cuda
from weft.errors import InvalidArgument, OutOfOrder, RendezvousFailed
from weft.group.discovery import default_device, find
from weft.group.hosts import Hosts, by_host, by_machine, open_process_groups, whereabouts
from weft.group.meeting import Meeting, meet
from weft.group.messages import Control
from weft.group.recovery import Recovering, check_joining
from weft.group.torch_groups import OwnProcessGroup, TorchControl
from weft.group.wire import JSON
from weft.shape import MAX_RANKS


class Group(Recovering):
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
        timeout: Seconds that a control message may take if the call names no timeout.
    """

    def __init__(
        self,
        control: Control,
        *,
        device: torch.device,
        timeout: float,
        process_group: dist.ProcessGroup | None = None,
        threads: bool = False,
    ) -> None:
        self._process_group = process_group
        self._own: OwnProcessGroup | None = None
        self._threads = threads
        self._hosts: Hosts | None = None  # where there are several
        self._machines = self._job_machines = 1
        super().__init__(control, device=device, timeout=timeout, watched=not threads)

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
        size = integer("size", size, 1, MAX_RANKS)
        rank, timeout = integer("rank", rank, 0, size - 1), seconds("timeout", timeout)
        instance("device", device, torch.device)
        flags(threads=threads)
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
            RendezvousFailed: the ranks do not meet, or there is nobody to replace.
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
            check_joining(group._gather("replace", None, timeout))
            group._is_newcomer = True
        except BaseException as error:
            group._leave(reason(error))
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
        timeout, where = seconds("timeout", timeout), default_device(device)
        group = dist.group.WORLD if process_group is None else process_group
        if group is None:
            raise InvalidArgument(
                "torch.distributed is not initialised: call init_process_group first, or use "
                "weft.launch"
            )
        instance("process_group", group, dist.ProcessGroup)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise InvalidArgument("this process is no member of the given process group")
        over_torch = TorchControl(group, rank, size)
        exchange = partial(over_torch.gather, "Group.from_torch", timeout=timeout)
        said = exchange(whereabouts(group, where))
        machines = by_machine(said)
        if len(machines) == 1:
            control = find(exchange, rank, size, where.type, timeout)
            return cls(control, device=where, timeout=timeout, process_group=group)

        reached: list[list[int]] = [[] for _ in said]
        if where.type == "cuda":
            reached = cuda.reached(where, exchange, [machine[0] for machine in machines])
        ranks, names = by_host(said, reached)
        made = cls(over_torch, device=where, timeout=timeout, process_group=group)
        made._machines = made._job_machines = len(machines)
        if len(ranks) > 1:
            made._find_hosts(ranks, names, said)
        else:
            made._watch_machine(next(each for each in machines if rank in each))
        return made

    def _watch_machine(self, ranks: Sequence[int]) -> None:
        """Notice the deaths of `ranks`, which share this one's machine. Collective over all.

        The group's other ranks hear of them when these are in a call.
        """

        def exchange(value: JSON) -> list[Any]:
            said = self._gather("Group.from_torch", value, None)
            return [said[rank] for rank in ranks]

        def meet_on_machine() -> None:
            place, count = ranks.index(self.rank), len(ranks)
            control = find(exchange, place, count, self.device.type, self.timeout)
            self._membership = self._watch(control, ranks)

        doing = f"meeting on one machine, its ranks {list(ranks)} numbered from 0,"
        self.together(meet_on_machine, doing=doing)

    def _find_hosts(
        self, ranks: tuple[tuple[int, ...], ...], names: tuple[str, ...], said: list[Any]
    ) -> None:
        """Meet the ranks of this host, and open the rail. Collective over all hosts."""
        whole, timeout = self.process_group(), self.timeout
        index = next(i for i, each in enumerate(ranks) if self.rank in each)

        def meet_on_host() -> Hosts:
            gpus = self.device.type == "cuda"
            shared, rail = open_process_groups(whole, ranks, self.rank, said, timeout, gpus=gpus)
            local = Group.from_torch(shared, device=self.device, timeout=timeout)
            if local.hosts > 1:
                raise RendezvousFailed(
                    f"the ranks of {names[index]} could map each other's memory and now cannot: "
                    "look at the NVLink domain's IMEX service (nvidia-imex-ctl -N), and start anew"
                )
            local._job_machines = self._machines
            # Torch numbers the rail's ranks by rank, which need not be the order of hosts.
            world, place = dist.get_process_group_ranks(whole), ranks[index].index(self.rank)
            peers = tuple(world[each[place]] for each in ranks)
            return Hosts(ranks, names, index, local, rail, peers, said[0]["token"])

        doing = f"meeting on one host, its ranks {list(ranks[index])} numbered from 0,"
        self._hosts = self.together(meet_on_host, doing=doing)

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return 1 if self._hosts is None else len(self._hosts.ranks)

    @property
    def machines(self) -> int:
        """Number of machines. It exceeds `hosts` if NVLink joins some."""
        return self._machines

    @property
    def host(self) -> int:
        """Index of this rank's host. Hosts are numbered by their first ranks."""
        return 0 if self._hosts is None else self._hosts.index

    @property
    def host_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host."""
        return (tuple(range(self.size)),) if self._hosts is None else self._hosts.ranks

    @property
    def local(self) -> Group:
        """Group of this rank's host; on one host the group itself."""
        return self if self._hosts is None else self._hosts.local

    @property
    def rail(self) -> dist.ProcessGroup:
        """Process group of the ranks with this rank's place on each host, ordered by rank.

        Raises:
            InvalidArgument: the group is on one host.
        """
        return self._several().rail

    @property
    def rail_peers(self) -> tuple[int, ...]:
        """Rank of `rail` on each host, as torch's default process group numbers it.

        Raises:
            InvalidArgument: the group is on one host.
        """
        return self._several().peers

    def _several(self) -> Hosts:
        if self._hosts is None:
            raise InvalidArgument("this group is on one host, and has no rail to another")
        return self._hosts

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

    def one_machine(self, what: str, *, fix: str) -> Group:
        """This group. Raises InvalidArgument where it has several machines, since `what` is to
        `recover`.
        """
        if self.machines > 1:
            raise InvalidArgument(
                f"{what} takes ranks of one machine, and these are on {self.machines}: {fix}"
            )
        return self

    @property
    def token(self) -> str:
        """Of a group of several hosts, a word that no other one has."""
        return "" if self._hosts is None else self._hosts.token

    def _host_name(self, host: int) -> str:
        """A host as errors name it."""
        return f"host {host}" + ("" if self._hosts is None else f" ({self._hosts.names[host]})")

    @property
    def ended(self) -> frozenset[int]:
        """Ranks whose processes have ended, as far as this rank knows, among those that take part.

        With several hosts, those of this rank's host.
        """
        if self._hosts is not None:
            return frozenset(self.host_ranks[self.host][place] for place in self.local.ended)
        with self._fate:
            return frozenset(self._taking_part(self._ended))

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
        if self._closed:
            raise OutOfOrder("the group is closed; make a new one")
        if dist.is_initialized():
            raise InvalidArgument(
                "torch.distributed is initialised already; make this group with "
                "weft.Group.from_torch() so that both are the same ranks"
            )

        self._own = OwnProcessGroup(self, self.device)
        self._process_group = self._own.process_group
        return self._process_group

    def abort(self, why: str) -> None:
        """Make every later or blocked control message of this rank raise. Any thread may call it.

        Args:
            why: Reason for the error.
        """
        instance("why", why, str)
        stop = getattr(self._control, "abort", None)
        if stop is not None:
            stop(why)

    def close(self) -> None:
        """Close sockets and an own torch process group. Local and idempotent; never waits for a
        peer.
        """
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
        self._close_opened()
        self._control.close(None if why is None else f"it {why}")
        for each in (self._membership, self._fresh):
            if each is not None:
                each.close()
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


def reason(error: BaseException) -> str:
    """An exception that ends a rank, in a line for its peers."""
    text = " ".join(str(error).split())
    return f"raised {type(error).__name__}" + (f": {text}" if text else "")
