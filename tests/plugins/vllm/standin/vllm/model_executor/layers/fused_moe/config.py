# SPDX-License-Identifier: Apache-2.0
"""Sizes of a layer of experts, and of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class FusedMoEParallelConfig:
    tp_size: int
    dp_size: int
    ep_size: int
    ep_rank: int
    sp_size: int
    use_ep: bool

    @property
    def use_all2all_kernels(self) -> bool:
        return self.use_ep and (self.dp_size > 1 or self.is_sequence_parallel)

    @property
    def is_sequence_parallel(self) -> bool:
        return self.sp_size > 1


@dataclass
class FusedMoEConfig:
    num_experts: int
    num_local_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size_per_partition: int
    in_dtype: torch.dtype
    moe_parallel_config: FusedMoEParallelConfig
    activation: Any
    has_bias: bool = False
    is_act_and_mul: bool = True
    max_num_tokens: int = 32


@dataclass
class FusedMoEQuantConfig:
    quant_dtype: torch.dtype | None = None
    block_shape: list[int] | None = None
    per_act_token_quant: bool = False
    a1_scale: torch.Tensor | None = None

    @staticmethod
    def make() -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig()
