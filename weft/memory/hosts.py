"""Which ranks of a torch process group share a host, and the process groups between hosts.

Ranks share a host where they have one boot id and one WEFT_HOST, so containers of one machine are
one host unless they are told apart. Everything travels through the process group.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from weft.errors import RendezvousFailed
from weft.memory.collective import destroy
from weft.memory.wire import JSON, text_of

if TYPE_CHECKING:
    from weft.memory.group import Group

HOST = "WEFT_HOST"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a group.

    ranks: of each host, ascending; hosts in the order of their first ranks.   names: host names.
    index: this rank's host.   local: the group of this host.
    rail: the process group of the ranks that have this one's place on each host, by host.
    token: a word that no other group has, equal on all ranks.
    """

    ranks: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    index: int
    local: Group
    rail: dist.ProcessGroup
    token: str

    def close(self, why: str | None) -> None:
        """Leave the group of this host, then break the rail: who waits for this rank is told."""
        shared = self.local.process_group()
        self.local._leave(why)
        destroy(self.rail)
        destroy(shared)


def whereabouts() -> dict[str, JSON]:
    """The host of this process: by its boot, because containers have host names of their own."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return {
        "host": socket.gethostname(),
        "boot": boot,
        "part": os.environ.get(HOST, ""),
        "token": secrets.token_hex(8),
    }


def by_host(said: list[Any]) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """(ranks, name) of each host, from every rank's `whereabouts`. Raises RendezvousFailed.

    Every host must have as many ranks: each sends to the one that has its place on another.
    """
    found: dict[tuple[str, str], list[int]] = {}
    names: dict[tuple[str, str], str] = {}
    for rank, each in enumerate(said):
        keys = ("host", "boot", "part", "token")
        if not isinstance(each, dict) or not all(isinstance(each.get(k), str) for k in keys):
            raise RendezvousFailed(
                f"rank {rank} was to send where it runs and sent {each!r:.200}: every rank must "
                "call Group.from_torch with this version of weft"
            )
        key = each["boot"], each["part"]
        found.setdefault(key, []).append(rank)
        names.setdefault(key, text_of(each["part"] or each["host"]))
    sizes = {key: len(ranks) for key, ranks in found.items()}
    first = next(iter(sizes))
    for key, size in sizes.items():
        if size != sizes[first]:
            raise RendezvousFailed(
                f"host {names[first]} has {sizes[first]} ranks and host {names[key]} has {size}: "
                "every host must have as many; start the same number on each (torchrun "
                "--nproc-per-node), or make a group of the hosts that have as many"
            )
    return tuple(tuple(ranks) for ranks in found.values()), tuple(names[key] for key in found)


def open_process_groups(
    whole: dist.ProcessGroup, ranks: tuple[tuple[int, ...], ...], rank: int, timeout: float
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The process groups of this rank's host, and of its rail. Collective. Raises RuntimeError."""
    world = dist.get_process_group_ranks(whole)
    host = next(each for each in ranks if rank in each)
    place = host.index(rank)
    limit = timedelta(seconds=timeout)

    def group(members: tuple[int, ...]) -> dist.ProcessGroup:
        # Made by its members alone: the process group need not be the whole world.
        return dist.new_group(  # type: ignore[no-any-return]
            [world[r] for r in members], timeout=limit, use_local_synchronization=True
        )

    return group(host), group(tuple(each[place] for each in ranks))
