"""What an MoE layer means, in plain torch on one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from weft.ops.placement import Placement

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`gate * sigmoid(gate) * up`."""
    return gate * gate.sigmoid() * up


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """GPT-OSS: `g * sigmoid(1.702 g) * (u + 1)`, g at most 7, u in -7..7."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * (1.702 * gate).sigmoid() * (up + 1.0)


def moe_layer(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gating: Gate = swiglu,
    weigh_input: bool = False,
    shared: torch.Tensor | None = None,
    placement: Placement | None = None,
) -> torch.Tensor:
    """float32 `[tokens, hidden]`: `sum over k of weight[k] * expert[ids[k]](x) + shared`.

    x: `[tokens, hidden]`.   topk_ids: integers `[tokens, top_k]`, -1 for none.
    topk_weights: float32 `[tokens, top_k]`.
    gate_up: ALL experts' `[num_experts, 2 * intermediate, hidden]`, the gate's rows first.
    down: `[num_experts, hidden, intermediate]`.   biases: `[num_experts, columns]`, or None.
    weigh_input: weights multiply the experts' inputs, not their results.
    shared: `[tokens, hidden]`, what a shared expert made of x, or None.
    placement: round each rank's sum to x's dtype, as it goes over the wire; None: round nothing.

        h = x @ gate_up[e].T + gate_up_bias[e];  y = gating(gate(h), up(h)) @ down[e].T + down_bias

    All arithmetic is in float32 and in the order of the experts.
    """
    ranks = 1 if placement is None else max(placement.ranks) + 1
    sums = torch.zeros((ranks, *x.shape), dtype=torch.float32, device=x.device)
    for expert in range(len(gate_up)):
        token, k = (topk_ids == expert).nonzero(as_tuple=True)
        rows, weight = x[token].float(), topk_weights[token, k, None]
        if weigh_input:
            rows = (rows * weight).to(x.dtype).float()
        bias = None if gate_up_bias is None else gate_up_bias[expert].float()
        h = functional.linear(rows, gate_up[expert].float(), bias)
        bias = None if down_bias is None else down_bias[expert].float()
        y = functional.linear(gating(*h.chunk(2, dim=-1)), down[expert].float(), bias)
        owner = 0 if placement is None else placement.ranks[expert]
        # A token has an expert once at most, so no row is added to twice.
        sums[owner, token] += y if weigh_input else y * weight
    if placement is not None:
        sums = sums.to(x.dtype).float()
    total = torch.zeros_like(sums[0])
    for rank in range(ranks):
        total = total + sums[rank]
    return total if shared is None else total + shared.float()
