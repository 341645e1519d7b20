# SPDX-License-Identifier: Apache-2.0
"""Weights in FP8; here, rows in FP8 for weights of the model's dtype."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)


class Fp8MoEMethod(UnquantizedFusedMoEMethod):
    quant = FusedMoEQuantConfig(torch.float8_e4m3fn, [128, 128])
    sums = False
