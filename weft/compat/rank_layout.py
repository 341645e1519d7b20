# SPDX-License-Identifier: Apache-2.0
"""What deep_ep's normal mode derives from chosen experts: counts, ranks of tokens, local ids.

In operators of torch that a CUDA graph may capture: none reads a value on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """int32 `[ranks]`, int32 `[experts]`, bool `[tokens, ranks]`."""

    per_rank: torch.Tensor
    per_expert: torch.Tensor
    in_rank: torch.Tensor


def dispatch_layout(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count where the tokens of int32 or int64 `[tokens, top_k]` go.

    Entries outside of 0..num_experts - 1 count for nobody.
    """
    # -1 and num_experts, hence all that name no expert, become num_experts: a column of their own.
    ids = topk_idx.long().clamp(-1, num_experts).remainder_(num_experts + 1)
    in_rank = ids.new_zeros((len(ids), num_ranks + 1), dtype=torch.bool)
    in_rank.scatter_(1, ids // (num_experts // num_ranks), True)
    in_rank = in_rank[:, :num_ranks].contiguous()
    per_expert, ids = ids.new_zeros(num_experts + 1, dtype=torch.int32), ids.flatten()
    per_expert.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
    return Layout(in_rank.sum(0, dtype=torch.int32), per_expert[:-1], in_rank)


def announcement(
    words: Sequence[int],
    topk_idx: torch.Tensor | None,
    layout: Layout,
    refused: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank tells of its dispatch, and which ranks its tokens go to.

    words: numbers to tell first.   refused: int32 `[1]`, to which entries that name no expert and
    are not -1 are added.

    Returns int32 `[words, those entries, per_rank, tokens that in_rank flags, per_expert]`, and
    int32 `[tokens, ranks]` with the rank where in_rank is True, else -1.
    """
    device, experts = layout.in_rank.device, len(layout.per_expert)
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    if topk_idx is not None:
        bad += ((topk_idx < -1) | (topk_idx >= experts)).sum(dtype=torch.int32)
    if refused is not None:
        refused += bad
    # Filled one by one: a capture cannot copy a list from the host.
    told = [torch.full((1,), word, dtype=torch.int32, device=device) for word in words]
    flagged = layout.in_rank.sum(0, dtype=torch.int32)
    rank = torch.arange(len(flagged), dtype=torch.int32, device=device)
    numbers = torch.cat((*told, bad, layout.per_rank, flagged, layout.per_expert))
    return numbers, torch.where(layout.in_rank, rank, -1)


def localize(ids: torch.Tensor, weights: torch.Tensor, first: int, count: int) -> None:
    """Turn global ids into local ones, in place.

    ids: int32 or int64 `[rows, top_k]`. Those of experts first .. first + count - 1 are counted
    from first; others become -1, and their weight 0.
    """
    others = (ids < first) | (ids >= first + count)
    ids.sub_(first).masked_fill_(others, -1)
    weights.masked_fill_(others, 0.0)
