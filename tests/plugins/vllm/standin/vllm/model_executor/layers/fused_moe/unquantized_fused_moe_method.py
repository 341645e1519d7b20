# SPDX-License-Identifier: Apache-2.0
"""Weights of the model's dtype."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    def process_weights_after_loading(self, layer: Any) -> None:
        self.make_kernel()

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.run(layer, x, topk_weights, topk_ids)
