# SPDX-License-Identifier: Apache-2.0
"""Who weighs and sums the experts' rows."""

from __future__ import annotations

import torch


class TopKWeightAndReduceDelegate:
    """The caller chooses."""


class TopKWeightAndReduceNoOP:
    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        assert output is None
        return fused_expert_output


class TopKWeightAndReduceContiguous:
    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        assert output is None
        if not apply_router_weight_on_input:
            fused_expert_output.mul_(topk_weights[..., None])
        return fused_expert_output.sum(1)
