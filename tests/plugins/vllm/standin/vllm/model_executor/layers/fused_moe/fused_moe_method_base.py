# SPDX-License-Identifier: Apache-2.0
"""How a layer's weights are made, loaded and multiplied."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts, FusedMoEKernel


class FusedMoEMethodBase:
    quant = FusedMoEQuantConfig()
    sums = True

    def __init__(self, moe: Any) -> None:
        self.moe = moe
        self.moe_kernel: Any = None
        self.moe_quant_config: Any = None

    @property
    def supports_internal_mk(self) -> bool:
        return self.moe_kernel is not None

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        return False

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    @property
    def is_monolithic(self) -> bool:
        return self.moe_kernel is None

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        return hidden_size, -(-intermediate_size_per_partition // 256) * 256

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        raise AttributeError("a kernel's layout, which was not made")

    def make_kernel(self) -> None:
        self.moe_quant_config = self.quant
        self.moe_kernel = FusedMoEKernel("stock", FusedMoEExperts(self.quant, self.sums))

    def run(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any) -> torch.Tensor:
        w1, w2 = layer.w13_weight, layer.w2_weight
        on = layer.apply_router_weight_on_input
        return self.moe_kernel.apply(x, w1, w2, topk_weights, topk_ids, on, layer.expert_map)
