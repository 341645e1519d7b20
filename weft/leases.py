# SPDX-License-Identifier: Apache-2.0
"""Layers of equal sizes share one workspace, because they run one after the other.

An engine makes one operator for each of its layers. With `lease` all that ask for the same sizes
get the same symmetric memory. Which call makes it and which gives it back follows from the sequence
of calls alone, so it is the same on every rank, as collective creation needs.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from weft.arguments import function, shown
from weft.errors import InvalidArgument, OutOfOrder, WeftError
from weft.keywords import bind
from weft.memory import Group
from weft.memory.messages import Creation
from weft.moe import MoE
from weft.runtime.check import check_group
from weft.runtime.operator import Operator, call_all

# What layers of one workspace differ in; of the replicas only their number is the workspace's.
OF_A_LAYER = ("weights", "shared", "correction", "replicas")


class Leasable(Protocol):
    """What a lease can share: an operator, or a layer."""

    def _check_open(self) -> None: ...
    def close(self) -> None: ...


T = TypeVar("T", bound=Leasable)


@dataclass(eq=False)
class _Shared(Generic[T]):
    operator: T
    creation: Creation | None = None
    users: int = 0


# Weakly, so that operators whose leases are all forgotten go as those that were never leased do.
_Known = WeakValueDictionary[Hashable, _Shared[Any]]
_of_group: WeakKeyDictionary[Group, _Known] = WeakKeyDictionary()


class Lease(Generic[T]):
    """Hold one layer's part in a shared workspace; a context manager that returns the operator.

    Attributes:
        operator: Operator to call: the shared one, or with MoE a layer of its own.
    """

    def __init__(
        self,
        operator: T,
        key: Hashable,
        shared: _Shared[T],
        group: Group,
        creation: Creation | None = None,
    ) -> None:
        self.operator = operator
        self._creation = creation
        self._key, self._shared, self._group = key, shared, group
        self._open = True
        shared.users += 1

    def close(self) -> None:
        """Give the part back; the last one frees the memory. Local and idempotent."""
        if not self._open:
            return
        self._open = False
        self._shared.users -= 1
        if self._creation is not None:
            self._creation.end()
        if not self._shared.users:
            known = _of_group.get(self._group)
            if known is not None and known.get(self._key) is self._shared:
                del known[self._key]
            call_all(self.operator.close, self._shared.operator.close)
        elif isinstance(self.operator, MoE):
            self.operator.close()

    def __enter__(self) -> T:
        return self.operator

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(WeftError):  # the caller has an error of its own
            self.close()


def lease(group: Group, kind: type[T], *args: Any, **options: Any) -> Lease[T]:
    """Return `kind(group, *args, **options)`, shared by all layers that ask for the same sizes.

    Layers that share must run one after the other, in the same order on every rank. Collective:
    every rank makes the same sequence of leases and closes.

    Args:
        group: Ranks of the job.
        kind: AllToAll, LowLatencyAllToAll, AllReduce or MoE. MoE layers have weights, a shared
            expert, a correction and a placement of replicas of their own (`MoE.sibling`).
        *args: Further arguments of `kind`.
        **options: Options of `kind`.

    Returns:
        The lease. Call its `operator`.

    Raises:
        InvalidArgument: an option cannot be compared. Errors of `kind` are raised too.
    """
    check_group(group)
    function("kind", kind, "such as weft.AllToAll")
    bound = bind(kind, kind.__name__, (group, *args), options)
    bound.apply_defaults()
    sizes = {name: value for name, value in bound.arguments.items() if name != "group"}
    key = (kind, *(_key(kind, name, value) for name, value in sizes.items()))
    known = _of_group.setdefault(group, WeakValueDictionary())
    shared = known.get(key)
    if shared is not None and not _serves(shared.operator):
        shared = None
    first = shared is None
    if shared is None:
        shared = known[key] = _open(group, kind, bound)
    if isinstance(shared.operator, Operator):
        with group.creation(workspace=shared.creation) as creation:
            view = shared.operator._leased()
            creation.add(view)
        return Lease(view, key, shared, group, creation)
    if first or not issubclass(kind, MoE):
        return Lease(shared.operator, key, shared, group)
    own = {name: sizes[name] for name in OF_A_LAYER}
    return Lease(shared.operator.sibling(**own), key, shared, group)


def _open(group: Group, kind: type[T], bound: inspect.BoundArguments) -> _Shared[T]:
    """Make what leases share. A layer notes its own workspace for new processes."""
    if not (isinstance(kind, type) and issubclass(kind, Operator)):
        return _Shared(kind(*bound.args, **bound.kwargs))
    with group.creation(is_workspace=True) as creation:
        return _Shared(kind(*bound.args, **bound.kwargs), creation)


def _serves(operator: Leasable) -> bool:
    """Whether the memory is open; a layer's outlives the layer while it has siblings."""
    try:
        (operator.exchange if isinstance(operator, MoE) else operator)._check_open()
    except OutOfOrder:
        return False
    return True


def _key(kind: type[Any], name: str, value: Any) -> Hashable:
    """What two leases compare of an argument."""
    if kind is MoE and name in OF_A_LAYER:
        return name, None if name != "replicas" or value is None else len(value.logical)
    return name, _frozen(name, value)


def _frozen(name: str, value: Any) -> Hashable:
    """A value as a key, with its type where equal values of other types may be refused: 4.0, True.

    Integers of any type are equal, as in every check (weft/arguments.py).
    """
    try:
        if isinstance(value, torch.Tensor):
            return _frozen(name, value.tolist()) if value.dim() else (torch.Tensor, value.item())
        if isinstance(value, list | tuple):
            return tuple(_frozen(name, each) for each in value)
        if isinstance(value, bool | float):
            return type(value), value
        if hasattr(value, "__index__"):
            return operator.index(value)
        hash(value)
    except (TypeError, RuntimeError) as error:
        raise InvalidArgument(
            f"{name} is {shown(value)}, by which leases cannot be compared; make the operator "
            "itself, or pass a hashable value"
        ) from error
    found: Hashable = value
    return found
