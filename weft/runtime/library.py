# SPDX-License-Identifier: Apache-2.0
"""What torch.compile sees of weft: objects under numbers, and the order of what they do.

Every public class registers its object here, and has operations in torch's library that name it by
its number: AllToAll, LowLatencyAllToAll, AllReduce and MoE, each in the library.py of its room. A
compiler sees the sizes of what they return and nothing inside: tracing sends nothing and waits for
nobody.

Symmetric memory is state that a graph cannot see. Each operation that touches it therefore claims
to mutate `order`, one byte that all objects of a device share: that keeps calls in the order in
which they were written, also those of different objects, whose peers wait for each other; and it
keeps equal calls from being merged.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from weft.errors import OutOfOrder

P = ParamSpec("P")
R = TypeVar("R")

_live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_orders: weakref.WeakValueDictionary[torch.device, torch.Tensor] = weakref.WeakValueDictionary()
_making = threading.Lock()  # of an order: threads share that of their device
_handles = itertools.count(1)
SERIAL_BITS = 24  # of a handle: which object of this process


def register(owner: object, sizes: Mapping[str, object]) -> int:
    """Give an object the number by which compiled graphs name it; it is not kept alive by it.

    Its sizes are in it: inductor keeps graphs on disk, with the shapes that this number had in the
    process that compiled them.
    """
    text = json.dumps([type(owner).__name__, dict(sizes)], sort_keys=True, default=str)
    named = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    handle = named << SERIAL_BITS | next(_handles)
    _live[handle] = owner
    return handle


def forget(handle: int) -> None:
    """Compiled graphs may not use this number any more."""
    _live.pop(handle, None)


def find(handle: int) -> Any:
    """The object of a number. Raises OutOfOrder when it was closed."""
    owner = _live.get(int(handle))  # a traced integer is no key
    if owner is None:
        raise OutOfOrder(
            f"the object that a compiled graph calls, number {handle}, was closed; make a new one, "
            "and compile with that"
        )
    return owner


def order_of(device: torch.device) -> torch.Tensor:
    """The byte that orders a device's calls; any caller that registers keeps it."""
    with _making:
        order = _orders.get(device)
        if order is None:
            with torch.inference_mode(False):  # else graphs outside of it could not mutate it
                order = torch.zeros(1, dtype=torch.uint8, device=device)
            mark_static(order)
            _orders[device] = order
        return order


def mark_static(tensor: torch.Tensor) -> None:
    """Promise compilers that a tensor stays where it is: CUDA graphs need no copy of it.

    This is torch._dynamo.mark_static_address(tensor, guard=False), without the seconds that
    importing torch._dynamo takes. Without the mark, graphs that mutate it are not captured.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


def untraced(call: Callable[P, R]) -> Callable[P, R]:
    """A call that compilers leave as it is: one graph ends before it, and the next begins after."""

    @wraps(call)
    def wrapped(*args: P.args, **given: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            # Made here, because torch.compiler.disable imports torch._dynamo, which takes seconds.
            whole: Callable[P, R] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
            return whole(*args, **given)
        return call(*args, **given)

    return wrapped


def plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor without its history: nothing here has a gradient, compiled or not."""
    return None if tensor is None else tensor.detach()
