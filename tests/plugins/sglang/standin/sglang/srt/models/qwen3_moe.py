# SPDX-License-Identifier: Apache-2.0
"""A block without a shared expert."""

from __future__ import annotations

import torch

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.models.parts import HIDDEN, INTERMEDIATE, TOP_K, Block, Gate, physical_experts


class Qwen3MoeSparseMoeBlock(Block):
    def __init__(self, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_id, self.topk = layer_id, TopK(TOP_K)
        self.gate = Gate(layer_id, dtype, pair=True)
        self.experts = FusedMoE(physical_experts(), HIDDEN, INTERMEDIATE, layer_id, TOP_K, dtype)
