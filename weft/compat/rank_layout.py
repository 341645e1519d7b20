# SPDX-License-Identifier: Apache-2.0
"""Counts, destination ranks and local ids that deep_ep's normal mode derives from expert ids.

They use torch operators that a CUDA graph can capture: none reads a value on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """Tokens per rank, int32; entries per expert, int32; `in_rank`, bool `[tokens, ranks]`."""

    per_rank: torch.Tensor
    per_expert: torch.Tensor
    in_rank: torch.Tensor


def dispatch_layout(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count the destinations of tokens, from int32 or int64 `[tokens, top_k]`.

    Entries outside of 0..num_experts - 1 are not counted.
    """
    # Entries that name no expert map to num_experts, a column of their own.
    ids = topk_idx.long().clamp(-1, num_experts).remainder_(num_experts + 1)
    in_rank = ids.new_zeros((len(ids), num_ranks + 1), dtype=torch.bool)
    in_rank.scatter_(1, ids // (num_experts // num_ranks), True)
    in_rank = in_rank[:, :num_ranks].contiguous()
    per_expert, ids = ids.new_zeros(num_experts + 1, dtype=torch.int32), ids.flatten()
    per_expert.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
    return Layout(in_rank.sum(0, dtype=torch.int32), per_expert[:-1], in_rank)


def build_announcement(
    words: Sequence[int],
    topk_idx: torch.Tensor | None,
    layout: Layout,
    refused: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's announcement of its dispatch, and the ranks its tokens go to.

    Args:
        words: Numbers at the start of the announcement.
        topk_idx: Expert ids, or None.
        layout: The layout that the caller passed.
        refused: int32 `[1]`, to which the number of entries that name no expert is added.

    Returns:
        int32 `[words, entries that name no expert, per_rank, tokens marked in in_rank,
            per_expert]`, and int32 `[tokens, ranks]` with the rank where in_rank is True, otherwise
            -1.
    """
    device, experts = layout.in_rank.device, len(layout.per_expert)
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    if topk_idx is not None:
        bad += ((topk_idx < -1) | (topk_idx >= experts)).sum(dtype=torch.int32)
    if refused is not None:
        refused += bad
    # Filled one by one, because a capture cannot copy a list from the host.
    announced = [torch.full((1,), word, dtype=torch.int32, device=device) for word in words]
    flagged = layout.in_rank.sum(0, dtype=torch.int32)
    rank = torch.arange(len(flagged), dtype=torch.int32, device=device)
    numbers = torch.cat((*announced, bad, layout.per_rank, flagged, layout.per_expert))
    return numbers, torch.where(layout.in_rank, rank, -1)


def localize(ids: torch.Tensor, weights: torch.Tensor, first: int, count: int) -> None:
    """Convert global ids to local ones, in place.

    `ids` is int32 or int64 `[rows, top_k]`. Ids outside of first .. first + count - 1 become -1,
    and their weights 0.
    """
    others = (ids < first) | (ids >= first + count)
    ids.sub_(first).masked_fill_(others, -1)
    weights.masked_fill_(others, 0.0)
