# SPDX-License-Identifier: Apache-2.0
"""A block whose gate is float32."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.models.parts import HIDDEN, INTERMEDIATE, TOP_K, Block, Gate, physical_experts


class Float32Gate(Gate):
    def forward(self, x: torch.Tensor, forward_batch: Any = None) -> Any:
        assert x.dtype == torch.float32
        return super().forward(x)


class MiniMaxM2MoE(Block):
    def __init__(self, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_id, self.topk = layer_id, TopK(TOP_K)
        self.gate = Float32Gate(layer_id, dtype, pair=True)
        self.experts = FusedMoE(physical_experts(), HIDDEN, INTERMEDIATE, layer_id, TOP_K, dtype)
