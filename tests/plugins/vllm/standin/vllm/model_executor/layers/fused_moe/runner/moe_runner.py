# SPDX-License-Identifier: Apache-2.0
"""From logits to a layer's sum."""

from __future__ import annotations

from typing import Any

import torch


class MoERunner:
    def __init__(self, router: Any, routed_experts: Any) -> None:
        self.router, self.routed_experts = router, routed_experts

    def _apply_quant_method(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.routed_experts._ensure_moe_quant_config_init()
        method = self.routed_experts.quant_method
        assert not method.is_monolithic, "the stock experts ran"
        weights, ids = self.router.select_experts(logits, method.topk_indices_dtype)
        return self.routed_experts.forward_modular(x=x, topk_weights=weights, topk_ids=ids)
