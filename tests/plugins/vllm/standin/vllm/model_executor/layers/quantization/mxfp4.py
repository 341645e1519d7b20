# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS's weights in MXFP4, for which this machine's kernels are none."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)


class GptOssMxfp4MoEMethod(UnquantizedFusedMoEMethod):
    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self.weight_dtype = "gpt_oss_mxfp4"
        self.mxfp4_backend: Any = None
        raise NotImplementedError("No MXFP4 MoE backend supports the deployment configuration.")

    def run(self, *given: Any) -> Any:
        raise AssertionError("the stock experts ran")


class GptOssMxfp4Config:
    def __call__(self, moe: Any) -> GptOssMxfp4MoEMethod:
        return GptOssMxfp4MoEMethod(moe)
