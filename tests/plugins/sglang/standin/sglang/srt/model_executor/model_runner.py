# SPDX-License-Identifier: Apache-2.0
"""What loads a model and runs it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sglang.srt.eplb.eplb_manager import EPLBManager
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.models.parts import fill
from sglang.srt.runtime_context import STATE


class Model(nn.Module):
    """Blocks, each added to the residual."""

    def __init__(self, kind: Callable[..., nn.Module], layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(layer, dtype) for layer in range(layers))
        for block in self.blocks:
            fill(block.experts)

    def forward(self, x: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x, forward_batch)
        return x


def seed(server_args: Any) -> None:
    initialize_moe_config(server_args)


class ModelRunner:
    """make: what load_model gets its model from.   config: fields of model_config."""

    def __init__(self, server_args: Any, make: Callable[[], nn.Module], **config: Any) -> None:
        self.server_args, self.make, self.model_config = (
            server_args,
            make,
            SimpleNamespace(**config),
        )
        self.device, self.gpu_id = "cpu", 0
        self.eplb_manager = EPLBManager()
        seed(server_args)

    def load_model(self) -> None:
        self.model = self.make()

    def forward(
        self,
        forward_batch: Any,
        skip_attn_backend_init: bool | None = None,
        pp_proxy_tensors: Any = None,
        reinit_attn_backend: bool = False,
        split_forward_count: int = 1,
    ) -> torch.Tensor:
        STATE.counts, STATE.real = forward_batch.counts, forward_batch.num_token_non_padded
        out: torch.Tensor = self.model(forward_batch.x, forward_batch)
        return out


def batch(x: torch.Tensor, counts: list[int] | None, real: int | None = None) -> SimpleNamespace:
    """counts: of all attention groups.   real: rows of x that are no padding."""
    padded = None if real is None else torch.tensor(real)
    return SimpleNamespace(x=x, counts=counts, num_token_non_padded=padded)
