"""A block with a shared expert, and a scale that the runner applies."""

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
)


class Glm4MoeMLP(SharedMLP):
    """The shared expert."""

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
    ) -> None:
        layer, dtype = quant_config
        super().__init__(intermediate_size, layer, dtype, tp_size)


class Glm4MoeSparseMoeBlock(nn.Module):
    """Router, experts and the shared one."""

    def __init__(self, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_id, self.topk, self.gate = layer_id, TopK(TOP_K), Gate(layer_id, dtype)
        self.experts = FusedMoE(
            physical_experts(), HIDDEN, INTERMEDIATE, layer_id, TOP_K, dtype, SCALE
        )
        self.shared_experts = Glm4MoeMLP(
            hidden_size=HIDDEN,
            intermediate_size=2 * INTERMEDIATE,
            hidden_act="silu",
            quant_config=(layer_id, dtype),
            prefix=f"model.layers.{layer_id}.mlp.shared_experts",
        )

    def forward(self, hidden_states: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
        """SGLang's own way."""
        raise AssertionError("the stock forward ran")
