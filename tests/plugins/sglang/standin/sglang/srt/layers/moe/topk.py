# SPDX-License-Identifier: Apache-2.0
"""Routing: softmax scores, the best of them, and -1 for rows that are padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class TopK(nn.Module):
    """The router's last step. Like its kernels, it cannot be launched with no token."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.top_k, self.is_draft = top_k, False

    def forward(self, *args: Any, **given: Any) -> StandardTopKOutput:
        return self.forward_cuda(*args, **given)

    def forward_cuda(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        *,
        num_token_non_padded: torch.Tensor | None = None,
        expert_location_dispatch_info: Any = None,
    ) -> StandardTopKOutput:
        """`[tokens, top_k]` of the best experts; physical ones where there are replicas."""
        if not len(hidden_states):
            raise RuntimeError("invalid configuration argument: a grid of 0 blocks")
        weights, ids = router_logits.float().softmax(1).topk(self.top_k)
        if expert_location_dispatch_info is not None:
            ids = expert_location_dispatch_info.physical[ids]
        if num_token_non_padded is not None:
            ids[int(num_token_non_padded) :] = -1
        return StandardTopKOutput(weights, ids.int(), router_logits)

    def empty_topk_output(
        self, device: torch.device, *, layer_id: int | None = None
    ) -> StandardTopKOutput:
        none = torch.empty((0, self.top_k), device=device)
        return StandardTopKOutput(none, none.int(), none)
