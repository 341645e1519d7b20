# SPDX-License-Identifier: Apache-2.0
"""Random weights with which every layer affects the output; equal for all servers.

An engine's own dummy weights are within 0.001, norms included. An expert's output is then about
1e-13 beside a residual of 6e-4, which no bf16 sum contains, and expert i of every rank is the same.
Here norms are 1, other weights preserve the scale of activations, and each expert has its own
values, which do not depend on the number of ranks.
"""

from __future__ import annotations

import logging
import zlib
from typing import Any

import torch

_log = logging.getLogger("weft.bench")
LIFT = 3.0  # factor for w2, because a gated product of two normal values is small
FP8_STD = 32.0  # of stored FP8 weights: far below 448, and far above what rounds to 0
BIAS = 0.02
SCALES = ("_scale_inv", "_scale")


def fill(model: Any, low: float = 0.0, high: float = 0.0, seed: int = 1234) -> None:
    """Fill every floating-point parameter of a model before the engine processes them.

    Excluded are scales: those of FP8 weights follow from the weights, and -1 in those of a KV cache
    means that the checkpoint has none.
    """
    state = model.state_dict()
    for name, param in state.items():
        if not torch.is_floating_point(param) or name.endswith(SCALES):
            continue
        data = param.data
        if "norm" in name and data.dim() == 1:
            data.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        std = deviation(name, data)
        scales = state.get(f"{name}_scale_inv")
        if scales is not None:
            scales.data.fill_(std / FP8_STD)
            std = FP8_STD
        generator = torch.Generator(device=data.device)
        base = (zlib.crc32(name.encode()) + seed) & 0x7FFFFFFF
        for begin, part in parts(module, data):
            generator.manual_seed((base + 7919 * begin) & 0x7FFFFFFF)
            normal(part, std, generator)
    _log.info("dummy weights: %d tensors of %s", len(state), type(model).__name__)


def deviation(name: str, data: torch.Tensor) -> float:
    """Return the standard deviation that preserves the scale of normalized rows."""
    if data.dim() < 2:
        return BIAS
    if "embed" in name:
        return 1.0
    return (LIFT if "w2" in name else 1.0) * data.shape[-1] ** -0.5


def parts(module: Any, data: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return separately seeded parts, an expert or a rank's shard, each with a unique number."""
    if data.dim() == 3:
        first = getattr(module, "moe_ep_rank", 0) * len(data)
        shard = 1000 * getattr(module, "moe_tp_rank", 0)
        return [(first + i + shard, data[i]) for i in range(len(data))]
    return [(100_000 * int(getattr(module, "tp_rank", 0)), data)]


def normal(data: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with normal values, also for dtypes without a random kernel."""
    if data.dtype.itemsize > 1:
        data.normal_(0.0, std, generator=generator)
        return
    most = torch.finfo(data.dtype).max
    for row in data.split(4096):  # an fp32 copy of a whole layer would not fit
        values = torch.empty(row.shape, device=row.device).normal_(0.0, std, generator=generator)
        row.copy_(values.clamp_(-most, most).to(row.dtype))
