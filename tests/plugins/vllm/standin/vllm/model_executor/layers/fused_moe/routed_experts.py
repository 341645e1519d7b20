# SPDX-License-Identifier: Apache-2.0
"""A layer's experts on one rank."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)


class RoutedExperts(PluggableLayer):
    def __init__(self, layer_name: str, moe_config: Any, quant_config: Any = None, **more: Any):
        super().__init__()
        self.layer_name, self.moe_config = layer_name, moe_config
        self.hidden_size = moe_config.hidden_dim
        self.global_num_experts = moe_config.num_experts
        self.local_num_experts = moe_config.num_local_experts
        self.top_k = moe_config.experts_per_token
        self.activation = moe_config.activation
        self.swiglu_limit = more.get("swiglu_limit")
        self.swiglu_alpha = self.swiglu_beta = None
        self.apply_router_weight_on_input = more.get("on_input", False)
        self.quant_method = self._get_quant_method(layer_name, quant_config, moe_config)
        _, self.intermediate_size_per_partition = self.quant_method.maybe_roundup_sizes(
            self.hidden_size,
            moe_config.intermediate_size_per_partition,
            moe_config.in_dtype,
            moe_config.moe_parallel_config,
        )

    @property
    def expert_map(self) -> torch.Tensor | None:
        """Of physical experts; those on CPUs have none."""
        device = self.w13_weight.device
        if device.type == "cpu":
            return None
        first = self.moe_config.moe_parallel_config.ep_rank * self.local_num_experts
        local = torch.arange(self.global_num_experts, device=device) - first
        return local.masked_fill((local < 0) | (local >= self.local_num_experts), -1)

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        return (quant_config or UnquantizedFusedMoEMethod)(moe_config)

    def _ensure_moe_quant_config_init(self) -> None:
        method = self.quant_method
        if method.moe_quant_config is None:
            method.moe_quant_config = method.get_fused_moe_quant_config(self)

    def forward_modular(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.quant_method.apply(
            layer=self,
            x=x,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
