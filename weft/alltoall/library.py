"""AllToAll's dispatch and combine as operations of torch's library (library.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.runtime.check import check_tensor, tracing
from weft.runtime.library import find, plain

if TYPE_CHECKING:
    from weft.alltoall.api import AllToAll


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
    find(handle)._dispatch(tuple(payloads), topk_ids, topk_weights, num_tokens, stats)


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
    owner: AllToAll = find(handle)
    geometry, device = owner._geometry, owner.group.device
    with tracing():
        geometry.check_dispatch(payloads, topk_ids, topk_weights, num_tokens, device)
        geometry.check_stats(stats, device)


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
    real = find(handle)._workspace.received
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
    find(handle)._combine(y, out, add)


@_combine.register_fake
def _(
    y: torch.Tensor | None,
    out: torch.Tensor,
    add: torch.Tensor | None,
    order: torch.Tensor,
    handle: int,
) -> None:
    owner: AllToAll = find(handle)
    dtypes, device = (owner.dtype,), owner.group.device
    size = (None, owner._geometry.shape.hidden)  # of how many tokens, the round knows
    check_tensor("out", out, shape=size, dtypes=dtypes, device=device)
    if add is not None:
        check_tensor("add", add, shape=out.shape, dtypes=dtypes, device=device)
    if y is not None and owner._geometry.shape.combine != "gemm_push":
        wanted = owner._workspace.output.shape
        check_tensor("y", y, shape=wanted, dtypes=dtypes, device=device)


def traced_dispatch(
    owner: AllToAll,
    payloads: tuple[torch.Tensor, ...],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
    stats: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Dispatch inside a compiled graph: the fields of a Received."""
    order, handle = owner._order, owner._handle
    rows, weights = [payload.detach() for payload in payloads], plain(topk_weights)
    torch.ops.weft.dispatch(rows, topk_ids, weights, num_tokens, stats, order, handle)
    views = torch.ops.weft.received(order, handle)
    gathered = None if stats is None else views[-1]
    *planes, ids, received_weights, counts = views if stats is None else views[:-1]
    return tuple(planes), ids, received_weights, counts, gathered


def traced_combine(
    owner: AllToAll,
    y: torch.Tensor | None,
    out: torch.Tensor | None,
    add: torch.Tensor | None,
) -> torch.Tensor:
    """Combine inside a compiled graph."""
    if out is None:
        size = (owner._traced_tokens, owner._geometry.shape.hidden)
        out = torch.empty(size, dtype=owner.dtype, device=owner._order.device)
    # Named as an argument, so that the compiler keeps what was written there before.
    given = owner._workspace.output if y is None else y.detach()
    torch.ops.weft.combine(given, out, plain(add), owner._order, owner._handle)
    return out
