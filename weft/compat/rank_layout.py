"""What deep_ep's normal mode derives from chosen experts: counts, ranks of tokens, local ids."""

from __future__ import annotations

import torch


def dispatch_layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return num_tokens_per_rank, num_tokens_per_expert and is_token_in_rank of int `[tokens, k]`.

    int32 `[num_ranks]`, int32 `[num_experts]`, bool `[tokens, num_ranks]`. Entries outside of
    0..num_experts - 1 count for nobody.
    """
    ids, tokens = topk_idx.long(), len(topk_idx)
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    device = ids.device
    # Entries that name no expert fall into a column of their own.
    in_rank = torch.zeros((tokens, num_ranks + 1), dtype=torch.bool, device=device)
    in_rank.scatter_(1, ids // (num_experts // num_ranks), True)
    in_rank = in_rank[:, :num_ranks].contiguous()
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    per_expert.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=torch.int32))
    return in_rank.sum(0, dtype=torch.int32), per_expert[:num_experts].contiguous(), in_rank


def rank_ids(in_rank: torch.Tensor) -> torch.Tensor:
    """int32 of bool `[tokens, ranks]`: the rank where it is True, else -1."""
    rank = torch.arange(in_rank.shape[1], dtype=torch.int32, device=in_rank.device)
    return torch.where(in_rank, rank, -1)


def refused_ids(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int32 `[1]`: entries that name no expert and are not -1."""
    return ((topk_idx < -1) | (topk_idx >= num_experts)).sum(dtype=torch.int32).view(1)


def localized(
    ids: torch.Tensor, weights: torch.Tensor, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the experts first .. first + count - 1, counted from first, and their weights.

    Others become -1, and weight 0.
    """
    local = ids - first
    held = (local >= 0) & (local < count)
    return torch.where(held, local, -1), torch.where(held, weights, 0.0)
