# SPDX-License-Identifier: Apache-2.0
"""Prediction of the memory that a layer's workspace allocates."""

from __future__ import annotations

import torch

from weft.alltoall.config import AllToAllConfig, AllToAllSpec
from weft.arguments import check_int
from weft.errors import InvalidArgument
from weft.group.hosts import resolve_device
from weft.grouping.config import build_group_config
from weft.grouping.operator import buffer_bytes
from weft.heap.local import allocate_meta
from weft.lowlatency.config import LowLatencyConfig, LowLatencySpec
from weft.moe.layer.choice import AUTO
from weft.moe.layer.config import (
    LayerOptions,
    LayerPlan,
    MemoryQuery,
    build_exchange_kwargs,
    build_plans,
)
from weft.moe.layer.low_latency import uses_packed_rows
from weft.moe.layer.throughput import select_layout
from weft.moe.layer.workspace import create_experts
from weft.moe.models import MoEConfig
from weft.runtime.layout import Memory, build_size_function
from weft.shape import MAX_RANKS


def _compute_memory(query: MemoryQuery) -> Memory:
    ranks = check_int("ranks", query.ranks, 1, MAX_RANKS)
    device = resolve_device(query.device)
    sizes, errors = [], []
    for (_, overlap), plan in build_plans(query.config, query, device).items():
        if query.overlap in (AUTO, overlap):
            try:
                sizes.append(_compute_plan_memory(query.config, query, plan, ranks, device))
            except InvalidArgument as error:
                errors.append(error)
    if not sizes:
        raise errors[0]
    return max(sizes, key=lambda memory: memory.total)


memory_bytes = build_size_function(
    MemoryQuery,
    _compute_memory,
    """Return the bytes that a workspace will allocate on the rank with the most experts.

    Weights and loaded kernels are not included. Sibling layers share one workspace. Arguments are
    those of the constructor; for "auto" the result is the maximum over its choices.

    Args:
        ranks: Number of ranks.
        device: Device of the ranks, such as "cuda".

    Raises:
        InvalidArgument: an argument is invalid.
    """,
)


def _compute_plan_memory(
    config: MoEConfig, options: LayerOptions, plan: LayerPlan, ranks: int, device: torch.device
) -> Memory:
    num_weighted_rows = options.max_tokens if config.routing.weigh == "input" else 0
    local_bytes = num_weighted_rows * config.hidden * config.dtype.itemsize
    sizes = build_exchange_kwargs(config, options, plan)
    rows: tuple[int, ...]
    if plan.mode == "low_latency":
        geometry = LowLatencyConfig.from_spec(
            LowLatencySpec(ranks=ranks, profile=options.profile, **sizes)
        )
        shared, experts = geometry.memory.shared, geometry.shape.local
        local_bytes += geometry.memory.ordinary
        blocks = (experts, ranks * options.max_tokens)
        rows = (blocks[0] * blocks[1],) if uses_packed_rows(plan, device) else blocks
    else:
        exchange = AllToAllConfig.from_spec(AllToAllSpec(ranks=ranks, **sizes))
        shared, placement = exchange.share_bytes, exchange.placement
        experts = max(len(placement.experts_of(rank)) for rank in range(ranks))
        layout = select_layout(plan, device)
        grouping = build_group_config(exchange, experts, options.max_rows, 1, layout)
        local_bytes += buffer_bytes(exchange, grouping, device)
        rows = (experts, grouping.rows) if layout == "masked" else (grouping.rows,)
    buffers = create_experts(config, options, plan, rows, experts, ranks, allocate_meta).buffers
    local_bytes += sum(tensor.numel() * tensor.itemsize for tensor in buffers)
    return Memory(shared, local_bytes)
