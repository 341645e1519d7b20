# SPDX-License-Identifier: Apache-2.0
"""AllToAll's dispatch and combine as torch custom ops (runtime/library.py)."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from weft.alltoall.config import AllToAllConfig
from weft.alltoall.received import Received
from weft.runtime.check import allow_fake_tensors, check_tensor
from weft.runtime.library import TracedOperator, detach, lookup


class TraceableAllToAll(TracedOperator, Protocol):
    """The attributes and methods of an AllToAll that the custom ops use."""

    @property
    def config(self) -> AllToAllConfig: ...

    @property
    def output_buffer(self) -> torch.Tensor: ...

    @property
    def traced_tokens(self) -> int: ...


@torch.library.custom_op("weft::dispatch", mutates_args=("order",))
def _dispatch(
    payloads: list[torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
    stats: torch.Tensor | None,
    rows: int,
    order: torch.Tensor,
    handle: int,
) -> None:
    lookup(handle).dispatch(
        payloads, topk_ids, topk_weights, num_tokens=num_tokens, stats=stats, rows=rows
    )


@_dispatch.register_fake
def _(*args: Any) -> None:
    payloads, topk_ids, topk_weights, num_tokens, stats, _, _, handle = args
    owner: TraceableAllToAll = lookup(handle)
    config, device = owner.config, owner.group.device
    with allow_fake_tensors():
        config.check_dispatch(payloads, topk_ids, topk_weights, num_tokens, stats, device)


# A separate op, because a mutating op may not return a list. It reads `order`, so that it stays
# after dispatch. It returns copies, because a compiler may move a pointwise read of a view
# past combine, when peers overwrite the memory.
@torch.library.custom_op("weft::received", mutates_args=())
def _received(rows: int, order: torch.Tensor, handle: int) -> list[torch.Tensor]:
    return [
        torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device).copy_(v)
        for part in _split_received(lookup(handle).receive_views(rows)[0])
        for v in part
    ]


@_received.register_fake
def _(rows: int, order: torch.Tensor, handle: int) -> list[torch.Tensor]:
    slots, others = _split_received(lookup(handle).latest_received)
    copies = [
        torch.empty_strided(
            (len(v), rows, *v.shape[2:]),
            (rows * v.stride(1), *v.stride()[1:]),
            dtype=v.dtype,
            device=v.device,
        )
        for v in slots
    ]
    return [*copies, *(torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in others)]


def _split_received(received: Received) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors `[ep_size, rows, ...]`, and those without rows."""
    stats = [] if received.stats is None else [received.stats]
    return [*received.payloads, received.ids, received.weights], [received.counts, *stats]


@torch.library.custom_op("weft::combine", mutates_args=("order", "out"))
def _combine(
    y: torch.Tensor | None,
    out: torch.Tensor,
    add: torch.Tensor | None,
    order: torch.Tensor,
    handle: int,
) -> None:
    lookup(handle).combine(y, out=out, add=add)


@_combine.register_fake
def _(*args: Any) -> None:
    y, out, add, _, handle = args
    owner: TraceableAllToAll = lookup(handle)
    dtypes, device = (owner.dtype,), owner.group.device
    size = (None, owner.config.shape.hidden)  # the round determines the number of tokens
    check_tensor("out", out, shape=size, dtypes=dtypes, device=device)
    if add is not None:
        check_tensor("add", add, shape=out.shape, dtypes=dtypes, device=device)
    if y is not None and owner.config.shape.combine != "gemm_push":
        ranks, _, hidden = owner.output_buffer.shape
        shape = (ranks, None, hidden)  # the round determines the number of rows
        check_tensor("y", y, shape=shape, dtypes=dtypes, device=device)


def dispatch(
    owner: TraceableAllToAll,
    payloads: tuple[torch.Tensor, ...],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
    stats: torch.Tensor | None,
    rows: int,
) -> Received:
    """Dispatch inside a compiled graph."""
    order, handle = owner.order_tensor, owner.library_handle
    inputs = ([p.detach() for p in payloads], topk_ids, detach(topk_weights), num_tokens, stats)
    torch.ops.weft.dispatch(*inputs, rows, order, handle)
    views = torch.ops.weft.received(rows, order, handle)
    gathered = None if stats is None else views[-1]
    *planes, ids, received_weights, counts = views if stats is None else views[:-1]
    return Received(tuple(planes), ids, received_weights, counts, gathered)


def combine(
    owner: TraceableAllToAll,
    y: torch.Tensor | None,
    out: torch.Tensor | None,
    add: torch.Tensor | None,
) -> torch.Tensor:
    """Combine inside a compiled graph."""
    if out is None:
        size = (owner.traced_tokens, owner.config.shape.hidden)
        out = torch.empty(size, dtype=owner.dtype, device=owner.order_tensor.device)
    # The output buffer is an argument, so that the compiler keeps earlier writes to it.
    rows = owner.output_buffer if y is None else y.detach()
    torch.ops.weft.combine(rows, out, detach(add), owner.order_tensor, owner.library_handle)
    return out
