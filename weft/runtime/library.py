# SPDX-License-Identifier: Apache-2.0
"""Support for torch.compile: handles of objects, and an order token for their calls.

The custom operators of AllToAll, LowLatencyAllToAll, AllReduce and MoE (compile.py of each package)
name an object by the handle under which it is registered here. A compiler sees only the sizes of
their outputs: tracing neither sends nor waits.

Symmetric memory is state that a graph cannot see. Each operator that touches it therefore declares
that it mutates `order`, one byte that all objects of a device share. This keeps all calls in
program order, including those of different objects, whose peers wait for each other, and prevents
equal calls from being merged.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from weft.errors import OutOfOrder
from weft.group import Group

P = ParamSpec("P")
R = TypeVar("R")

_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_order_tensors: weakref.WeakValueDictionary[torch.device, torch.Tensor] = (
    weakref.WeakValueDictionary()
)
_orders_lock = threading.Lock()
_serials = itertools.count(1)
SERIAL_BITS = 24  # low bits of a handle: serial number of the object in this process


class TracedObject(Protocol):
    """Interface of an object that compiled graphs call."""

    @property
    def order_tensor(self) -> torch.Tensor:
        """Tensor that orders the calls, see `get_order_tensor`."""

    @property
    def library_handle(self) -> int:
        """Handle of the object, see `register`."""


class TracedOperator(TracedObject, Protocol):
    """Interface of an operator that compiled graphs call."""

    @property
    def group(self) -> Group: ...

    @property
    def dtype(self) -> torch.dtype: ...


def register(owner: object, sizes: Mapping[str, object]) -> int:
    """Return a new handle by which compiled graphs name an object; holds a weak reference.

    The handle includes a hash of the sizes: inductor caches graphs on disk, and a graph that was
    compiled for other sizes must not match.
    """
    text = json.dumps([type(owner).__name__, dict(sizes)], sort_keys=True, default=str)
    sizes_hash = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    handle = sizes_hash << SERIAL_BITS | next(_serials)
    _owners[handle] = owner
    return handle


def unregister(handle: int) -> None:
    """Invalidate a handle."""
    _owners.pop(handle, None)


def lookup(handle: int) -> Any:
    """Return the object of a handle. Raises OutOfOrder if it was closed."""
    owner = _owners.get(int(handle))  # a traced integer cannot be a key
    if owner is None:
        raise OutOfOrder(
            f"the object that a compiled graph calls, number {handle}, was closed; create a new "
            "object and compile again"
        )
    return owner


def get_order_tensor(device: torch.device) -> torch.Tensor:
    """Return the byte that orders a device's calls; it lives as long as an object refers to it."""
    with _orders_lock:
        order = _order_tensors.get(device)
        if order is None:
            # Graphs outside of inference mode cannot mutate a tensor that was created inside it.
            with torch.inference_mode(False):
                order = torch.zeros(1, dtype=torch.uint8, device=device)
            mark_static(order)
            _order_tensors[device] = order
        return order


def mark_static(tensor: torch.Tensor) -> None:
    """Mark a tensor's address as constant, so that CUDA graphs do not copy it.

    Equivalent to torch._dynamo.mark_static_address(tensor, guard=False), without importing
    torch._dynamo, which takes seconds. Graphs that mutate an unmarked tensor are not captured.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


def disable_tracing(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that compilers call it without tracing it, with a graph break."""

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            # Not at import: torch.compiler.disable imports torch._dynamo, which takes seconds.
            opaque: Callable[P, R] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
            return opaque(*args, **kwargs)
        return call(*args, **kwargs)

    return wrapped


def detach(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor detached from autograd; weft computes no gradients."""
    return None if tensor is None else tensor.detach()
