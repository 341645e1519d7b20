# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a torch process group share a host, and the process groups between hosts.

Ranks share a host where they have one boot id and one WEFT_HOST, so containers of one machine are
one host unless they are told apart. Machines of one NVLink domain, whose GPUs can map each other's
memory, are one host, too. Everything travels through the process group.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from weft.errors import RendezvousFailed
from weft.group.discovery import check_said, this_host
from weft.group.torch_groups import unless_set
from weft.group.wire import JSON, text_of
from weft.shape import MAX_RANKS

if TYPE_CHECKING:
    from weft.group.group import Group

HOST = "WEFT_HOST"
_NO_MESSAGE = (1 << 31) - 1  # a tag that nobody sends


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a group.

    ranks: of each host, ascending; hosts in the order of their first ranks.   names: host names.
    index: this rank's host.   local: the group of this host.
    rail: the process group of the ranks that have this one's place on each host, by rank.
    peers: of each host, the rank of that process group as the default group numbers it.
    token: a word that no other group has, equal on all ranks.
    """

    ranks: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    index: int
    local: Group
    rail: dist.ProcessGroup
    peers: tuple[int, ...]
    token: str

    def close(self, why: str | None) -> None:
        """Leave the group of this host; for an error, break the rail: who waits there is told."""
        self.local._leave(why)
        if why is not None:
            break_rail(self.rail)


@dataclass(slots=True)
class _Opened:
    """The process groups that a process group has for its hosts, for all weft groups made of it.

    Torch takes the name of one that was destroyed again, and then reads the old one's addresses, so
    none is destroyed before the caller destroys all.
    """

    serial: int
    ranks: tuple[tuple[int, ...], ...]
    shared: dist.ProcessGroup
    rail: dist.ProcessGroup


_opened: WeakKeyDictionary[dist.ProcessGroup, _Opened] = WeakKeyDictionary()
_broken: WeakSet[dist.ProcessGroup] = WeakSet()  # rails that no exchange can use again


def break_rail(rail: dist.ProcessGroup) -> None:
    """End what runs on a rail, and let the ranks that wait there know at once."""
    _broken.add(rail)
    if dist.get_backend(rail) != "gloo":
        for device in rail._device_types:
            rail._get_backend(device).abort()
        return
    # Gloo's abort does nothing (torch 2.13); a receive that is overdue closes its connections.
    peer = (dist.get_rank(rail) + 1) % dist.get_world_size(rail)
    nothing = [torch.empty(1, dtype=torch.uint8, device="cpu")]
    with contextlib.suppress(RuntimeError):  # that it is overdue, or that they are closed
        rail.recv(nothing, peer, _NO_MESSAGE).wait(timedelta(milliseconds=1))


def whereabouts(whole: dist.ProcessGroup, device: torch.device) -> dict[str, JSON]:
    """Where this process runs, with memory on `device`.

    rails: the number of the process groups that it has for the hosts of `whole`; 0 for none.
    """
    found = _opened.get(whole)
    return {
        **this_host(),
        "part": os.environ.get(HOST, ""),
        "device": device.type,
        "token": secrets.token_hex(8),
        "rails": 0 if found is None or found.rail in _broken else found.serial,
    }


def by_machine(said: list[Any]) -> list[list[int]]:
    """The ranks of each machine, from every rank's `whereabouts`. Raises RendezvousFailed."""
    found: dict[tuple[str, str], list[int]] = {}
    check_said(said, ("host", "boot", "part", "device", "token"))
    for rank, each in enumerate(said):
        if each["device"] != said[0]["device"]:  # they would not take the same steps from here on
            kinds = [text_of(said[r]["device"]) for r in (0, rank)]
            raise RendezvousFailed(
                f"rank 0 has its memory on {kinds[0]} and rank {rank} on {kinds[1]}: pass devices "
                "of one kind on all ranks"
            )
        found.setdefault((each["boot"], each["part"]), []).append(rank)
    return list(found.values())


def by_host(
    said: list[Any], reached: Sequence[Collection[int]]
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """(ranks, name) of each host, from every rank's `whereabouts`. Raises RendezvousFailed.

    reached: of each rank, the first ranks of the machines whose memory it can map. Machines of
    which every rank can map every other's are one host, where they have one WEFT_HOST.
    Every host must have as many ranks: each sends to the one that has its place on another.
    """

    def reach(machine: list[int], other: list[int]) -> bool:
        one_part = said[machine[0]]["part"] == said[other[0]]["part"]
        return one_part and all(other[0] in reached[rank] for rank in machine)

    hosts: list[list[list[int]]] = []  # the machines of each
    for machine in by_machine(said):
        for host in hosts:
            fits = len(machine) + sum(map(len, host)) <= MAX_RANKS
            if fits and all(reach(machine, each) and reach(each, machine) for each in host):
                host.append(machine)
                break
        else:
            hosts.append([machine])
    ranks = tuple(tuple(sorted(itertools.chain(*host))) for host in hosts)
    names = tuple(_name(said, host) for host in hosts)
    for name, each in zip(names, ranks, strict=True):
        if len(each) != len(ranks[0]):
            raise RendezvousFailed(
                f"host {names[0]} has {len(ranks[0])} ranks and host {name} has {len(each)}: "
                "every host must have as many; start the same number on each (torchrun "
                "--nproc-per-node), or make a group of the hosts that have as many"
            )
    return ranks, names


def _name(said: list[Any], machines: list[list[int]]) -> str:
    first = said[machines[0][0]]
    others = f" and {len(machines) - 1} more" if len(machines) > 1 else ""
    return text_of(first["part"] or first["host"]) + others


def open_process_groups(
    whole: dist.ProcessGroup,
    ranks: tuple[tuple[int, ...], ...],
    rank: int,
    said: list[Any],
    timeout: float,
    *,
    gpus: bool,
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The process groups of this rank's host, and of its rail. Collective. Raises RuntimeError.

    said: every rank's `whereabouts`. What all of them still have is used again.
    """
    serials = [each["rails"] for each in said]
    found = _opened.get(whole)
    if found is not None and found.ranks == ranks and set(serials) == {found.serial}:
        return found.shared, found.rail
    world = dist.get_process_group_ranks(whole)
    host = next(each for each in ranks if rank in each)
    place = host.index(rank)
    limit = timedelta(seconds=timeout)

    def group(members: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        # Made by its members alone: the process group need not be the whole world.
        return dist.new_group(  # type: ignore[no-any-return]
            [world[r] for r in members],
            timeout=limit,
            backend=backend,
            use_local_synchronization=True,
        )

    shared = group(host)
    # NCCL's watchdog would end the process where weft raises an error.
    with unless_set("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        rail = group([each[place] for each in ranks], "nccl" if gpus else "gloo")
    _opened[whole] = _Opened(1 + max(serials), ranks, shared, rail)
    return shared, rail
