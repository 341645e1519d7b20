# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks of a call: from a mapping, a communication backend or torch.distributed.

Engines construct one all-to-all per layer. Their group is created once and reference-counted, so
that all layers share one set of sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from weft.arguments import check_int, format_value, raise_invalid
from weft.errors import InvalidArgument
from weft.group import Group
from weft.group.hosts import Exchange, connect_machine, resolve_device

TIMEOUT = 120.0  # seconds for the rendezvous, and for each later control message


class EpMapping(Protocol):
    """Attributes of a mapping that weft reads: this rank's number among the EP ranks."""

    @property
    def moe_ep_rank(self) -> int: ...
    @property
    def moe_ep_size(self) -> int: ...


class CommBackend(Protocol):
    """Methods of a comm_backend that weft calls. mpi4py communicators have them as well."""

    def Get_rank(self) -> int: ...
    def Get_size(self) -> int: ...
    def allgather(self, data: Any) -> list[Any]: ...


@dataclass(slots=True)
class _SharedGroup:
    group: Group
    users: set[object] = field(default_factory=set)


_shared_groups: dict[tuple[Any, ...], _SharedGroup] = {}


def read_rank_and_size(mapping: EpMapping) -> tuple[int, int]:
    """Return a mapping's (rank, size).

    Raises InvalidArgument if an attribute is missing.
    """
    for name in ("moe_ep_rank", "moe_ep_size"):
        if not hasattr(mapping, name):
            raise InvalidArgument(
                f"mapping is {format_value(mapping)} and {name} is missing; pass an object with "
                "integers moe_ep_rank and moe_ep_size"
            )
    size = check_int("mapping.moe_ep_size", mapping.moe_ep_size, 1, 1 << 16)
    return check_int("mapping.moe_ep_rank", mapping.moe_ep_rank, 0, size - 1), size


def lease_group(
    rank: int,
    size: int,
    caller_group: Group | dist.ProcessGroup | None = None,
    comm: CommBackend | None = None,
    ranks: tuple[int, ...] = (),
) -> tuple[Group, Callable[[], None]]:
    """Return the group of a call's ranks, and a function that releases it. Collective if new.

    The group is, in this order: `caller_group`; a group of one rank; that of `comm`; the world of
    torch.distributed. A group that is created here is shared by all callers in this process with
    the same rank, size and `ranks`, until each has released it.

    Raises:
        InvalidArgument: If the group does not match rank and size, or spans several hosts.
    """
    if isinstance(caller_group, Group):
        _check_ranks(rank, size, caller_group.rank, caller_group.size, "group")
        return caller_group.require_one_host("this workspace"), lambda: None
    if caller_group is not None and not isinstance(caller_group, dist.ProcessGroup):
        raise_invalid(
            "group", caller_group, "a weft.Group, which weft.launch passes, or a process group"
        )
    key = (caller_group, rank, size, *ranks)
    if key not in _shared_groups:
        _shared_groups[key] = _SharedGroup(_create_group(rank, size, caller_group, comm))
    shared, user = _shared_groups[key], object()
    shared.users.add(user)

    def release() -> None:
        """Close the group if this is its last user. Local and idempotent."""
        if user in shared.users:
            shared.users.remove(user)
            if not shared.users:
                del _shared_groups[key]
                shared.group.close()

    return shared.group, release


def list_shared_groups() -> list[Group]:
    """Return the groups that `lease_group` created in this process and that are in use."""
    return [shared.group for shared in _shared_groups.values()]


def _create_group(
    rank: int, size: int, process_group: dist.ProcessGroup | None, comm: CommBackend | None
) -> Group:
    # Compare known sizes before waiting for other ranks: some ranks may not make this call.
    if process_group is None and comm is not None:
        _check_ranks(rank, size, comm.Get_rank(), comm.Get_size(), "mnnvl_config.comm_backend")
        group = _connect_group(comm.allgather, rank, size)
    elif process_group is None and size == 1:
        group = _connect_group(lambda value: [value], rank, size)
    else:
        source = "the world of torch.distributed" if process_group is None else "group"
        if dist.is_initialized():  # otherwise from_torch raises with a fix
            actual_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
            _check_ranks(rank, size, *actual_ranks, source)
        group = Group.from_torch(process_group, timeout=TIMEOUT)
    try:
        return group.require_one_host("this workspace")
    except InvalidArgument:
        group.close()
        raise


def _connect_group(exchange: Exchange, rank: int, size: int) -> Group:
    device = resolve_device(None)
    control = connect_machine(exchange, rank, size, device.type, TIMEOUT)
    return Group(control, device=device, timeout=TIMEOUT)


def _check_ranks(rank: int, size: int, actual_rank: int, actual_size: int, source: str) -> None:
    if (rank, size) != (actual_rank, actual_size):
        raise InvalidArgument(
            f"the call is for rank {rank} of {size}, but {source} is rank {actual_rank} of "
            f"{actual_size}; pass group=weft.Group.from_torch(process_group) with the process "
            "group of the participating ranks, in the order of the call"
        )
