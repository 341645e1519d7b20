"""Routings that callers made, in the form that dispatch takes."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_uint32, c_uint64

import torch

from weft.arguments import flags, integer
from weft.errors import InvalidArgument
from weft.moe.route_entry import DTYPES
from weft.moe.router import Routed
from weft.moe.stateless import StatelessKernel
from weft.runtime.check import check_alignment, check_tensor
from weft.shape import MAX_RANKS

THREADS = 128  # given_threads in moe/given.cuh
NO_SUCH_EXPERT = 2**31 - 1  # stands for an id that int32 cannot hold; dispatch refuses it
INT64 = -(1 << 63), (1 << 63) - 1


class GivenArgs(ctypes.Structure):
    """Mirror of `weft::GivenArgs` in moe/given.cuh."""

    _fields_ = (
        ("ids", c_uint64),
        ("weights", c_uint64),
        ("num_tokens", c_uint64),
        ("replicas", c_uint64),
        ("out_ids", c_uint64),
        ("out_weights", c_uint64),
        ("padding_id", c_int64),
        ("entries", c_uint32),
        ("top_k", c_uint32),
        ("ids_bytes", c_uint32),
        ("number", c_uint32),
        ("experts", c_uint32),
        ("width", c_uint32),
        ("rank", c_uint32),
        ("skips_zeros", c_uint32),
    )


def _text(_: str) -> str:
    return f"""\
#include <weft/moe/given.cuh>
extern "C" __global__ void __launch_bounds__({THREADS})
given(const __grid_constant__ weft::GivenArgs a) {{ weft::given(a); }}
"""


GIVEN = StatelessKernel("given", GivenArgs, _text, "given_routing()")


def given_routing(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    padding_id: int = -1,
    skip_zero_weights: bool = False,
    num_tokens: torch.Tensor | None = None,
    replicas: torch.Tensor | None = None,
    rank: int = 0,
) -> Routed:
    """Return ids and weights as dispatch takes them: int32 with -1 for no expert, and float32.

    topk_ids: int32 or int64 `[tokens, top_k]`.
    topk_weights: float32, bfloat16 or float16 `[tokens, top_k]`.
    padding_id: an id that names no expert, beside -1; engines also use num_experts.
    skip_zero_weights: entries of weight 0 are of no expert, so that padding with ids is not sent.
    num_tokens: int32 `[1]` on the device: rows from there on are padding.
    replicas: int32 `[num_experts, width]` on the device: how many physical experts a logical one
        has, then which: both tensors of `Replicas.table` side by side. Ids are logical experts then
        and become physical ones: token t of this rank takes replica `(t + rank) % count`. The table
        is read when the kernel runs, so it may change between replays of a graph.

    Ids outside of their range stay outside, for dispatch to refuse and to report. One kernel on a
    GPU, and none where nothing is to do; waits for no device and may be captured, but for the first
    call on a device, which loads the kernel. Raises InvalidArgument and OutOfOrder.
    """
    flags(skip_zero_weights=skip_zero_weights)
    padding_id, rank = (
        integer("padding_id", padding_id, *INT64),
        integer("rank", rank, 0, MAX_RANKS - 1),
    )
    check_given(topk_ids, topk_weights)
    device = topk_ids.device
    for name, tensor, size in (
        ("num_tokens", num_tokens, (1,)),
        ("replicas", replicas, (None, None)),
    ):
        if tensor is not None:
            check_tensor(name, tensor, shape=size, dtypes=(torch.int32,), device=device)
            check_alignment(name, tensor, tensor.itemsize)
    as_they_are = (
        padding_id == -1
        and not skip_zero_weights
        and num_tokens is None
        and replicas is None
        and topk_weights.dtype == torch.float32
    )
    if as_they_are:
        return Routed(topk_ids, topk_weights)
    if device.type != "cuda":
        return given_in_torch(
            topk_ids,
            topk_weights,
            padding_id=padding_id,
            skip_zero_weights=skip_zero_weights,
            num_tokens=num_tokens,
            replicas=replicas,
            rank=rank,
        )
    ids = torch.empty(topk_ids.shape, dtype=torch.int32, device=device)
    weights = torch.empty(topk_ids.shape, dtype=torch.float32, device=device)
    args = GivenArgs(
        ids=topk_ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        num_tokens=0 if num_tokens is None else num_tokens.data_ptr(),
        replicas=0 if replicas is None else replicas.data_ptr(),
        out_ids=ids.data_ptr(),
        out_weights=weights.data_ptr(),
        padding_id=padding_id,
        entries=topk_ids.numel(),
        top_k=max(topk_ids.shape[1], 1),
        ids_bytes=topk_ids.itemsize,
        number=DTYPES[topk_weights.dtype],
        experts=0 if replicas is None else len(replicas),
        width=0 if replicas is None else replicas.shape[1],
        rank=rank,
        skips_zeros=skip_zero_weights,
    )
    GIVEN.enqueue("", args, device, -(-args.entries // THREADS), THREADS)
    return Routed(ids, weights)


def given_in_torch(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    padding_id: int,
    skip_zero_weights: bool,
    num_tokens: torch.Tensor | None,
    replicas: torch.Tensor | None,
    rank: int,
) -> Routed:
    """`given_routing` of checked tensors in torch's operations: what its kernel must do."""
    ids, weights = topk_ids.long(), topk_weights.float()
    token = torch.arange(len(ids), dtype=torch.int64, device=ids.device)[:, None]
    none = (ids == -1) | (ids == padding_id)
    if skip_zero_weights:
        none |= weights == 0
    if num_tokens is not None:
        none |= token >= num_tokens
    if replicas is None:
        known = ids == ids.int()
    else:
        known = (ids >= 0) & (ids < len(replicas))
        row = torch.where(known, ids, 0)
        turn = 1 + (token + rank) % replicas[row, 0]
        ids = replicas[row, turn].long()
    ids = torch.where(none, -1, torch.where(known, ids, NO_SUCH_EXPERT))
    return Routed(ids.int(), torch.where(none, 0.0, weights))


def check_given(topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Raises InvalidArgument for a routing that no caller can mean."""
    device = topk_ids.device if isinstance(topk_ids, torch.Tensor) else torch.device("cpu")
    integers = (torch.int32, torch.int64)
    check_tensor("topk_ids", topk_ids, shape=(None, None), dtypes=integers, device=device)
    check_alignment("topk_ids", topk_ids, topk_ids.itemsize)
    floats = (torch.float32, torch.bfloat16, torch.float16)
    size = tuple(topk_ids.shape)
    check_tensor("topk_weights", topk_weights, shape=size, dtypes=floats, device=device)
    check_alignment("topk_weights", topk_weights, topk_weights.itemsize)
    if topk_ids.numel() >= 1 << 31:
        raise InvalidArgument(f"topk_ids has {topk_ids.numel()} entries; pass fewer than 2^31")
