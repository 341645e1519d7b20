# SPDX-License-Identifier: Apache-2.0
"""A block with a shared expert; its gate reads the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.models.parts import (
    HIDDEN,
    INTERMEDIATE,
    SCALE,
    TOP_K,
    Gate,
    SharedMLP,
    physical_experts,
    shared_form,
)


class DeepseekV2MLP(SharedMLP):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        quant_config: Any = None,
        reduce_results: bool = True,
        prefix: str = "",
        tp_rank: int | None = None,
        tp_size: int | None = None,
        swiglu_limit: float | None = None,
    ) -> None:
        layer, dtype = quant_config
        super().__init__(intermediate_size, layer, dtype, tp_size)


class DeepseekGate(Gate):
    def forward(self, x: torch.Tensor, forward_batch: Any = None) -> Any:
        assert forward_batch is not None
        return super().forward(x)


class DeepseekV2MoE(nn.Module):
    def __init__(self, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.is_nextn, self.is_hash = False, False
        self.layer_id, self.topk = layer_id, TopK(TOP_K)
        self.gate = DeepseekGate(layer_id, dtype)
        self.experts = FusedMoE(
            physical_experts(), HIDDEN, INTERMEDIATE, layer_id, TOP_K, dtype, SCALE
        )
        self.shared_experts = DeepseekV2MLP(
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            hidden_act="silu",
            quant_config=(layer_id, dtype),
            prefix=f"model.layers.{layer_id}.mlp.shared_experts",
            **shared_form(),
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        forward_batch: Any = None,
        gemm_output_zero_allocator: Any = None,
        input_ids: torch.Tensor | None = None,
        input_ids_global: torch.Tensor | None = None,
        skip_shared_experts: bool = False,
    ) -> torch.Tensor:
        raise AssertionError("the stock forward ran")


def draft_block(layer_id: int, dtype: torch.dtype) -> DeepseekV2MoE:
    """The block of a draft layer (`nextn`)."""
    block = DeepseekV2MoE(layer_id, dtype)
    block.is_nextn = block.topk.is_draft = True
    return block
