# SPDX-License-Identifier: Apache-2.0
"""Discovery of the hosts of a group, and the process groups within and between hosts.

Ranks of any launcher can already exchange small values, over a torch process group or a channel of
the engine. In one exchange, every rank reports where it runs. Ranks share a machine if
they have the same boot id and the same WEFT_HOST, so containers of one machine are one host unless
WEFT_HOST distinguishes them. Machines of one NVLink domain, whose GPUs can map each other's memory,
are one host too.

The exchange also distributes the address of the meeting. Everything after that uses Unix sockets,
so authentication, descriptors and liveness do not depend on the exchange.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from weft.arguments import format_value
from weft.errors import InvalidArgument, RendezvousFailed
from weft.group.control import ControlPlane
from weft.group.liveness import Peers, process_identity
from weft.group.meeting import Meeting, meet
from weft.group.torch_groups import default_env_var
from weft.group.wire import JSON, sanitize_text
from weft.shape import MAX_RANKS

HOST = "WEFT_HOST"
Exchange = Callable[[JSON], list[Any]]
_UNUSED_TAG = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Topology:
    """Hosts of a group.

    Attributes:
        ranks: Ranks of each host, ascending. Hosts are in the order of their first ranks.
        names: Name of each host, for errors.
        index: Index of this rank's host.
        rail: Process group of the ranks with this rank's local rank on each host; None on one host.
        rail_peers: Rank of each host's member of `rail` in torch's default process group.
        token: Unique id of the group, equal on all ranks; "" on one host.
    """

    ranks: tuple[tuple[int, ...], ...]
    names: tuple[str, ...] = ("",)
    index: int = 0
    rail: dist.ProcessGroup | None = None
    rail_peers: tuple[int, ...] = ()
    token: str = ""

    def require_rail(self) -> dist.ProcessGroup:
        """Return `rail`, or raise InvalidArgument on one host."""
        if self.rail is None:
            raise InvalidArgument("this group is on one host and has no rail to other hosts")
        return self.rail

    def host_name(self, host: int) -> str:
        """Return the name of a host for errors."""
        return f"host {host}" + (f" ({self.names[host]})" if self.names[host] else "")


@dataclass(slots=True)
class _HostGroups:
    """Process groups for the hosts of a process group, shared by all weft groups created from it.

    They are never destroyed before the process group itself: torch would reuse their names and
    then connect to the addresses of the old groups.
    """

    serial: int
    ranks: tuple[tuple[int, ...], ...]
    shared: dist.ProcessGroup
    rail: dist.ProcessGroup


_host_groups: WeakKeyDictionary[dist.ProcessGroup, _HostGroups] = WeakKeyDictionary()
_broken_rails: WeakSet[dist.ProcessGroup] = WeakSet()  # aborted, never used again


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return `device` with its index, or the default: the current GPU, else the CPU.

    Raises:
        InvalidArgument: weft does not support the device.
    """
    try:
        if device is not None and not isinstance(device, str | torch.device):
            raise RuntimeError  # torch accepts a bare number as a GPU of any kind
        parsed = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise InvalidArgument(
            f'device is {format_value(device)}: weft supports "cpu", "cuda" and "cuda:0", "cuda:1" '
            "..."
        ) from error
    if parsed is None and not torch.cuda.is_available():
        return torch.device("cpu")
    without_index = parsed is not None and parsed.type == "cuda" and parsed.index is None
    if without_index and torch.version.cuda is None:
        raise InvalidArgument(
            f"device is {format_value(device)}, but this torch, {torch.__version__}, is built "
            "without "
            'CUDA: use "cpu", or install a torch for CUDA'
        )
    if parsed is None or without_index:
        return torch.device("cuda", torch.cuda.current_device())
    if parsed.type not in ("cpu", "cuda"):
        raise InvalidArgument(f'device is {format_value(device)}: weft supports "cpu" and "cuda"')
    return parsed


def get_host_identity() -> dict[str, JSON]:
    """Return this host's name, boot id (shared by all its containers) and network namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    network = os.readlink("/proc/self/ns/net")
    return {"host": socket.gethostname(), "boot": boot, "network": network}


def connect_machine(
    exchange: Exchange, rank: int, size: int, device: str, timeout: float
) -> ControlPlane:
    """Connect ranks of one machine that can already exchange small values. Collective.

    Args:
        exchange: Returns the value of every rank, in rank order.
        rank: Rank of this process.
        size: Number of ranks.
        device: Kind of memory, "cpu" or "cuda".
        timeout: Seconds for the rendezvous.

    Raises:
        RendezvousFailed: the ranks are on several machines, or a rank does not connect.
    """
    own, problem = None, None
    if rank == 0:
        try:
            own = Meeting.open()
        except RendezvousFailed as error:
            problem = f"rank 0: {error}"
    try:
        with Peers() as peers:
            address = None if own is None else own.address
            reports = exchange(
                {
                    **get_host_identity(),
                    **process_identity(),
                    "meeting": address,
                    "problem": problem,
                }
            )
            meeting = own or _parse_meeting(reports)
            _check_one_machine(reports)
            for peer, report in enumerate(reports):
                if peer != rank:
                    peers.watch(peer, report)
            return meet(meeting, rank=rank, size=size, device=device, timeout=timeout, peers=peers)
    except BaseException as error:
        if own is not None:
            own.close(str(error))
        raise


def _check_one_machine(reports: list[Any]) -> None:
    """Raise the same RendezvousFailed on every rank unless all ranks are on one machine."""
    _check_reports(reports, ("host", "boot", "network"))
    first = reports[0]
    for rank, report in enumerate(reports):
        if report["boot"] != first["boot"]:
            raise RendezvousFailed(
                f"the ranks are on several hosts: rank 0 on {_describe(first)}, rank {rank} on "
                f"{_describe(report)}. Shared memory needs one host: call init_process_group "
                "and weft.Group.from_torch(), which supports several hosts"
            )
        if report["network"] != first["network"]:
            raise RendezvousFailed(
                f"rank 0 on {_describe(first)} is in network namespace "
                f"{sanitize_text(first['network'])}, rank {rank} on {_describe(report)} in "
                f"{sanitize_text(report['network'])}: ranks meet over Unix sockets of one network "
                "namespace; let their containers share one (a pod, or --network=host)"
            )


def _check_reports(reports: list[Any], names: Sequence[str]) -> None:
    """Raise RendezvousFailed unless every report has a string for each of `names`."""
    for rank, report in enumerate(reports):
        if not isinstance(report, dict) or not all(
            isinstance(report.get(name), str) for name in names
        ):
            raise RendezvousFailed(
                f"rank {rank} did not report where it runs but sent {report!r:.200}: it runs "
                "another version of weft, or another program wrote in its place"
            )


def _parse_meeting(reports: list[Any]) -> Meeting:
    first = reports[0] if isinstance(reports[0], dict) else {}
    if first.get("problem") is not None:
        raise RendezvousFailed(sanitize_text(first["problem"]))
    address = first.get("meeting")
    try:
        return Meeting.from_address(address if isinstance(address, str) else "")
    except InvalidArgument as error:
        raise RendezvousFailed(
            f"rank 0 did not send a meeting address: {sanitize_text(str(error))}. It runs another "
            "version of weft, or another program wrote in its place"
        ) from error


def _describe(report: dict[str, Any]) -> str:
    return f"{sanitize_text(report['host'])} (boot {sanitize_text(report['boot'])[:8]})"


def report_location(process_group: dist.ProcessGroup, device: torch.device) -> dict[str, JSON]:
    """Return the machine, device kind and existing rails of this rank, for `group_by_machine`.

    `rails` is the serial number of this rank's process groups for `process_group`, or 0 if none.
    """
    groups = _host_groups.get(process_group)
    return {
        **get_host_identity(),
        "part": os.environ.get(HOST, ""),
        "device": device.type,
        "token": secrets.token_hex(8),
        "rails": 0 if groups is None or groups.rail in _broken_rails else groups.serial,
    }


def group_by_machine(reports: list[Any]) -> list[list[int]]:
    """Return the ranks of each machine, from every rank's `report_location`.

    Raises:
        RendezvousFailed: a report is malformed, or ranks have devices of different kinds.
    """
    machines: dict[tuple[str, str], list[int]] = {}
    _check_reports(reports, ("host", "boot", "part", "device", "token"))
    for rank, report in enumerate(reports):
        if report["device"] != reports[0]["device"]:  # their next collectives would differ
            kinds = [sanitize_text(reports[r]["device"]) for r in (0, rank)]
            raise RendezvousFailed(
                f"rank 0 has its memory on {kinds[0]} and rank {rank} on {kinds[1]}: pass devices "
                "of one kind on all ranks"
            )
        machines.setdefault((report["boot"], report["part"]), []).append(rank)
    return list(machines.values())


def group_by_host(
    reports: list[Any], reachable: Sequence[Collection[int]]
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Return the ranks of each host, and the name of each host.

    Machines form one host if each rank can map memory of every other machine and they have the
    same WEFT_HOST. Every host needs the same number of ranks, since a rank sends to the ranks with
    its local rank on the other hosts.

    Args:
        reports: Every rank's `report_location`.
        reachable: For each rank, the first ranks of the machines whose memory it can map.

    Raises:
        RendezvousFailed: hosts have different numbers of ranks.
    """

    def can_map(machine: list[int], other: list[int]) -> bool:
        same_part = reports[machine[0]]["part"] == reports[other[0]]["part"]
        return same_part and all(other[0] in reachable[rank] for rank in machine)

    hosts: list[list[list[int]]] = []  # machines of each host
    for machine in group_by_machine(reports):
        for host in hosts:
            fits = len(machine) + sum(map(len, host)) <= MAX_RANKS
            if fits and all(can_map(machine, peer) and can_map(peer, machine) for peer in host):
                host.append(machine)
                break
        else:
            hosts.append([machine])
    ranks = tuple(tuple(sorted(itertools.chain(*host))) for host in hosts)
    names = tuple(_format_host_name(reports, host) for host in hosts)
    for name, host_ranks in zip(names, ranks, strict=True):
        if len(host_ranks) != len(ranks[0]):
            raise RendezvousFailed(
                f"host {names[0]} has {len(ranks[0])} ranks and host {name} has {len(host_ranks)}: "
                "start the same number of ranks on every host (torchrun --nproc-per-node), or "
                "create a group of hosts with equal numbers"
            )
    return ranks, names


def _format_host_name(reports: list[Any], machines: list[list[int]]) -> str:
    first = reports[machines[0][0]]
    others = f" and {len(machines) - 1} more" if len(machines) > 1 else ""
    return sanitize_text(first["part"] or first["host"]) + others


def open_process_groups(
    parent: dist.ProcessGroup,
    ranks: tuple[tuple[int, ...], ...],
    rank: int,
    reports: list[Any],
    timeout: float,
    *,
    use_gpus: bool,
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Open the process groups of this rank's host and of its rail. Collective.

    Process groups that all ranks still have are reused.

    Args:
        parent: Process group of all ranks.
        ranks: Ranks of each host.
        rank: Rank of this process.
        reports: Every rank's `report_location`.
        timeout: Seconds for torch.distributed.
        use_gpus: Whether the ranks' memory is on GPUs.

    Returns:
        The process group of the host, and that of the rail.

    Raises:
        RuntimeError: torch.distributed failed.
    """
    serials = [report["rails"] for report in reports]
    groups = _host_groups.get(parent)
    if groups is not None and groups.ranks == ranks and set(serials) == {groups.serial}:
        return groups.shared, groups.rail
    world = dist.get_process_group_ranks(parent)
    host = next(host_ranks for host_ranks in ranks if rank in host_ranks)
    local_rank = host.index(rank)
    limit = timedelta(seconds=timeout)

    def new_group(members: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        # Only the members call: `parent` need not be torch's whole world.
        return dist.new_group(  # type: ignore[no-any-return]
            [world[r] for r in members],
            timeout=limit,
            backend=backend,
            use_local_synchronization=True,
        )

    shared = new_group(host)
    # Otherwise NCCL's watchdog ends the process where weft raises an error.
    with default_env_var("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        rail = new_group([host[local_rank] for host in ranks], "nccl" if use_gpus else "gloo")
    _host_groups[parent] = _HostGroups(1 + max(serials), ranks, shared, rail)
    return shared, rail


def abort_rail(rail: dist.ProcessGroup) -> None:
    """Abort the exchanges of a rail, so that ranks that wait in them raise at once."""
    _broken_rails.add(rail)
    if dist.get_backend(rail) != "gloo":
        for device in rail._device_types:
            rail._get_backend(device).abort()
        return
    # Gloo's abort does nothing (torch 2.13); an overdue receive closes its connections.
    peer = (dist.get_rank(rail) + 1) % dist.get_world_size(rail)
    buffer = [torch.empty(1, dtype=torch.uint8, device="cpu")]
    with contextlib.suppress(RuntimeError):  # the receive is overdue, or the rail is closed
        rail.recv(buffer, peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
