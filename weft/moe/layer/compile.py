# SPDX-License-Identifier: Apache-2.0
"""A layer's calls as opaque torch custom ops, so that torch.compile does not trace into them."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from weft.alltoall.operator import AllToAll
from weft.alltoall.received import Received
from weft.lowlatency.results import ExpertRows, Handle
from weft.moe.layer.workspace import Exchange, LayerWorkspace
from weft.moe.models import MoEConfig
from weft.moe.routing.router import check_route
from weft.runtime.check import allow_fake_tensors
from weft.runtime.library import TracedObject, detach, lookup


class TraceableLayer(TracedObject, Protocol):
    """The attributes and methods of an MoE layer that the custom ops use."""

    @property
    def config(self) -> MoEConfig: ...

    @property
    def correction(self) -> torch.Tensor | None: ...

    @property
    def exchange(self) -> Exchange: ...

    @property
    def workspace(self) -> LayerWorkspace[Any]: ...

    def experts(self, received: Received | ExpertRows) -> torch.Tensor | None: ...


@torch.library.custom_op("weft::moe", mutates_args=("out", "order"))
def _call(
    x: torch.Tensor,
    logits: torch.Tensor | None,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    rows: int | None,
    num_tokens: torch.Tensor | None,
    out: torch.Tensor,
    order: torch.Tensor,
    handle: int,
) -> None:
    lookup(handle)(
        x,
        logits,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        rows=rows,
        num_tokens=num_tokens,
        out=out,
    )


@_call.register_fake
def _(*args: Any) -> None:
    x, logits, topk_ids, topk_weights, rows, num_tokens, out, _, handle = args
    with allow_fake_tensors():
        lookup(handle).check_call(x, (logits, topk_ids, topk_weights), rows, num_tokens, out)


@torch.library.custom_op("weft::moe_route", mutates_args=())
def _route(
    logits: torch.Tensor, num_tokens: torch.Tensor | None, handle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = lookup(handle).route(logits, num_tokens=num_tokens)
    return ids, weights


@_route.register_fake
def _(
    logits: torch.Tensor, num_tokens: torch.Tensor | None, handle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    layer: TraceableLayer = lookup(handle)
    routing = layer.config.routing
    check_route(routing, logits, layer.correction, num_tokens)
    size = (logits.shape[0], routing.top_k)
    return logits.new_empty(size, dtype=torch.int32), logits.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("weft::moe_experts", mutates_args=("output", "order"))
def _experts(output: torch.Tensor, order: torch.Tensor, handle: int) -> None:
    layer: TraceableLayer = lookup(handle)
    exchange = layer.exchange
    assert isinstance(exchange, AllToAll)
    # The graph holds copies of the received rows; the experts read the originals.
    layer.experts(exchange.latest_received)
    result = exchange.output_buffer
    if output.data_ptr() != result.data_ptr():  # the compiler passes its own copy on to combine
        output.copy_(result)


@torch.library.custom_op("weft::moe_expert_rows", mutates_args=("y", "order"))
def _expert_rows(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    counts: torch.Tensor,
    source: torch.Tensor,
    ranges: torch.Tensor,
    y: torch.Tensor,
    order: torch.Tensor,
    handle: int,
) -> None:
    layer: TraceableLayer = lookup(handle)
    unused = Handle(0, 0, 0)  # unused by the experts
    result = layer.experts(ExpertRows(x, scales, counts, source, ranges, unused))
    assert result is not None  # gemm_push, which returns None, raises while tracing
    y.copy_(result)


@_experts.register_fake
@_expert_rows.register_fake
def _(*args: Any) -> None:
    lookup(args[-1])


def trace_call(
    layer: TraceableLayer,
    x: torch.Tensor,
    routing: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    rows: int | None,
    num_tokens: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Call the whole layer inside a compiled graph as one op."""
    out = torch.empty_like(x.detach()) if out is None else out
    logits, topk_ids, topk_weights = routing
    args = (detach(logits), topk_ids, detach(topk_weights), rows, num_tokens, out)
    torch.ops.weft.moe(x.detach(), *args, layer.order_tensor, layer.library_handle)
    return out


def trace_route(
    layer: TraceableLayer, logits: torch.Tensor, num_tokens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `MoE.route` inside a compiled graph; it runs the same kernel as an eager call."""
    ids, weights = torch.ops.weft.moe_route(logits.detach(), num_tokens, layer.library_handle)
    return ids, weights


def trace_experts(layer: TraceableLayer, received: Received | ExpertRows) -> torch.Tensor | None:
    """Call `MoE.experts` inside a compiled graph; in low-latency mode the result is a copy."""
    if isinstance(received, Received):
        exchange = layer.exchange
        assert isinstance(exchange, AllToAll)
        torch.ops.weft.moe_experts(exchange.output(), layer.order_tensor, layer.library_handle)
        return None
    size = (*received.x.shape[:2], layer.config.hidden)
    y = torch.empty(size, dtype=layer.config.dtype, device=received.x.device)
    torch.ops.weft.moe_expert_rows(
        received.x,
        detach(received.scales),
        received.counts,
        received.source,
        received.ranges,
        y,
        layer.order_tensor,
        layer.library_handle,
    )
    return y
