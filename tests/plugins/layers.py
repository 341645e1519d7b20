# SPDX-License-Identifier: Apache-2.0
"""One layer of experts of transformers' shape on every rank, without the import of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft

if TYPE_CHECKING:
    from weft.plugins.transformers.experts import ExpertParallel

HIDDEN, EXPERTS, TOP_K, MAX_TOKENS = 64, 8, 3, 16


class Experts(nn.Module):
    """One matrix an expert; the id behind the last one is nobody's, as in transformers."""

    def __init__(self, local: range, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        whole = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator) / 8
        self.num_experts, self.rows = len(local), 0
        self.matrices = whole[local.start : local.stop].to(device, dtype)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        each = torch.einsum("th,ehf->tef", x.float(), self.matrices.float())
        ends = each.new_zeros(len(x), 1, each.shape[2])
        chosen = torch.cat((each, ends), 1).gather(1, ids[..., None].expand(-1, -1, each.shape[2]))
        return (chosen * weights[..., None]).sum(1).to(x.dtype)


def layer(
    group: weft.Group,
    *,
    replicas: int = 1,
    dtype: torch.dtype = torch.float32,
    experts: Any = None,
    timeout: float = 600.0,
) -> ExpertParallel:
    """The layer of a model whose ranks are so many replicas: each has a batch of its own."""
    from weft.plugins.transformers.experts import ExpertParallel

    group.process_group()
    size, kind = group.size, group.device.type
    dense = init_device_mesh(kind, (replicas, size // replicas), mesh_dim_names=("fsdp", "tp"))
    expert = init_device_mesh(kind, (1, size), mesh_dim_names=("efsdp", "ep"))
    mine = range(EXPERTS * group.rank // size, EXPERTS * (group.rank + 1) // size)
    module = experts or Experts(mine, group.device, dtype)
    return ExpertParallel(module, expert["ep"], dense["tp"], max_tokens=MAX_TOKENS, timeout=timeout)


def batch(tokens: int, seed: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x, ids and weights; the weights are of float32, as routers make them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(like)
    weights, ids = torch.rand(tokens, EXPERTS, generator=generator).softmax(1).topk(TOP_K)
    return x, ids.to(like.device), weights.to(like.device)
