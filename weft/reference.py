# SPDX-License-Identifier: Apache-2.0
"""Reference implementations in plain torch, which specify each operation.

Tests compare operators against them. Arguments are lists of the tensors of all ranks, indexed by
rank. Results are on the device of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from weft.allreduce.reference import allreduce_fused, finalize_moe
from weft.alltoall.received import Received
from weft.fp8 import dequantize, quantize
from weft.placement import Placement
from weft.runtime.ambient import disable_autocast

__all__ = [
    "allreduce_fused",
    "clamped_swiglu",
    "combine",
    "dequantize",
    "dispatch",
    "expert_load",
    "finalize_moe",
    "identity_experts",
    "identity_round_trip",
    "moe_layer",
    "quantize",
    "relu2",
    "swiglu",
]

Activation = Callable[[torch.Tensor], torch.Tensor]
Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@disable_autocast
def dispatch(
    payloads: Sequence[Sequence[torch.Tensor]],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor | None],
    placement: Placement,
    *,
    rank: int,
    max_tokens: int,
    stats: Sequence[torch.Tensor] | None = None,
) -> Received:
    """Return the tokens that `rank` receives from all ranks.

    Slots without a token for the rank are zero here; in a real dispatch their payload is undefined.

    Args:
        payloads: For each rank, its payload tensors `[tokens, ...]`.
        topk_ids: For each rank, int32 or int64 `[tokens, top_k]`; ids out of range count as -1.
        topk_weights: For each rank, float32 `[tokens, top_k]`, or None for ones.
        stats: For each rank, int32 `[n]`, or None without statistics.
    """
    ep_size, top_k, device = len(topk_ids), topk_ids[0].shape[1], topk_ids[0].device
    # The extra last entry maps id -1 to local id -1.
    local = torch.tensor((*placement.local, -1), dtype=torch.int64, device=device)
    ids = torch.full((ep_size, max_tokens, top_k), -1, dtype=torch.int32, device=device)
    weights = torch.zeros((ep_size, max_tokens, top_k), dtype=torch.float32, device=device)
    planes = tuple(
        torch.zeros((ep_size, max_tokens, *p.shape[1:]), dtype=p.dtype, device=device)
        for p in payloads[0]
    )
    for source in range(ep_size):
        tokens = topk_ids[source].shape[0]
        valid_ids, is_local = _local_choices(topk_ids[source], placement, rank)
        scale = topk_weights[source]
        if scale is None:
            scale = torch.ones(valid_ids.shape, dtype=torch.float32, device=device)
        ids[source, :tokens] = torch.where(is_local, local[valid_ids], -1).int()
        weights[source, :tokens] = torch.where(is_local, scale, 0.0)
        is_sent = is_local.any(dim=1)
        for plane, tensor in zip(planes, payloads[source], strict=True):
            plane[source, :tokens][is_sent] = tensor[is_sent]
    counts = torch.tensor([t.shape[0] for t in topk_ids], dtype=torch.int32, device=device)
    gathered = None if stats is None else torch.stack(tuple(stats))
    return Received(planes, ids, weights, counts, gathered)


def expert_load(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the number of times that each expert was chosen, as int32 `[num_experts]`.

    `bincount` synchronizes with the device. In a captured graph, use
    `zeros(num_experts + 1).scatter_add_` instead and count invalid ids in the last entry.

    Args:
        topk_ids: int32 or int64 `[tokens, top_k]`; ids out of range are not counted.
        num_experts: Number of experts.
    """
    valid = (topk_ids >= 0) & (topk_ids < num_experts)
    return torch.bincount(topk_ids[valid], minlength=num_experts).int()


@disable_autocast
def combine(
    rows: Sequence[torch.Tensor],
    carries: Sequence[torch.Tensor],
    *,
    add: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    hosts: Sequence[Sequence[int]] | None = None,
    combine_dtype: str | None = None,
) -> torch.Tensor:
    """Return the sum of each token's rows over ranks, plus `add`.

    The sum is in fp32, starts at +0 and adds rows in rank order, then `add`. It is rounded once, to
    nearest even.

    Args:
        rows: For each rank, `[tokens, hidden]`: the results of its experts for one source's tokens.
        carries: For each rank, bool `[tokens]`: whether the token was sent to it. Other rows are
            not read.
        add: `[tokens, hidden]` to add, or None.
        dtype: Type of the result. Default: that of the rows.
        hosts: The ranks of each host (`Group.host_ranks`), with several hosts. Each host first sums
            over its own ranks and rounds to dtype or, with combine_dtype="fp8", to FP8 and back.
            These partial sums are then added in the order of hosts.
        combine_dtype: "fp8" or None, see `hosts`.
    """
    result = dtype or rows[0].dtype
    if hosts is not None and len(hosts) > 1:
        parts = []
        for ranks in hosts:
            part = combine(
                [rows[rank] for rank in ranks], [carries[rank] for rank in ranks], dtype=result
            )
            parts.append(dequantize(*quantize(part, "fp8")) if combine_dtype == "fp8" else part)
        all_tokens = torch.ones_like(carries[0])  # a host without rows of a token adds 0
        return combine(parts, [all_tokens] * len(parts), add=add, dtype=result)
    total = torch.zeros(rows[0].shape, dtype=torch.float32, device=rows[0].device)
    for row, carried in zip(rows, carries, strict=True):
        total = torch.where(carried[:, None], total + row.float(), total)
    if add is not None:
        total = total + add.float()
    return total.to(result)


@disable_autocast
def identity_experts(received: Received, dtype: torch.dtype) -> torch.Tensor:
    """Return the result of identity experts: x times the sum of its local weights.

    Weights are added in fp32 in top-k order and the product is rounded once, so that results can be
    compared exactly. Rows without a token are NaN, so that a combine that reads one returns NaN.
    """
    total = torch.zeros(received.ids.shape[:2], dtype=torch.float32, device=received.ids.device)
    for k in range(received.ids.shape[2]):
        total = torch.where(received.ids[..., k] >= 0, total + received.weights[..., k], total)
    y = (received.x.float() * total[..., None]).to(dtype)
    carries = (received.ids >= 0).any(dim=2, keepdim=True)
    return torch.where(carries, y, torch.full((), float("nan"), dtype=dtype, device=y.device))


@disable_autocast
def identity_round_trip(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    placement: Placement,
    *,
    ranks: int,
    add: torch.Tensor | None = None,
    combine_dtype: str | None = None,
    hosts: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """Return the result of dispatch, `identity_experts` and combine for one rank's x.

    The arguments are the tensors of that rank only, so each rank can check its own result. The
    result is bitwise equal to that of a real exchange.
    """
    rows, carries = [], []
    for rank in range(ranks):
        _, is_local = _local_choices(topk_ids, placement, rank)
        total = torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
        for k in range(topk_ids.shape[1]):
            weight = 1.0 if topk_weights is None else topk_weights[:, k]
            total = torch.where(is_local[:, k], total + weight, total)
        row = (x.float() * total[:, None]).to(x.dtype)
        rows.append(dequantize(*quantize(row, "fp8")) if combine_dtype == "fp8" else row)
        carries.append(is_local.any(dim=1))
    return combine(rows, carries, add=add, dtype=x.dtype, hosts=hosts, combine_dtype=combine_dtype)


def _local_choices(
    topk_ids: torch.Tensor, placement: Placement, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids with invalid ones replaced by -1, and a mask of the experts of `rank`."""
    ids = topk_ids.long()
    valid_ids = torch.where((ids >= 0) & (ids < len(placement.ranks)), ids, -1)
    # The extra last entry is the owner of id -1: no rank.
    owner = torch.tensor((*placement.ranks, -1), dtype=torch.int64, device=ids.device)
    return valid_ids, owner[valid_ids] == rank


@disable_autocast
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `gate * sigmoid(gate) * up`."""
    return gate * gate.sigmoid() * up


@disable_autocast
def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return GPT-OSS's gating, `g * sigmoid(1.702 g) * (u + 1)`, of clamped inputs.

    The gate g is clamped to at most 7, and u to -7..7.
    """
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * (1.702 * gate).sigmoid() * (up + 1.0)


@disable_autocast
def relu2(up: torch.Tensor) -> torch.Tensor:
    """Return `max(up, 0) ** 2`, the activation of Nemotron-3's experts, which have no gate."""
    return up.relu().square()


@disable_autocast
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
    activation: Activation | None = None,
    weigh_input: bool = False,
    shared: torch.Tensor | None = None,
    placement: Placement | None = None,
    hosts: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """Return the output of an MoE layer as float32 `[tokens, hidden]`.

        h = x @ gate_up[e].T + gate_up_bias[e];  y = gating(gate(h), up(h)) @ down[e].T + down_bias

    All arithmetic is in float32, in ascending order of experts.

    Args:
        x: `[tokens, hidden]`.
        topk_ids: Integers `[tokens, top_k]`, -1 for none.
        topk_weights: float32 `[tokens, top_k]`.
        gate_up: `[num_experts, 2 * intermediate, hidden]` of all ranks' experts, gate rows first;
            with `activation` up alone, `[num_experts, intermediate, hidden]`.
        down: `[num_experts, hidden, intermediate]`.
        gate_up_bias: `[num_experts, rows of gate_up]`, or None.
        down_bias: `[num_experts, hidden]`, or None.
        gating: Function of the gate and up halves.
        activation: Function of up, such as `relu2`, for experts without a gate.
        weigh_input: Whether to multiply the experts' inputs, rather than their results, by the
            weights.
        shared: `[tokens, hidden]`, a shared expert's result, or None.
        placement: Rounds each rank's sum to x's dtype, as combine does. None: no rounding.
        hosts: Ranks of each host, with a placement: also rounds each host's sum of these.
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
        act = gating(*h.chunk(2, dim=-1)) if activation is None else activation(h)
        y = functional.linear(act, down[expert].float(), bias)
        owner = 0 if placement is None else placement.ranks[expert]
        # A token chooses an expert at most once, so the rows are distinct.
        sums[owner, token] += y if weigh_input else y * weight
    if placement is not None:
        sums = sums.to(x.dtype).float()
    total = torch.zeros_like(sums[0])
    for host_ranks in [range(ranks)] if hosts is None else hosts:
        part = torch.zeros_like(total)
        for rank in host_ranks:
            part = part + sums[rank]
        total = total + (part if hosts is None or len(hosts) == 1 else part.to(x.dtype).float())
    return total if shared is None else total + shared.float()
