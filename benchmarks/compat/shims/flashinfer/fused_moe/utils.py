# SPDX-License-Identifier: Apache-2.0
"""Routing for tests."""

import torch


def make_random_topk_ids(
    num_experts: int, num_tokens: int, top_k: int, device: torch.device
) -> torch.Tensor:
    """Return random int32 `[num_tokens, top_k]`, distinct within a row."""
    scores = torch.rand((num_tokens, num_experts), device=device)
    return scores.topk(top_k, dim=1).indices.int()
