"""What deep_ep's normal mode derives from chosen experts: counts, ranks of tokens, local ids.

One kernel each on a GPU (rank_layout.cuh), which do what torch does for CPU ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_uint32, c_uint64
from typing import NamedTuple

import torch

from weft.moe.kernels import StatelessKernel

THREADS = 128  # layout_threads in rank_layout.cuh
WORDS = 7  # announced_words there


class LayoutArgs(ctypes.Structure):
    """Mirror of `weft::LayoutArgs`."""

    _fields_ = (
        ("ids", c_uint64),
        ("in_rank", c_uint64),
        ("counts", c_uint64),
        ("tokens", c_uint32),
        ("top_k", c_uint32),
        ("ids_bytes", c_uint32),
        ("ranks", c_uint32),
        ("experts", c_uint32),
        ("reserved", c_uint32),
    )


class AnnouncementArgs(ctypes.Structure):
    """Mirror of `weft::AnnouncementArgs`."""

    _fields_ = (
        ("ids", c_uint64),
        ("in_rank", c_uint64),
        ("per_rank", c_uint64),
        ("per_expert", c_uint64),
        ("rank_ids", c_uint64),
        ("numbers", c_uint64),
        ("refused", c_uint64),
        ("tokens", c_uint32),
        ("top_k", c_uint32),
        ("ids_bytes", c_uint32),
        ("ranks", c_uint32),
        ("experts", c_uint32),
        ("words", c_uint32 * WORDS),
    )


class LocalArgs(ctypes.Structure):
    """Mirror of `weft::LocalArgs`."""

    _fields_ = (
        ("ids", c_uint64),
        ("weights", c_uint64),
        ("slots", c_uint64),
        ("tokens", c_uint64),
        ("entries", c_uint32),
        ("rows", c_uint32),
        ("ids_bytes", c_uint32),
        ("max_tokens", c_uint32),
        ("first", c_int32),
        ("count", c_uint32),
    )


class Layout(NamedTuple):
    """int32 `[ranks]`, int32 `[experts]`, bool `[tokens, ranks]`."""

    per_rank: torch.Tensor
    per_expert: torch.Tensor
    in_rank: torch.Tensor


def _kernel(name: str, args: type[ctypes.Structure], doing: str) -> StatelessKernel:
    text = f"""\
#include <weft/compat/rank_layout.cuh>
extern "C" __global__ void __launch_bounds__({THREADS})
weft_{name}(const __grid_constant__ weft::{args.__name__} a) {{ weft::{name}(a); }}
"""
    return StatelessKernel(f"weft_{name}", args, lambda _: text, doing)


LAYOUT = _kernel("dispatch_layout", LayoutArgs, "get_dispatch_layout")
ANNOUNCEMENT = _kernel("announcement", AnnouncementArgs, "dispatch")
LOCAL = _kernel("localize", LocalArgs, "dispatch")
KERNELS = (LAYOUT, ANNOUNCEMENT, LOCAL)


def load(device: torch.device) -> None:
    """Load the kernels before peers wait for what they compute. Raises CompileError."""
    if device.type == "cuda":
        for kernel in KERNELS:
            kernel.enqueue("", kernel.args(), device, 0, THREADS)


def dispatch_layout(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Count where the tokens of int32 or int64 `[tokens, top_k]` go.

    Entries outside of 0..num_experts - 1 count for nobody.
    """
    device, (tokens, top_k) = topk_idx.device, topk_idx.shape
    if device.type != "cuda":
        ids = topk_idx.long()
        ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
        # Entries that name no expert fall into a column of their own.
        in_rank = torch.zeros((tokens, num_ranks + 1), dtype=torch.bool, device=device)
        in_rank.scatter_(1, ids // (num_experts // num_ranks), True)
        in_rank = in_rank[:, :num_ranks].contiguous()
        counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
        counts.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=torch.int32))
        return Layout(in_rank.sum(0, dtype=torch.int32), counts[:-1].contiguous(), in_rank)
    in_rank = torch.empty((tokens, num_ranks), dtype=torch.bool, device=device)
    counts = torch.zeros(num_ranks + num_experts, dtype=torch.int32, device=device)
    args = LayoutArgs(
        ids=topk_idx.data_ptr(),
        in_rank=in_rank.data_ptr(),
        counts=counts.data_ptr(),
        tokens=tokens,
        top_k=top_k,
        ids_bytes=topk_idx.itemsize,
        ranks=num_ranks,
        experts=num_experts,
    )
    LAYOUT.enqueue("", args, device, ctas(tokens), THREADS)
    return Layout(counts[:num_ranks], counts[num_ranks:], in_rank)


def announcement(
    words: Sequence[int],
    topk_idx: torch.Tensor | None,
    layout: Layout,
    refused: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank tells of its dispatch, and which ranks its tokens go to.

    words: numbers to tell first.   refused: int32 `[1]`, to which entries that name no expert and
    are not -1 are added.

    Returns int32 `[words, those entries, per_rank, tokens that in_rank flags, per_expert]`, and
    int32 `[tokens, ranks]` with the rank where in_rank is True, else -1.
    """
    device, (tokens, ranks) = layout.in_rank.device, layout.in_rank.shape
    experts = len(layout.per_expert)
    if device.type != "cuda":
        bad = torch.zeros(1, dtype=torch.int32, device=device)
        if topk_idx is not None:
            bad += ((topk_idx < -1) | (topk_idx >= experts)).sum(dtype=torch.int32)
        if refused is not None:
            refused += bad
        told = torch.tensor(list(words), dtype=torch.int32, device=device)
        flagged = layout.in_rank.sum(0, dtype=torch.int32)
        rank = torch.arange(ranks, dtype=torch.int32, device=device)
        numbers = torch.cat((told, bad, layout.per_rank, flagged, layout.per_expert))
        return numbers, torch.where(layout.in_rank, rank, -1)
    rank_ids = torch.empty((tokens, ranks), dtype=torch.int32, device=device)
    size = WORDS + 1 + 2 * ranks + experts
    numbers = torch.zeros(size, dtype=torch.int32, device=device)
    args = AnnouncementArgs(
        ids=0 if topk_idx is None else topk_idx.data_ptr(),
        in_rank=layout.in_rank.data_ptr(),
        per_rank=layout.per_rank.data_ptr(),
        per_expert=layout.per_expert.data_ptr(),
        rank_ids=rank_ids.data_ptr(),
        numbers=numbers.data_ptr(),
        refused=0 if refused is None else refused.data_ptr(),
        tokens=tokens,
        top_k=0 if topk_idx is None else topk_idx.shape[1],
        ids_bytes=0 if topk_idx is None else topk_idx.itemsize,
        ranks=ranks,
        experts=experts,
        words=(c_uint32 * WORDS)(*words),
    )
    ANNOUNCEMENT.enqueue("", args, device, max(1, ctas(tokens)), THREADS)
    return numbers, rank_ids


def localize(
    topk: tuple[torch.Tensor, torch.Tensor] | None,
    slots: torch.Tensor,
    max_tokens: int,
    first: int,
    count: int,
) -> torch.Tensor:
    """Turn global ids into local ones, in place, and slots of rows into tokens.

    topk: int32 or int64 ids and their weights, `[rows, top_k]`. Ids of experts first .. first +
    count - 1 are counted from first; others become -1, and their weight 0.
    slots: int32 `[rows]`, `source * max_tokens + token`, or -1.

    Returns int32 `[rows]`, each row's token at its source, or -1.
    """
    if slots.device.type != "cuda":
        if topk is not None:
            ids, weights = topk
            others = (ids < first) | (ids >= first + count)
            ids -= first
            ids.masked_fill_(others, -1)
            weights.masked_fill_(others, 0.0)
        return torch.where(slots < 0, -1, slots % max_tokens)
    tokens = torch.empty_like(slots)
    entries = 0 if topk is None else topk[0].numel()
    args = LocalArgs(
        ids=0 if topk is None else topk[0].data_ptr(),
        weights=0 if topk is None else topk[1].data_ptr(),
        slots=slots.data_ptr(),
        tokens=tokens.data_ptr(),
        entries=entries,
        rows=len(slots),
        ids_bytes=0 if topk is None else topk[0].itemsize,
        max_tokens=max_tokens,
        first=first,
        count=count,
    )
    LOCAL.enqueue("", args, slots.device, ctas(max(entries, len(slots))), THREADS)
    return tokens


def ctas(threads: int) -> int:
    """CTAs that so many threads take."""
    return -(-threads // THREADS)
