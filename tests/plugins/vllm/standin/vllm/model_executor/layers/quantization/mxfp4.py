"""GPT-OSS's weights in MXFP4, for which this machine's kernels are none."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase


class GptOssMxfp4MoEMethod(FusedMoEMethodBase):
    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self.weight_dtype = "gpt_oss_mxfp4"
        self.mxfp4_backend: Any = None
        raise NotImplementedError("No MXFP4 MoE backend supports the deployment configuration.")

    def process_weights_after_loading(self, layer: Any) -> None:
        raise AssertionError("weights in a kernel's layout")

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        raise AssertionError("the stock experts ran")


class GptOssMxfp4Config:
    def __call__(self, moe: Any) -> GptOssMxfp4MoEMethod:
        return GptOssMxfp4MoEMethod(moe)
