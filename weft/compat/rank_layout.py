# SPDX-License-Identifier: Apache-2.0
"""Counts, destination ranks and local ids that deep_ep's normal mode computes from expert ids.

A CUDA graph can capture all of these functions: none reads a value on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """Destinations of a rank's tokens, as deep_ep's get_dispatch_layout returns them.

    Attributes:
        num_tokens_per_rank: int32 `[ranks]`.
        num_tokens_per_expert: int32 `[experts]`.
        in_rank: bool `[tokens, ranks]`: whether the token goes to the rank.
    """

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    in_rank: torch.Tensor


def compute_layout(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count the destinations of tokens, from int32 or int64 `[tokens, top_k]`.

    Entries outside of 0..num_experts - 1 are not counted.
    """
    # Entries that name no expert map to num_experts, an additional column.
    ids = topk_idx.long().clamp(-1, num_experts).remainder_(num_experts + 1)
    in_rank = ids.new_zeros((len(ids), num_ranks + 1), dtype=torch.bool)
    in_rank.scatter_(1, ids // (num_experts // num_ranks), True)
    in_rank = in_rank[:, :num_ranks].contiguous()
    num_tokens_per_expert, ids = ids.new_zeros(num_experts + 1, dtype=torch.int32), ids.flatten()
    num_tokens_per_expert.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
    return Layout(in_rank.sum(0, dtype=torch.int32), num_tokens_per_expert[:-1], in_rank)


def build_count_message(
    header: Sequence[int],
    topk_idx: torch.Tensor | None,
    layout: Layout,
    num_invalid_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Build the counts that a rank sends to all ranks, and its tokens' destination ranks.

    Args:
        header: Integers at the start of the message.
        topk_idx: Expert ids, or None.
        layout: The layout that the caller passed.
        num_invalid_ids: int32 `[1]`; incremented by the number of entries that name no expert.

    Returns:
        int32 `[*header, entries that name no expert, *num_tokens_per_rank, *tokens per rank by
            in_rank, *num_tokens_per_expert]`, and int32 `[tokens, ranks]` with the rank
            where in_rank is True, otherwise -1.
    """
    device, num_experts = layout.in_rank.device, len(layout.num_tokens_per_expert)
    num_invalid = torch.zeros(1, dtype=torch.int32, device=device)
    if topk_idx is not None:
        num_invalid += ((topk_idx < -1) | (topk_idx >= num_experts)).sum(dtype=torch.int32)
    if num_invalid_ids is not None:
        num_invalid_ids += num_invalid
    # Filled one by one, because a capture cannot copy a list from the host.
    header_tensors = [torch.full((1,), value, dtype=torch.int32, device=device) for value in header]
    num_marked = layout.in_rank.sum(0, dtype=torch.int32)
    rank = torch.arange(len(num_marked), dtype=torch.int32, device=device)
    message = torch.cat(
        (
            *header_tensors,
            num_invalid,
            layout.num_tokens_per_rank,
            num_marked,
            layout.num_tokens_per_expert,
        )
    )
    return message, torch.where(layout.in_rank, rank, -1)


def localize_ids(
    ids: torch.Tensor, weights: torch.Tensor, first_expert: int, num_experts: int
) -> None:
    """Convert global ids to local ones, in place.

    `ids` is int32 or int64 `[rows, top_k]`. Ids outside of first .. first + count - 1 become -1,
    and their weights 0.
    """
    is_remote = (ids < first_expert) | (ids >= first_expert + num_experts)
    ids.sub_(first_expert).masked_fill_(is_remote, -1)
    weights.masked_fill_(is_remote, 0.0)
