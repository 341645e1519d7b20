"""Which ranks exchange tokens: from a mapping, a communication backend, torch or the environment.

Engines make one all-to-all for each layer. The group that is found for them is made once and
counted, so that sixty layers share one set of sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from weft.arguments import instance, integer, shown
from weft.errors import InvalidArgument
from weft.memory import Group
from weft.memory.discovery import Exchange, default_device, find

TIMEOUT = 120.0  # seconds for ranks to meet, and for each control message after it


class EpMapping(Protocol):
    """What is read of a mapping: this rank's place among the ranks that share the experts."""

    @property
    def moe_ep_rank(self) -> int: ...
    @property
    def moe_ep_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a caller that says it in two numbers."""

    moe_ep_rank: int
    moe_ep_size: int


class CommBackend(Protocol):
    """What is used of a configuration's comm_backend; mpi4py communicators fit as well."""

    def Get_rank(self) -> int: ...
    def Get_size(self) -> int: ...
    def allgather(self, data: Any) -> list[Any]: ...


@dataclass(slots=True)
class _Made:
    group: Group
    users: int = 0


_made: dict[tuple[Any, ...], _Made] = {}


def place(mapping: EpMapping) -> tuple[int, int]:
    """(rank, size) of a mapping. Raises InvalidArgument naming what it lacks."""
    for name in ("moe_ep_rank", "moe_ep_size"):
        if not hasattr(mapping, name):
            raise InvalidArgument(
                f"mapping is {shown(mapping)} and {name} is missing; pass an object with integers "
                "moe_ep_rank and moe_ep_size"
            )
    size = integer("mapping.moe_ep_size", mapping.moe_ep_size, 1, 1 << 16)
    return integer("mapping.moe_ep_rank", mapping.moe_ep_rank, 0, size - 1), size


def lease_group(mapping: EpMapping, config: Any, given: Group | None) -> Group:
    """The group that a mapping means; collective when it is new.

    In this order: `given`; a group of one rank; config.comm_backend; the world of
    torch.distributed; torchrun's environment. A group that is not `given` is shared by all callers
    in this process with the same place, until each has called `release_group`.

    Raises InvalidArgument when the ranks found are not those of the mapping.
    """
    rank, size = place(mapping)
    if given is not None:
        instance("group", given, Group, "weft.launch, Group.from_env() or from_torch() makes one")
        _compare(rank, size, given.rank, given.size, "group")
        return given.one_host("this workspace")
    key = (rank, size, *getattr(mapping, "moe_ep_group", ()))
    if key not in _made:
        _made[key] = _Made(_make(rank, size, getattr(config, "comm_backend", None)))
    _made[key].users += 1
    return _made[key].group


def release_group(group: Group) -> bool:
    """Give back what `lease_group` made; the last user closes it. Local. False for another's."""
    for key, made in list(_made.items()):
        if made.group is group:
            made.users -= 1
            if not made.users:
                del _made[key]
                group.close()
            return True
    return False


def _make(rank: int, size: int, comm: CommBackend | None) -> Group:
    if comm is not None:
        _compare(rank, size, comm.Get_rank(), comm.Get_size(), "mnnvl_config.comm_backend")
        return _meet(comm.allgather, rank, size)
    if size == 1:
        return _meet(lambda value: [value], rank, size)
    if dist.is_initialized():
        world = dist.get_rank(), dist.get_world_size()
        _compare(rank, size, *world, "the world of torch.distributed")
        return Group.from_torch(timeout=TIMEOUT).one_host("this workspace")
    group = Group.from_env(timeout=TIMEOUT)
    try:
        _compare(rank, size, group.rank, group.size, "the environment (RANK, WORLD_SIZE)")
    except InvalidArgument:
        group.close()
        raise
    return group


def _meet(exchange: Exchange, rank: int, size: int) -> Group:
    device = default_device(None)
    control = find(exchange, rank, size, device.type, TIMEOUT)
    return Group(control, device=device, timeout=TIMEOUT)


def _compare(rank: int, size: int, found_rank: int, found_size: int, where: str) -> None:
    if (rank, size) != (found_rank, found_size):
        raise InvalidArgument(
            f"the call says rank {rank} of {size}, but {where} is rank {found_rank} of "
            f"{found_size}; pass group=weft.Group.from_torch(process_group) with the process group "
            "of the ranks that take part, in the call's order"
        )
