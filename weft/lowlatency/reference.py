# SPDX-License-Identifier: Apache-2.0
"""Reference implementation of the low-latency all-to-all in torch: specification and test oracle.

Tensors of all ranks are lists indexed by rank; results are on the device of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.fp8 import block_amax, dequantize, power_above, power_of_two, quantize
from weft.placement import Placement
from weft.reference import combine as add_hosts
from weft.runtime.ambient import disable_autocast


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The rows of one rank's experts, as in `ExpertRows`, with zeros in undefined rows.

    scales are float32 and row-major for every layout; None without quantisation.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    source: torch.Tensor
    ranges: torch.Tensor


def mask_invalid_ids(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return int64 ids `[tokens, top_k]`, with -1 for out-of-range and repeated ones."""
    ids = topk_ids.long()
    valid = torch.where((ids >= 0) & (ids < num_experts), ids, -1)
    for k in range(1, valid.shape[1]):
        repeats = (valid[:, :k] == valid[:, k : k + 1]).any(dim=1)
        valid[:, k] = torch.where(repeats, -1, valid[:, k])
    return valid


def compute_delivered_rows(
    x: torch.Tensor, kind: str | None, group_size: int, scale: str, recipe: str = "weft"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the values that dispatch delivers, and scales `[tokens, hidden / group_size]`.

    "ue8m0" scales are powers of two, the smallest that scale a block to at most 448. Rows that are
    not quantised are delivered unchanged, except that a NaN with all bits set loses its sign bit.

    Args:
        x: `[tokens, hidden]`.
        kind: "fp8" or None.
        group_size: Columns that share a scale.
        scale: Layout of the scales.
        recipe: Arithmetic. "deep_ep": amax is at least 1e-4, scale = amax * fl(1 / 448), q =
            round(x * (448 / amax)) (its csrc/kernels/legacy/utils.cuh). "triton_dist": the same
            scale, q = round(x / scale), 0 if the scale is 0 (its low_latency_all_to_all_v2.py);
            kernels compute that quotient to within two ulp.
    """
    if kind is None:
        words = {2: torch.int16, 4: torch.int32}[x.element_size()]
        bits = x.view(words)
        return torch.where(bits == -1, torch.iinfo(words).max, bits).view(x.dtype), None
    if recipe != "weft":
        return _quantize_by_recipe(recipe, x, group_size, scale)
    if scale == "ue8m0":
        values, powers = quantize(x, "mxfp8", group_size)
        return values, powers.float()
    return quantize(x, "fp8", group_size)


def _quantize_by_recipe(
    recipe: str, x: torch.Tensor, group_size: int, scale: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 values and scales by the arithmetic of another library."""
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    amax, has_nan = block_amax(blocks)
    if recipe == "deep_ep":
        amax = torch.maximum(amax, torch.full_like(amax, 1e-4))
    scales = amax * torch.full_like(amax, 1 / 448)
    if recipe == "triton_dist":
        q = blocks / torch.where(scales == 0, torch.inf, scales)[..., None]
    elif scale == "ue8m0":
        power = power_above(amax)
        scales = power_of_two(power)
        q = blocks * power_of_two(-power)[..., None]
    else:
        q = blocks * (torch.full_like(amax, 448.0) / amax)[..., None]
    q = torch.where(has_nan[..., None], torch.nan, q).clamp(-448.0, 448.0)
    return q.to(torch.float8_e4m3fn).flatten(-2), torch.where(has_nan, torch.nan, scales)


@disable_autocast
def dispatch(
    x: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    placement: Placement,
    *,
    rank: int,
    max_tokens: int,
    quantize: str | None = "fp8",
    group_size: int = 128,
    scale: str = "fp32_row",
    recipe: str = "weft",
) -> ExpectedRows:
    """Return the rows of the experts of `rank`, ordered by source rank and then token.

    Args:
        x: `[tokens, hidden]` of each rank.
        topk_ids: `[tokens, top_k]` of each rank.
        placement: Rank of each expert.
        rank: Rank that receives the rows.
        max_tokens: As in `LowLatencyAllToAll`.
        quantize: As in `LowLatencyAllToAll`.
        group_size: As in `LowLatencyAllToAll`.
        scale: As in `LowLatencyAllToAll`.
        recipe: As in `compute_delivered_rows`.
    """
    ranks, experts = len(x), placement.experts_of(rank)
    rows, device = ranks * max_tokens, x[0].device
    delivered = [
        compute_delivered_rows(tokens, quantize, group_size, scale, recipe) for tokens in x
    ]
    values = delivered[0][0]
    out = torch.zeros((len(experts), rows, values.shape[1]), dtype=values.dtype, device=device)
    blocks = 0 if delivered[0][1] is None else delivered[0][1].shape[1]
    scales = torch.zeros((len(experts), rows, blocks), dtype=torch.float32, device=device)
    source = torch.zeros((len(experts), rows), dtype=torch.int32, device=device)
    ranges = torch.zeros((len(experts), ranks, 2), dtype=torch.int32, device=device)
    for e, expert in enumerate(experts):
        begin = 0
        for s in range(ranks):
            ids = mask_invalid_ids(topk_ids[s], len(placement.ranks))
            tokens = (ids == expert).any(dim=1).nonzero()[:, 0]
            end = begin + len(tokens)
            out.view(torch.uint8)[e, begin:end] = delivered[s][0].view(torch.uint8)[tokens]
            source_scales = delivered[s][1]
            if source_scales is not None:
                scales[e, begin:end] = source_scales[tokens]
            source[e, begin:end] = (s * max_tokens + tokens).int()
            ranges[e, s, 0], ranges[e, s, 1] = begin, len(tokens)
            begin = end
    counts = ranges[..., 1].sum(dim=1).int()
    return ExpectedRows(out, scales if quantize else None, counts, source, ranges)


@disable_autocast
def combine(
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    placement: Placement,
    *,
    reduce: str = "sender",
    combine_dtype: str | None = None,
    add: torch.Tensor | None = None,
    hosts: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """Return the sums of one rank's tokens, `[tokens, hidden]` in the dtype of rows.

    With reduce="sender", for each rank the sum over its choices k of weight * row starts at 0, in
    top-k order. Each product and sum is rounded to fp32, and the rank's sum once to dtype (or FP8).
    These sums are added in rank order. With reduce="receiver", one sum goes over all k in the same
    way; with combine_dtype="fp8", its rows are quantised first. Then `add` is added, and the result
    is rounded once to dtype. With several hosts, the same is done for the experts of each host,
    rounded to dtype (or FP8), and these sums are added in the order of hosts.

    Args:
        rows: `[tokens, top_k, hidden]`, the expert's result for each choice; rows of ids of -1 are
            not read.
        topk_ids: `[tokens, top_k]`.
        topk_weights: float32 `[tokens, top_k]`. None means ones.
        placement: Rank of each expert.
        reduce: As in `LowLatencyAllToAll`.
        combine_dtype: As in `LowLatencyAllToAll`.
        add: `[tokens, hidden]` added to the sum, or None.
        hosts: Ranks of each host, if there are several.
    """
    if hosts is not None and len(hosts) > 1:
        options = {"reduce": reduce, "combine_dtype": combine_dtype}
        parts = []
        for ranks in hosts:
            is_on_host = torch.tensor([*(rank in ranks for rank in placement.ranks), False])
            mask = is_on_host.to(topk_ids.device)[mask_invalid_ids(topk_ids, len(placement.ranks))]
            ids = torch.where(mask, topk_ids, -1)
            part = combine(rows, ids, topk_weights, placement, **options)  # type: ignore[arg-type]
            parts.append(_apply_transfer_rounding(part, combine_dtype))
        all_rows = [torch.ones(len(rows), dtype=torch.bool, device=rows.device)] * len(parts)
        return add_hosts(parts, all_rows, add=add, dtype=rows.dtype)
    ids = mask_invalid_ids(topk_ids, len(placement.ranks))
    tokens, top_k = ids.shape
    weights = torch.ones((tokens, top_k), dtype=torch.float32, device=rows.device)
    if topk_weights is not None:
        weights = topk_weights
    owners = torch.tensor((*placement.ranks, -1), dtype=torch.int64, device=rows.device)
    owner = owners[ids]
    total = torch.zeros((tokens, rows.shape[2]), dtype=torch.float32, device=rows.device)
    if reduce == "receiver":
        for k in range(top_k):
            row = _apply_transfer_rounding(rows[:, k], combine_dtype)
            valid = (ids[:, k] >= 0)[:, None]
            total = torch.where(valid, total + weights[:, k : k + 1] * row, total)
    else:
        for rank in range(max(placement.ranks) + 1):
            part = torch.zeros_like(total)
            for k in range(top_k):
                is_on_rank = (owner[:, k] == rank)[:, None]
                product = weights[:, k : k + 1] * rows[:, k].float()
                part = torch.where(is_on_rank, part + product, part)
            if combine_dtype != "fp8":
                part = part.to(rows.dtype)
            has_rows = (owner == rank).any(dim=1)[:, None]
            total = torch.where(
                has_rows, total + _apply_transfer_rounding(part, combine_dtype), total
            )
    if add is not None:
        total = total + add.float()
    return total.to(rows.dtype)


def unpack_scales(scales: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return scales in any layout of dispatch as float32 `[..., R, blocks]`."""
    if scales.dtype == torch.float32:
        return scales
    # Shifts, because a view as bytes needs row-major words, and inductor may keep column-major.
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)
    scale_bytes = (scales.unsqueeze(-1) >> shifts & 0xFF).flatten(-2)[..., :blocks]
    return scale_bytes.to(torch.uint8).view(torch.float8_e8m0fnu).float()


def _apply_transfer_rounding(rows: torch.Tensor, combine_dtype: str | None) -> torch.Tensor:
    """Return rows as float32 as they arrive at their owner."""
    return dequantize(*quantize(rows, "fp8")) if combine_dtype == "fp8" else rows.float()
