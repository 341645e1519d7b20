# SPDX-License-Identifier: Apache-2.0
"""One call of each operator and of a layer, which two tests open alone or as leases."""

from __future__ import annotations

from typing import Any

import torch

import weft
from weft.moe import Expert, ExpertWeights, MoEConfig, Routing

HIDDEN, TOKENS, TOP_K, EXPERTS = 64, 4, 2, 6
SIZES: dict[str, Any] = {
    **{"max_tokens": TOKENS, "top_k": TOP_K, "num_experts": EXPERTS, "hidden": HIDDEN}
}
CONFIG = MoEConfig(hidden=HIDDEN, intermediate=32, routing=Routing(EXPERTS, TOP_K))


def open_kind(
    group: weft.Group, kind: str, *, lease: bool = False, seed: int = 0, **options: Any
) -> Any:
    """Open an operator, or a layer of experts from a seed; kind: a class, and a layer's mode."""
    name, _, mode = kind.partition(", ")
    args: tuple[Any, ...] = ()
    if name == "MoE":

        def weights(local: tuple[int, ...]) -> ExpertWeights:
            experts = [Expert.seeded(CONFIG, seed + e) for e in local]
            return ExpertWeights.stack(CONFIG, experts, group.device)

        args = CONFIG, weights
        options |= {"max_tokens": TOKENS} | ({"mode": mode} if mode else {})
    elif name == "AllReduce":
        options |= {"max_tokens": TOKENS, "hidden": HIDDEN}
    else:
        options |= SIZES | ({"quantize": None} if name == "LowLatencyAllToAll" else {})
    cls = getattr(weft, name)
    return weft.lease(group, cls, *args, **options) if lease else cls(group, *args, **options)


def call(
    op: Any,
    x: torch.Tensor,
    ids: torch.Tensor,
    *,
    factor: int = 1,
    rows: int | None = None,
    eps: float = 1e-6,
) -> Any:
    """Run one round or sum; experts of an exchange multiply their rows by `factor`."""
    weights = torch.ones(ids.shape, device=x.device)
    match getattr(op, "operator", op):
        case weft.AllToAll() as a2a:
            y = weft.reference.identity_experts(a2a.dispatch(x, ids, rows=rows), x.dtype)
            return a2a.combine(y * factor)
        case weft.LowLatencyAllToAll() as low:
            got = low.dispatch(x, ids, weights)
            return low.combine(got.x * factor, ids, weights, got.handle)
        case weft.AllReduce() as reduce:
            return reduce.fused(x, weight=torch.ones_like(x[0]), eps=eps).norm
        case layer:
            return layer(x, topk_ids=ids, topk_weights=weights, rows=rows)
