"""The two operations as torch.library ops: opaque, ordered and unmergeable for torch.compile.

Symmetric memory is state that a graph cannot see. Each op therefore claims to mutate a one-element
tensor of its all-to-all, which keeps calls in order and keeps equal calls from being merged.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from typing import TYPE_CHECKING

import torch

from weft.errors import OutOfOrder

if TYPE_CHECKING:
    from weft.ops.alltoall import AllToAll

_live: weakref.WeakValueDictionary[int, AllToAll] = weakref.WeakValueDictionary()
_handles = itertools.count(1)
SERIAL_BITS = 24  # of a handle: which all-to-all of this process


def register(owner: AllToAll) -> int:
    """Give an all-to-all the number by which compiled graphs name it.

    Its sizes are in it: inductor keeps graphs on disk, with the shapes that this number had in the
    process that compiled them.
    """
    sizes = json.dumps(owner._geometry.manifest(), sort_keys=True)
    named = int.from_bytes(hashlib.sha256(sizes.encode()).digest()[:4], "big")
    handle = named << SERIAL_BITS | next(_handles)
    _live[handle] = owner
    return handle


def forget(handle: int) -> None:
    """Compiled graphs may not use this number any more."""
    _live.pop(handle, None)


def _find(handle: int) -> AllToAll:
    owner = _live.get(int(handle))  # a traced integer is no key
    if owner is None:
        raise OutOfOrder(f"all-to-all {handle} was closed; compile again with a live one")
    return owner


@torch.library.custom_op("weft::dispatch", mutates_args=("order",))
def _dispatch(
    payloads: list[torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
    stats: torch.Tensor | None,
    order: torch.Tensor,
    handle: int,
) -> None:
    _find(handle)._dispatch(tuple(payloads), topk_ids, topk_weights, num_tokens, stats)


@_dispatch.register_fake
def _(
    payloads: list[torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
    stats: torch.Tensor | None,
    order: torch.Tensor,
    handle: int,
) -> None:
    owner = _find(handle)
    # Here too, because what is received depends on it.
    owner._geometry.check_stats(stats, owner.group.device)


# Apart from dispatch, because an op that mutates may not return a list; reading `order` keeps it
# behind dispatch. Copies, because a compiler may move a pointwise read of a view behind combine,
# when peers write there again.
@torch.library.custom_op("weft::received", mutates_args=())
def _received(order: torch.Tensor, handle: int) -> list[torch.Tensor]:
    return [
        torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device).copy_(v)
        for v in _views(handle)
    ]


@_received.register_fake
def _(order: torch.Tensor, handle: int) -> list[torch.Tensor]:
    return [
        torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
        for v in _views(handle)
    ]


def _views(handle: int) -> list[torch.Tensor]:
    real = _find(handle)._workspace.received
    stats = [] if real.stats is None else [real.stats]
    return [*real.payloads, real.ids, real.weights, real.counts, *stats]


@torch.library.custom_op("weft::combine", mutates_args=("order", "out"))
def _combine(
    y: torch.Tensor | None,
    out: torch.Tensor,
    add: torch.Tensor | None,
    order: torch.Tensor,
    handle: int,
) -> None:
    _find(handle)._combine(y, out, add)


@_combine.register_fake
def _(
    y: torch.Tensor | None,
    out: torch.Tensor,
    add: torch.Tensor | None,
    order: torch.Tensor,
    handle: int,
) -> None:
    _find(handle)


def traced_dispatch(
    payloads: tuple[torch.Tensor, ...],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
    stats: torch.Tensor | None,
    order: torch.Tensor,
    handle: int,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Dispatch inside a compiled graph: the fields of a Received."""
    torch.ops.weft.dispatch(
        list(payloads), topk_ids, topk_weights, num_tokens, stats, order, handle
    )
    views = torch.ops.weft.received(order, handle)
    gathered = None if stats is None else views[-1]
    *planes, ids, weights, counts = views if stats is None else views[:-1]
    return tuple(planes), ids, weights, counts, gathered


def traced_combine(
    y: torch.Tensor | None,
    out: torch.Tensor,
    add: torch.Tensor | None,
    order: torch.Tensor,
    handle: int,
) -> torch.Tensor:
    """Combine inside a compiled graph, into `out`."""
    torch.ops.weft.combine(y, out, add, order, handle)
    return out
