# SPDX-License-Identifier: Apache-2.0
"""What the models' blocks have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sglang.srt.runtime_context import STATE, get_parallel

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, SCALE = 64, 32, 8, 3, 2.5


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Equal numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)


def expert(layer: int, number: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, and down, of a logical expert."""
    seed = 1000 * layer + 10 * number
    wide, narrow = (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    return drawn(wide, seed, dtype), drawn(narrow, seed + 1, dtype)


def biases(layer: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of gate and up, and of down, of a logical expert, where the model has them."""
    seed = 1000 * layer + 10 * number
    f32 = torch.float32
    return drawn((2 * INTERMEDIATE,), seed + 2, f32), drawn((HIDDEN,), seed + 3, f32)


def fill(experts: Any, seed_layer: int | None = None) -> None:
    """Write this rank's experts in place; those with biases have rows of gate and up in turn."""
    layer = experts.layer_id if seed_layer is None else seed_layer
    for local in range(experts.num_local_experts):
        physical = experts.moe_ep_rank * experts.num_local_experts + local
        wide, narrow = expert(layer, physical % EXPERTS, experts.params_dtype)
        if experts.with_bias:
            wide_bias, narrow_bias = biases(layer, physical % EXPERTS)
            wide, wide_bias = in_turn(wide), in_turn(wide_bias)
            experts.w13_weight_bias[local].copy_(wide_bias)
            experts.w2_weight_bias[local].copy_(narrow_bias)
        experts.w13_weight[local].copy_(wide)
        experts.w2_weight[local].copy_(narrow)


def in_turn(rows: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up in turn, of the gate's first."""
    gate, up = rows.chunk(2)
    return torch.stack((gate, up), dim=1).flatten(0, 1)


class Gate(nn.Module):
    """Logits; SGLang's linear layers return a pair, and DeepSeek's gate wants the batch."""

    def __init__(self, layer: int, dtype: torch.dtype, *, pair: bool = False) -> None:
        super().__init__()
        self.weight, self.pair = drawn((EXPERTS, HIDDEN), 1000 * layer + 999, dtype), pair

    def forward(self, x: torch.Tensor, forward_batch: Any = None) -> Any:
        logits = functional.linear(x.float(), self.weight.float())
        return (logits, None) if self.pair else logits


class SharedMLP(nn.Module):
    """gate_up_proj has the whole size in output_size, as SGLang's parallel linear layers."""

    def __init__(self, size: int, layer: int, dtype: torch.dtype, tp_size: int | None) -> None:
        super().__init__()
        ranks = get_parallel().tp_size if tp_size is None else tp_size
        if ranks != 1:
            raise AssertionError("a shared expert in parts needs an all-reduce")
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * size, bias=False, dtype=dtype)
        self.gate_up_proj.output_size = 2 * size  # type: ignore[assignment]
        self.down_proj = nn.Linear(size, HIDDEN, bias=False, dtype=dtype)
        with torch.no_grad():
            self.gate_up_proj.weight.copy_(drawn((2 * size, HIDDEN), 1000 * layer + 500, dtype))
            self.down_proj.weight.copy_(drawn((HIDDEN, size), 1000 * layer + 501, dtype))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return out


class PlainMLP(SharedMLP):
    """A shared expert as most models make it."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        quant_config: Any = None,
        reduce_results: bool = True,
        prefix: str = "",
        tp_rank: int | None = None,
        tp_size: int | None = None,
    ) -> None:
        layer, dtype = quant_config
        super().__init__(intermediate_size, layer, dtype, tp_size)


class Block(nn.Module):
    """A MoE block, whose own forward is weft's to replace."""

    def forward(self, hidden_states: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
        raise AssertionError("the stock forward ran")


def physical_experts() -> int:
    """Logical ones, and replicas."""
    return EXPERTS + int(STATE.redundant)


def shared_form() -> dict[str, Any]:
    """What a block that knows no backend says of where its shared expert lies."""
    return {}
