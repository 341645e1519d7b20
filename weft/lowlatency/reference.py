# SPDX-License-Identifier: Apache-2.0
"""What the low-latency all-to-all means, in plain torch: the specification, and the tests' oracle.

All ranks' tensors are given as lists indexed by rank; results are on the device of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.fp8 import block_amax, dequantize, power_above, power_of_two, quantize
from weft.placement import Placement
from weft.reference import combine as add_hosts
from weft.runtime.ambient import without_autocast


@dataclass(frozen=True, slots=True)
class Expected:
    """What one rank's experts get; as `ExpertRows`, with zeros where nothing is defined.

    scales: by row, float32, whatever the layout; None without quantisation.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    source: torch.Tensor
    ranges: torch.Tensor


def choices(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64 `[tokens, top_k]`: the ids, -1 for what is no expert or appears earlier in its row."""
    ids = topk_ids.long()
    known = torch.where((ids >= 0) & (ids < num_experts), ids, -1)
    for k in range(1, known.shape[1]):
        repeats = (known[:, :k] == known[:, k : k + 1]).any(dim=1)
        known[:, k] = torch.where(repeats, -1, known[:, k])
    return known


def sent(
    x: torch.Tensor, kind: str | None, group_size: int, scale: str, recipe: str = "weft"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A token's row as it arrives: numbers, and float32 scales `[tokens, hidden / group_size]`.

    "ue8m0" scales are powers of two, the smallest that bring a block down to 448 or less. Rows that
    are not quantised arrive as they are, but that a NaN whose bits are all ones has no sign.

    recipe: whose arithmetic. "deep_ep": amax counts as 1e-4 at least, scale = amax * fl(1 / 448),
        q = round(x * (448 / amax)) (its csrc/kernels/legacy/utils.cuh). "triton_dist": the same
        scale, q = round(x / scale), zeros where the scale is 0 (its low_latency_all_to_all_v2.py);
        kernels have that quotient within two units in the last place.
    """
    if kind is None:
        words = {2: torch.int16, 4: torch.int32}[x.element_size()]
        bits = x.view(words)
        return torch.where(bits == -1, torch.iinfo(words).max, bits).view(x.dtype), None
    if recipe != "weft":
        return _sent_as(recipe, x, group_size, scale)
    if scale == "ue8m0":
        numbers, powers = quantize(x, "mxfp8", group_size)
        return numbers, powers.float()
    return quantize(x, "fp8", group_size)


def _sent_as(
    recipe: str, x: torch.Tensor, group_size: int, scale: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 rows and scales by the arithmetic of another library."""
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    amax, broken = block_amax(blocks)
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
    q = torch.where(broken[..., None], torch.nan, q).clamp(-448.0, 448.0)
    return q.to(torch.float8_e4m3fn).flatten(-2), torch.where(broken, torch.nan, scales)


@without_autocast
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
) -> Expected:
    """What the experts of `rank` get: rows in the order of source rank, then token.

    x: for each rank, `[tokens, hidden]`.   topk_ids: for each rank, `[tokens, top_k]`.
    """
    ranks, experts = len(x), placement.experts_of(rank)
    rows, device = ranks * max_tokens, x[0].device
    arriving = [sent(tokens, quantize, group_size, scale, recipe) for tokens in x]
    numbers = arriving[0][0]
    out = torch.zeros((len(experts), rows, numbers.shape[1]), dtype=numbers.dtype, device=device)
    blocks = 0 if arriving[0][1] is None else arriving[0][1].shape[1]
    scales = torch.zeros((len(experts), rows, blocks), dtype=torch.float32, device=device)
    source = torch.zeros((len(experts), rows), dtype=torch.int32, device=device)
    ranges = torch.zeros((len(experts), ranks, 2), dtype=torch.int32, device=device)
    for e, expert in enumerate(experts):
        at = 0
        for s in range(ranks):
            chosen = choices(topk_ids[s], len(placement.ranks))
            tokens = (chosen == expert).any(dim=1).nonzero()[:, 0]
            until = at + len(tokens)
            out.view(torch.uint8)[e, at:until] = arriving[s][0].view(torch.uint8)[tokens]
            brought = arriving[s][1]
            if brought is not None:
                scales[e, at:until] = brought[tokens]
            source[e, at:until] = (s * max_tokens + tokens).int()
            ranges[e, s, 0], ranges[e, s, 1] = at, len(tokens)
            at = until
    counts = ranges[..., 1].sum(dim=1).int()
    return Expected(out, scales if quantize else None, counts, source, ranges)


@without_autocast
def combine(
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    placement: Placement,
    *,
    reduce: str = "receiver",
    combine_dtype: str | None = None,
    add: torch.Tensor | None = None,
    hosts: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """What one rank's tokens get, `[tokens, hidden]` in the dtype of rows.

    rows: `[tokens, top_k, hidden]`, what the expert of each choice made of the token; rows of
    choices that are none are not read.

    receiver: `sum over k of weight * row`, each product and sum rounded to fp32, from 0 in top-k
    order; with combine_dtype="fp8", row is what its FP8 reads back as. sender: the same sum over
    the choices of each rank, rounded to dtype (or FP8), and the sum of these in rank order. Then
    `add`, and one rounding to dtype.

    hosts: the ranks of each host, where there are several: the same for the experts of each host,
        rounded to dtype (or FP8), and the sum of these in the order of hosts.
    """
    if hosts is not None and len(hosts) > 1:
        how = {"reduce": reduce, "combine_dtype": combine_dtype}
        parts = []
        for ranks in hosts:
            held = torch.tensor([*(rank in ranks for rank in placement.ranks), False])
            here = held.to(topk_ids.device)[choices(topk_ids, len(placement.ranks))]
            own = torch.where(here, topk_ids, -1)
            part = combine(rows, own, topk_weights, placement, **how)  # type: ignore[arg-type]
            parts.append(_travelled(part, combine_dtype))
        every = [torch.ones(len(rows), dtype=torch.bool, device=rows.device)] * len(parts)
        return add_hosts(parts, every, add=add, dtype=rows.dtype)
    chosen = choices(topk_ids, len(placement.ranks))
    tokens, top_k = chosen.shape
    weights = torch.ones((tokens, top_k), dtype=torch.float32, device=rows.device)
    if topk_weights is not None:
        weights = topk_weights
    owners = torch.tensor((*placement.ranks, -1), dtype=torch.int64, device=rows.device)
    owner = owners[chosen]
    total = torch.zeros((tokens, rows.shape[2]), dtype=torch.float32, device=rows.device)
    if reduce == "receiver":
        for k in range(top_k):
            row = _travelled(rows[:, k], combine_dtype)
            here = (chosen[:, k] >= 0)[:, None]
            total = torch.where(here, total + weights[:, k : k + 1] * row, total)
    else:
        for rank in range(max(placement.ranks) + 1):
            part = torch.zeros_like(total)
            for k in range(top_k):
                here = (owner[:, k] == rank)[:, None]
                product = weights[:, k : k + 1] * rows[:, k].float()
                part = torch.where(here, part + product, part)
            if combine_dtype != "fp8":
                part = part.to(rows.dtype)
            comes = (owner == rank).any(dim=1)[:, None]
            total = torch.where(comes, total + _travelled(part, combine_dtype), total)
    if add is not None:
        total = total + add.float()
    return total.to(rows.dtype)


def unpack_scales(scales: torch.Tensor, blocks: int) -> torch.Tensor:
    """float32 `[..., R, blocks]` of scales in any layout that dispatch returns."""
    if scales.dtype == torch.float32:
        return scales
    # By shifts: a view of words as bytes needs them in rows, and inductor may keep the columns.
    places = torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)
    bytes_ = (scales.unsqueeze(-1) >> places & 0xFF).flatten(-2)[..., :blocks]
    return bytes_.to(torch.uint8).view(torch.float8_e8m0fnu).float()


def _travelled(rows: torch.Tensor, combine_dtype: str | None) -> torch.Tensor:
    """Rows in float32 as their owner reads them."""
    return dequantize(*quantize(rows, "fp8")) if combine_dtype == "fp8" else rows.float()
