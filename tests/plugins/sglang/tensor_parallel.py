# SPDX-License-Identifier: Apache-2.0
"""A model of the stand-in with tensor-parallel sums, and what one process makes of its tokens."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.plugins.sglang.server import enter
from weft.plugins.sglang import allreduce
from weft.plugins.sglang.hooks import SGLANG

LAYERS, HIDDEN = 3, 64
LIMIT = 16  # the stand-in's FUSE_ALLREDUCE_MAX_BATCH_SIZE
# What a layer asks before it leaves its sum to the next norm, by version.
GATES = {
    "0.5.17": ("communicator", "apply_flashinfer_allreduce_fusion"),
    "0.5.23": ("layer_boundary.residual.add_norm", "flashinfer_ar_fusion_applies"),
}


def state() -> Any:
    """What the stand-in keeps: groups, and ways in which they summed."""
    return importlib.import_module("sglang.srt.runtime_context").STATE


class Model(nn.Module):
    """Layers of two sums: what `attention` and `experts` make of normed rows is a rank's part."""

    def __init__(self, dtype: torch.dtype, gemma: bool, **norm: Any) -> None:
        from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm

        super().__init__()
        kind, draw = GemmaRMSNorm if gemma else RMSNorm, torch.Generator().manual_seed(5)
        self.norms = [
            kind((torch.rand(HIDDEN, generator=draw) + 0.5).to(dtype), 1e-5, **norm)
            for _ in range(2 * LAYERS + 1)
        ]
        size = dist.get_world_size()
        whole = torch.randn(2 * LAYERS, size, HIDDEN, HIDDEN, generator=draw) / HIDDEN**0.5
        self.whole = whole.to(dtype)
        self.parts = self.whole[:, dist.get_rank()]
        module, name = GATES[SGLANG.installed()]
        self.gates = importlib.import_module(f"sglang.srt.layers.{module}"), name

    def forward(
        self, x: torch.Tensor, forward_batch: Any = None, extra: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As SGLang's layers: an attention's sum is made at once, an MLP's left to the next norm.

        extra: added to the residual of the first sum, where it is fused.
        """
        gate, groups, last = getattr(*self.gates), state().groups, len(self.parts) - 1
        x = groups["tp"].all_reduce(x / groups["tp"].world_size)  # an embedding's
        residual, x = x.clone(), self.norms[0].forward(x)
        for i, part in enumerate(self.parts):
            y = x @ part
            name = "attn" if i % 2 == 0 else "moe"
            if gate(len(y)) and i != last:
                x, residual = self.norms[i + 1].forward_with_allreduce_fusion(
                    y, residual, extra if i == 0 else None, use_attn_tp_group=name == "attn"
                )
            else:
                added = residual if extra is None or i else residual + extra
                x, residual = self.norms[i + 1].forward(groups[name].all_reduce(y), added)
        return x

    def alone(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        """The same by plain torch, in this process alone and in fp32."""
        residual, x = x.float(), self.norms[0].forward(x.float())
        for i, parts in enumerate(self.whole.float()):
            y = sum(x @ part for part in parts)
            assert isinstance(y, torch.Tensor)
            residual = residual + y + (0 if extra is None or i else extra.float())
            x = self.norms[i + 1].forward(residual)
        return x


def join(group: weft.Group, moe: list[list[int]] | None = None) -> None:
    """The groups of plain tensor parallelism over the world; `moe` splits the experts' sums."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    world = GroupCoordinator(list(range(group.size)), group.process_group())
    groups = {"tp": world, "attn": world, "ep": GroupCoordinator([group.rank], None), "moe": world}
    for ranks in moe or []:
        made = dist.new_group(ranks)
        if group.rank in ranks:
            groups["moe"] = GroupCoordinator(ranks, made)
    state().groups = groups


def make_runner(
    group: weft.Group,
    dtype: torch.dtype,
    gemma: bool = False,
    *,
    release: str = "0.5.17",
    moe: list[list[int]] | None = None,
    backend: str = "none",
    **norm: Any,
) -> Any:
    """A ModelRunner that has not loaded its model yet, with weft's hooks on SGLang."""
    os.environ[allreduce.SWITCH] = "1"
    enter(release)
    join(group, moe)
    # In a test nobody may end the process that started the ranks.
    setattr(allreduce, "end_server", lambda parent: lambda: None)  # noqa: B010
    from sglang.srt import server_args
    from sglang.srt.model_executor.model_runner import ModelRunner

    model = Model(dtype, gemma, **norm)
    known = SimpleNamespace(architectures=["Fusing"])
    args = server_args.parse("--moe-a2a-backend", backend)
    return ModelRunner(args, lambda: model, hidden_size=HIDDEN, dtype=dtype, hf_config=known)


def step(runner: Any, x: torch.Tensor) -> torch.Tensor:
    """A forward pass."""
    from sglang.srt.model_executor.model_runner import batch

    out: torch.Tensor = runner.forward(batch(x, None))
    return out
