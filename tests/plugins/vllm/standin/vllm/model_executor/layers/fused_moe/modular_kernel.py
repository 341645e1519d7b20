# SPDX-License-Identifier: Apache-2.0
"""Experts between two steps that move tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any

import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNoOP,
)


class FusedMoEActivationFormat(Enum):
    Standard = "standard"


class FusedMoEPrepareAndFinalize(ABC):
    def allocate_fused_expert_output(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        weight_and_reduce_impl: Any,
    ) -> torch.Tensor | None:
        return None

    @property
    @abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat: ...

    @abstractmethod
    def topk_indices_dtype(self) -> torch.dtype | None: ...

    @abstractmethod
    def max_num_tokens_per_rank(self) -> int | None: ...

    @abstractmethod
    def num_dispatchers(self) -> int: ...

    @abstractmethod
    def output_is_reduced(self) -> bool: ...


class FusedMoEPrepareAndFinalizeModular(FusedMoEPrepareAndFinalize):
    @abstractmethod
    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> Any: ...

    @abstractmethod
    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None: ...


class FusedMoEExperts:
    """Ids as their map has them, or local where there is none. `sums`: they weigh and sum."""

    def __init__(self, quant_config: Any, sums: bool) -> None:
        self.quant_config, self.sums = quant_config, sums

    @property
    def expects_unquantized_inputs(self) -> bool:
        return False

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP() if self.sums else TopKWeightAndReduceContiguous()

    def apply(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        w1: torch.Tensor,
        w2: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> None:
        mine = torch.ones_like(ids, dtype=torch.bool)
        if expert_map is not None:
            ids = expert_map[ids.long()]
            mine, ids = ids >= 0, ids.clamp(min=0)
        if scale is not None:
            x = (x.float().view(*scale.shape, -1) * scale[..., None]).view(x.shape)
        x = x.nan_to_num().to(w1.dtype)
        wide = torch.einsum("th,tkih->tki", x, w1[ids.long()])
        gate, up = wide.chunk(2, dim=2)
        rows = torch.einsum("tki,tkhi->tkh", functional.silu(gate) * up, w2[ids.long()])
        rows = rows.masked_fill(~mine[..., None], 0.0)
        output.copy_((rows * weights[..., None]).sum(1) if self.sums else rows)


class FusedMoEKernelModularImpl:
    def __init__(self, prepare_finalize: Any, fused_experts: FusedMoEExperts) -> None:
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts


class FusedMoEKernel:
    def __init__(self, prepare_finalize: Any, fused_experts: FusedMoEExperts) -> None:
        self.impl = FusedMoEKernelModularImpl(prepare_finalize, fused_experts)

    def apply(
        self,
        x: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        weights: Any,
        ids: Any,
        on: bool,
        expert_map: torch.Tensor | None,
    ) -> torch.Tensor:
        around, experts = self.impl.prepare_finalize, self.impl.fused_experts
        quant, impl = experts.quant_config, experts.finalize_weight_and_reduce_impl()
        a, scale, _, ids, weights = around.prepare(
            x, weights, ids, 0, expert_map, on, quant, defer_input_quant=False
        )
        shape = a.shape if experts.sums else (*ids.shape, a.shape[1])
        made = around.allocate_fused_expert_output(shape, x.dtype, x.device, impl)
        made = torch.empty(shape, dtype=x.dtype, device=x.device) if made is None else made
        experts.apply(made, a, scale, w1, w2, weights, ids, expert_map)
        out = torch.empty_like(x)
        around.finalize(out, made, weights, ids, on, impl)
        return out
