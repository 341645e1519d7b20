# SPDX-License-Identifier: Apache-2.0
"""A block with a shared expert, and a scale that the runner applies."""

from __future__ import annotations

import torch

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.models.parts import (
    HIDDEN,
    INTERMEDIATE,
    SCALE,
    TOP_K,
    Block,
    Gate,
    PlainMLP,
    physical_experts,
    shared_form,
)


class Glm4MoeMLP(PlainMLP): ...


class Glm4MoeSparseMoeBlock(Block):
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
            **shared_form(),
        )
