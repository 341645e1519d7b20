# SPDX-License-Identifier: Apache-2.0
"""Leases: workspaces that are shared by layers of equal sizes.

An engine creates one operator per layer, but its layers run one after the other. With `lease`,
operators of the same sizes use the same symmetric memory. Only the sequence of calls determines
which call allocates and which call frees it, so these are the same calls on every rank, as
collective creation requires.
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

from weft.arguments import check_callable, format_value
from weft.errors import InvalidArgument, OutOfOrder, WeftError
from weft.group import Group
from weft.group.messages import Creation
from weft.keywords import bind
from weft.moe import MoE
from weft.runtime.check import check_group
from weft.runtime.operator import Operator, run_all

# Arguments that may differ between layers of one workspace. Only the number of replicas must match.
PER_LAYER_ARGUMENTS = ("weights", "shared", "correction", "replicas")


class Leasable(Protocol):
    """Operator or layer that leases can share."""

    def check_open(self) -> None: ...
    def close(self) -> None: ...


T = TypeVar("T", bound=Leasable)


@dataclass(eq=False)
class _LeasedOperator(Generic[T]):
    operator: T
    creation: Creation | None = None
    num_users: int = 0


# Weak references: an operator is garbage-collected together with its leases.
_ByKey = WeakValueDictionary[Hashable, _LeasedOperator[Any]]
_leases_by_group: WeakKeyDictionary[Group, _ByKey] = WeakKeyDictionary()


class Lease(Generic[T]):
    """One layer's use of a shared workspace; a context manager that returns the operator.

    Attributes:
        operator: Operator to call: the shared one or, with MoE, a sibling layer.
    """

    def __init__(
        self,
        operator: T,
        key: Hashable,
        shared: _LeasedOperator[T],
        group: Group,
        creation: Creation | None = None,
    ) -> None:
        self.operator = operator
        self._creation = creation
        self._key, self._shared, self._group = key, shared, group
        self._open = True
        shared.num_users += 1

    def close(self) -> None:
        """Release the lease; the last release frees the memory. Local and idempotent."""
        if not self._open:
            return
        self._open = False
        self._shared.num_users -= 1
        if self._creation is not None:
            self._creation.mark_closed()
        if not self._shared.num_users:
            by_key = _leases_by_group.get(self._group)
            if by_key is not None and by_key.get(self._key) is self._shared:
                del by_key[self._key]
            run_all(self.operator.close, self._shared.operator.close)
        elif isinstance(self.operator, MoE):
            self.operator.close()

    def __enter__(self) -> T:
        return self.operator

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(WeftError):  # the caller's own error takes precedence
            self.close()


def lease(group: Group, kind: type[T], *args: Any, **options: Any) -> Lease[T]:
    """Return `kind(group, *args, **options)`, shared by all layers that lease the same sizes.

    Layers that share must run one after the other, in the same order on every rank. Collective:
    every rank makes the same sequence of leases and closes.

    Args:
        group: Ranks of the job.
        kind: AllToAll, LowLatencyAllToAll, AllReduce or MoE. Each MoE layer has its own weights,
            shared expert, correction and placement of replicas (`MoE.sibling`).
        *args: Further arguments of `kind`.
        **options: Options of `kind`.

    Returns:
        The lease. Call its `operator`.

    Raises:
        InvalidArgument: an option cannot be compared. Errors of `kind` are raised too.
    """
    check_group(group)
    check_callable("kind", kind, "such as weft.AllToAll")
    bound = bind(kind, kind.__name__, (group, *args), options)
    bound.apply_defaults()
    sizes = {name: value for name, value in bound.arguments.items() if name != "group"}
    key = (kind, *(_argument_key(kind, name, value) for name, value in sizes.items()))
    by_key = _leases_by_group.setdefault(group, WeakValueDictionary())
    shared = by_key.get(key)
    if shared is not None and not _is_open(shared.operator):
        shared = None
    first = shared is None
    if shared is None:
        shared = by_key[key] = _create_shared(group, kind, bound)
    if isinstance(shared.operator, Operator):
        with group.creation(workspace=shared.creation) as creation:
            view = shared.operator.create_lease_view()
            creation.add(view)
        return Lease(view, key, shared, group, creation)
    if first or not issubclass(kind, MoE):
        return Lease(shared.operator, key, shared, group)
    own = {name: sizes[name] for name in PER_LAYER_ARGUMENTS}
    return Lease(shared.operator.sibling(**own), key, shared, group)


def _create_shared(
    group: Group, kind: type[T], bound: inspect.BoundArguments
) -> _LeasedOperator[T]:
    if not (isinstance(kind, type) and issubclass(kind, Operator)):
        return _LeasedOperator(kind(*bound.args, **bound.kwargs))  # MoE records its creation itself
    with group.creation(is_workspace=True) as creation:
        return _LeasedOperator(kind(*bound.args, **bound.kwargs), creation)


def _is_open(operator: Leasable) -> bool:
    """Whether the memory is open. Other layers may share the memory of a closed MoE layer."""
    try:
        (operator.exchange if isinstance(operator, MoE) else operator).check_open()
    except OutOfOrder:
        return False
    return True


def _argument_key(kind: type[Any], name: str, value: Any) -> Hashable:
    """Return the part of an argument that two leases must have in common."""
    if kind is MoE and name in PER_LAYER_ARGUMENTS:
        return name, None if name != "replicas" or value is None else len(value.logical)
    return name, _freeze(name, value)


def _freeze(name: str, value: Any) -> Hashable:
    """Convert a value to a hashable key.

    The key of a bool or float includes the type, because `kind` may reject 4.0 or True but accept
    the equal 4 or 1. Integers of any type are equal, as in every check (weft/arguments.py).
    """
    try:
        if isinstance(value, torch.Tensor):
            return _freeze(name, value.tolist()) if value.dim() else (torch.Tensor, value.item())
        if isinstance(value, list | tuple):
            return tuple(_freeze(name, item) for item in value)
        if isinstance(value, bool | float):
            return type(value), value
        if hasattr(value, "__index__"):
            return operator.index(value)
        hash(value)
    except (TypeError, RuntimeError) as error:
        raise InvalidArgument(
            f"{name} is {format_value(value)}, which is not hashable, so leases cannot be compared "
            "by it; construct the operator directly, or pass a hashable value"
        ) from error
    key: Hashable = value
    return key
