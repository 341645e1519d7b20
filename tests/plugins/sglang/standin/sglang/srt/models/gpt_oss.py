# SPDX-License-Identifier: Apache-2.0
"""A block of biased experts with a clamped SwiGLU; what makes the logits is called the router."""

from __future__ import annotations

import torch

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.models.parts import HIDDEN, INTERMEDIATE, TOP_K, Block, Gate, physical_experts


class GptOssSparseMoeBlock(Block):
    def __init__(self, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_id, self.topk = layer_id, TopK(TOP_K)
        self.router = Gate(layer_id, dtype, pair=True)
        self.experts = FusedMoE(
            physical_experts(),
            HIDDEN,
            INTERMEDIATE,
            layer_id,
            TOP_K,
            dtype,
            gemm1_alpha=1.702,
            gemm1_clamp_limit=0.5,
            with_bias=True,
        )
