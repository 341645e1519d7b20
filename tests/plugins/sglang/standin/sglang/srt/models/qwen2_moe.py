# SPDX-License-Identifier: Apache-2.0
"""A block whose shared expert has a gate of its own, also of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.models.parts import (
    HIDDEN,
    INTERMEDIATE,
    TOP_K,
    Block,
    Gate,
    PlainMLP,
    drawn,
    physical_experts,
    shared_form,
)


class Qwen2MoeMLP(PlainMLP): ...


class Qwen2MoeSparseMoeBlock(Block):
    def __init__(self, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_id, self.topk = layer_id, TopK(TOP_K)
        self.gate = Gate(layer_id, dtype, pair=True)
        self.experts = FusedMoE(physical_experts(), HIDDEN, INTERMEDIATE, layer_id, TOP_K, dtype)
        self.shared_expert = Qwen2MoeMLP(
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            hidden_act="silu",
            quant_config=(layer_id, dtype),
            prefix=f"model.layers.{layer_id}.mlp.shared_expert",
            **shared_form(),
        )
        self.shared_expert_gate = nn.Linear(HIDDEN, 1, bias=False, dtype=dtype)
        self.shared_expert_gate.requires_grad_(False)
        self.shared_expert_gate.weight.copy_(drawn((1, HIDDEN), 1000 * layer_id + 502, dtype))

    def _forward_shared_experts(
        self, hidden_states: torch.Tensor, apply_gate: bool = True
    ) -> torch.Tensor:
        out: torch.Tensor = self.shared_expert(hidden_states)
        return functional.sigmoid(self.shared_expert_gate(hidden_states)) * out
