# SPDX-License-Identifier: Apache-2.0
"""Rows, workspaces and poisoned outputs for flashinfer.comm's all-reduce calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import weft
from weft.compat.flashinfer import (
    AllReduceFusionPattern,
    AllReduceFusionWorkspace,
    create_allreduce_fusion_workspace,
)

Pattern = AllReduceFusionPattern
RANKS, TOKENS, HIDDEN = 2, 6, 256
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Rows:
    """Every rank's rows of one call; residual and weight are equal on all ranks."""

    xs: list[torch.Tensor]
    residual: torch.Tensor
    weight: torch.Tensor


def rows_for(device: torch.device, tokens: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, BF16)

    xs = [some(tokens, HIDDEN) for _ in range(RANKS)]
    return Rows(xs, some(tokens, HIDDEN), some(HIDDEN))


def make(ranks: weft.Group, **changes: Any) -> AllReduceFusionWorkspace:
    sizes: dict[str, Any] = {
        "backend": "trtllm",
        "world_size": ranks.size,
        "rank": ranks.rank,
        "max_token_num": TOKENS,
        "hidden_dim": HIDDEN,
        "dtype": BF16,
        "group": ranks,
    }
    return create_allreduce_fusion_workspace(**{**sizes, **changes})


def same(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    assert got is not None
    assert want is not None
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(*(torch.stack([t]).flatten().view(torch.uint8) for t in (got, want)))


def poison(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    size = (*shape, dtype.itemsize)
    return torch.full(size, 0xFF, dtype=torch.uint8, device=device).view(dtype).view(shape)
