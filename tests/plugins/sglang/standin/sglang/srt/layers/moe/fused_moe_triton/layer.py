# SPDX-License-Identifier: Apache-2.0
"""A layer of experts: weights of this rank's, and a runner that multiplies in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher.standard import (
    StandardCombineInput,
    StandardDispatcher,
)
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.runtime_context import get_parallel


def create_moe_dispatcher(moe_runner_config: Any) -> Any:
    if get_moe_a2a_backend().is_customized():
        raise NotImplementedError("Unsupported a2a backend: customized")
    return StandardDispatcher()


def dispatcher_of(layer: FusedMoE) -> Any:
    return create_moe_dispatcher(layer.moe_runner_config)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """What kernels that ask for no strides read of a tensor: rows one behind another."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride())


def activated(h: torch.Tensor, config: MoeRunnerConfig) -> torch.Tensor:
    """Gated SiLU, or GPT-OSS's, whose rows of gate and up are in turn."""
    if config.gemm1_alpha is None:
        gate, up = h.chunk(2, dim=1)
        return functional.silu(gate) * up
    limit = config.gemm1_clamp_limit
    gate, up = h[:, ::2].clamp(max=limit), h[:, 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(config.gemm1_alpha * gate) * (up + 1)


class Method:
    """The runner: skips ids of -1, weighs, sums and writes over its input, as Triton's does."""

    def __init__(self) -> None:
        triton = SimpleNamespace(is_triton=lambda: True, value="triton")
        self.runner = SimpleNamespace(runner_backend=triton)

    def apply(self, layer: FusedMoE, dispatch_output: Any) -> StandardCombineInput:
        x, chosen = dispatch_output.hidden_states, dispatch_output.topk_output
        ids, weights = packed(chosen.topk_ids), packed(chosen.topk_weights)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in range(layer.num_local_experts):
            row, k = (ids == expert).nonzero(as_tuple=True)
            biases: list[Any] = [None, None]
            if layer.with_bias:
                names = ("w13_weight_bias", "w2_weight_bias")
                biases = [layer.get_parameter(name)[expert] for name in names]
            h = functional.linear(x[row].float(), layer.w13_weight[expert].float(), biases[0])
            h = activated(h, layer.moe_runner_config)
            y = functional.linear(h, layer.w2_weight[expert].float(), biases[1])
            out.index_add_(0, row, y * weights[row, k, None])
        x.copy_(out * (layer.moe_runner_config.routed_scaling_factor or 1.0))
        return StandardCombineInput(x)


class FusedMoE(nn.Module):
    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        layer_id: int,
        top_k: int,
        params_dtype: torch.dtype,
        routed_scaling_factor: float | None = None,
        *,
        gemm1_alpha: float | None = None,
        gemm1_clamp_limit: float | None = None,
        with_bias: bool = False,
    ) -> None:
        super().__init__()
        place = get_parallel()
        self.layer_id, self.top_k, self.hidden_size = layer_id, top_k, hidden_size
        self.num_experts, self.params_dtype = num_experts, params_dtype
        self.moe_ep_size, self.moe_ep_rank, self.moe_tp_size = (
            place.moe_ep_size,
            place.moe_ep_rank,
            1,
        )
        self.num_local_experts = num_experts // self.moe_ep_size
        self.intermediate_size_per_partition = intermediate_size
        self.num_fused_shared_experts, self.with_bias = 0, with_bias
        self.should_fuse_routed_scaling_factor_in_topk = False
        self.moe_runner_config = MoeRunnerConfig(
            layer_id,
            routed_scaling_factor=routed_scaling_factor,
            gemm1_alpha=gemm1_alpha,
            gemm1_clamp_limit=gemm1_clamp_limit,
        )
        local = self.num_local_experts
        wide = (local, 2 * intermediate_size, hidden_size)
        narrow = (local, hidden_size, intermediate_size)
        self.w13_weight = nn.Parameter(torch.empty(wide, dtype=params_dtype), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.empty(narrow, dtype=params_dtype), requires_grad=False)
        for name, rows in (("w13", 2 * intermediate_size), ("w2", hidden_size)):
            if with_bias:  # in float32, whatever the weights are
                bias = nn.Parameter(torch.empty(local, rows), requires_grad=False)
                self.register_parameter(f"{name}_weight_bias", bias)
        self.quant_method = Method()
        self.dispatcher = dispatcher_of(self)

    def forward(self, hidden_states: torch.Tensor, topk_output: Any) -> torch.Tensor:
        return self.forward_impl(hidden_states, topk_output)

    def forward_impl(
        self, hidden_states: torch.Tensor, topk_output: Any, pre_quant_input: Any = None
    ) -> torch.Tensor:
        sent = self.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
        made = self.quant_method.apply(layer=self, dispatch_output=sent)
        out: torch.Tensor = self.dispatcher.combine(combine_input=made)
        return out.contiguous()
