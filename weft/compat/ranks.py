# SPDX-License-Identifier: Apache-2.0
"""Which ranks exchange tokens: from a mapping, a communication backend or torch.distributed.

Engines make one all-to-all for each layer. The group that is found for them is made once and
counted, so that sixty layers share one set of sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from weft.arguments import integer, refuse, shown
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


class CommBackend(Protocol):
    """What is used of a configuration's comm_backend; mpi4py communicators fit as well."""

    def Get_rank(self) -> int: ...
    def Get_size(self) -> int: ...
    def allgather(self, data: Any) -> list[Any]: ...


@dataclass(slots=True)
class _Made:
    group: Group
    users: set[object] = field(default_factory=set)


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


def lease_group(
    rank: int,
    size: int,
    given: Group | dist.ProcessGroup | None = None,
    comm: CommBackend | None = None,
    among: tuple[int, ...] = (),
) -> tuple[Group, Callable[[], None]]:
    """The group of ranks that a caller means, and what gives it back; collective when it is new.

    In this order: `given`; a group of one rank; `comm`; the world of torch.distributed.
    A group that is made here is shared by all callers in this process with the same
    place, `among` these ranks, until each has given it back.

    Raises InvalidArgument when the ranks found are not those of the call, or are on several hosts.
    """
    if isinstance(given, Group):
        _compare(rank, size, given.rank, given.size, "group")
        return given.one_host("this workspace"), lambda: None
    if given is not None and not isinstance(given, dist.ProcessGroup):
        refuse("group", given, "a weft.Group, which weft.launch makes, or a process group")
    key = (given, rank, size, *among)
    if key not in _made:
        _made[key] = _Made(_make(rank, size, given, comm))
    made, user = _made[key], object()
    made.users.add(user)

    def release() -> None:
        """Local and idempotent; the last user closes the group."""
        if user in made.users:
            made.users.remove(user)
            if not made.users:
                del _made[key]
                made.group.close()

    return made.group, release


def _make(rank: int, size: int, given: dist.ProcessGroup | None, comm: CommBackend | None) -> Group:
    # What is known is compared before ranks wait for each other: not all of them may have called.
    if given is None and comm is not None:
        _compare(rank, size, comm.Get_rank(), comm.Get_size(), "mnnvl_config.comm_backend")
        group = _meet(comm.allgather, rank, size)
    elif given is None and size == 1:
        group = _meet(lambda value: [value], rank, size)
    else:
        where = "the world of torch.distributed" if given is None else "group"
        if dist.is_initialized():  # else from_torch says what to do
            _compare(rank, size, dist.get_rank(given), dist.get_world_size(given), where)
        group = Group.from_torch(given, timeout=TIMEOUT)
    try:
        return group.one_host("this workspace")
    except InvalidArgument:
        group.close()
        raise


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
