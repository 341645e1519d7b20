# SPDX-License-Identifier: Apache-2.0
"""Checks of the tensors that callers of `Buffer` pass."""

from __future__ import annotations

from typing import TypeAlias

import torch

from weft.arguments import check_int, raise_invalid
from weft.compat.rank_layout import Layout
from weft.compat.row_exchange import VECTOR_BYTES
from weft.errors import InvalidArgument
from weft.runtime.check import check_alignment, check_tensor
from weft.shape import MAX_ROW_BYTES, MAX_TOP_K

IDS = (torch.int32, torch.int64)
TensorOrPair: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def check_argument(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    *dtypes: torch.dtype,
    device: torch.device,
    alignment: int | None = None,
) -> None:
    """Raise InvalidArgument unless a tensor has this shape, dtype, device and alignment."""
    check_tensor(name, tensor, shape=shape, dtypes=dtypes, device=device)
    check_alignment(name, tensor, alignment or tensor.itemsize)


def check_handle(handle: object, handle_type: type, source: str) -> None:
    """Raise InvalidArgument unless `handle` is of the type that `source` returns."""
    if not isinstance(handle, handle_type):
        raise_invalid("handle", handle, f"the handle that {source} returned")


def check_ids(ids: torch.Tensor, tokens: int | None, device: torch.device) -> None:
    """Raise InvalidArgument unless `ids` are int32 or int64 `[tokens, top_k]`."""
    check_argument("topk_idx", ids, (tokens, None), *IDS, device=device)
    check_int("topk_idx.shape[1]", ids.shape[1], 1, MAX_TOP_K)


def check_topk(
    tokens: int, ids: torch.Tensor | None, weights: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return ids and weights after checking them, or None if both are None."""
    if ids is None and weights is None:
        return None
    if ids is None or weights is None:
        present, missing = ("topk_idx", "topk_weights")[:: 1 if weights is None else -1]
        raise InvalidArgument(f"{present} without {missing}; pass both or neither")
    check_ids(ids, tokens, device)
    check_argument("topk_weights", weights, tuple(ids.shape), torch.float32, device=device)
    return ids, weights


def check_layout(
    tokens: int, num_ranks: int, device: torch.device, *tensors: torch.Tensor | None
) -> Layout:
    """Return a Layout of the three tensors of get_dispatch_layout after checking them."""
    specs = (
        ("num_tokens_per_rank", (num_ranks,), torch.int32),
        ("num_tokens_per_expert", (None,), torch.int32),
        ("is_token_in_rank", (tokens, num_ranks), torch.bool),
    )
    values: list[torch.Tensor] = []
    for (name, shape, dtype), tensor in zip(specs, tensors, strict=True):
        if tensor is None:
            raise_invalid(name, None, "a tensor from get_dispatch_layout, or pass a handle")
        check_argument(name, tensor, shape, dtype, device=device)
        values.append(tensor)
    layout = Layout(*values)
    num_experts = len(layout.num_tokens_per_expert)
    if not num_experts or num_experts % num_ranks:
        raise InvalidArgument(
            f"num_tokens_per_expert has {num_experts} entries; it must be a multiple of the "
            f"{num_ranks} ranks"
        )
    return layout


def check_rows(x: TensorOrPair, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows of a dispatch and their scales, contiguous, after checking them."""
    if not isinstance(x, tuple):
        check_argument("x", x, (None, None), torch.bfloat16, device=device)
        _check_row_bytes("x", x)
        return x, None
    if len(x) != 2:
        raise InvalidArgument(f"x has {len(x)} tensors; pass one, or FP8 values and scales")
    values, scales = x
    check_argument("x[0]", values, (None, None), torch.float8_e4m3fn, device=device)
    _check_row_bytes("x[0]", values)
    if isinstance(scales, torch.Tensor) and scales.layout is torch.strided:
        scales = scales.contiguous()
    scale_dtypes = torch.float32, torch.int32
    check_argument("x[1]", scales, (len(values), None), *scale_dtypes, device=device)
    _check_row_bytes("x[1]", scales, scales.itemsize)
    return values, scales


def check_biases(
    bias: TensorOrPair | None, tokens: int, hidden: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return the biases of a combine as a tuple after checking them."""
    biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
    if len(biases) > 2:
        raise InvalidArgument(f"bias has {len(biases)} tensors; pass one, or a tuple of two")
    for index, bias_tensor in enumerate(biases):
        name = "bias" if len(biases) == 1 else f"bias[{index}]"
        size = (tokens, hidden)
        check_argument(
            name, bias_tensor, size, torch.bfloat16, device=device, alignment=VECTOR_BYTES
        )
    return biases


def check_weights(weights: torch.Tensor, rows: int, device: torch.device) -> None:
    """Raise InvalidArgument unless `weights` are float32 `[rows, top_k]`."""
    check_argument("topk_weights", weights, (rows, None), torch.float32, device=device)
    top_k = check_int("topk_weights.shape[1]", weights.shape[1], 1, MAX_TOP_K)
    check_alignment("topk_weights", weights, top_k * weights.itemsize)


def _check_row_bytes(name: str, rows: torch.Tensor, alignment: int = VECTOR_BYTES) -> None:
    size = rows.shape[1] * rows.itemsize
    if not size or size % alignment or size > MAX_ROW_BYTES:
        raise InvalidArgument(
            f"{name} has rows of {size} bytes; they must be a multiple of {alignment}, up to "
            f"{MAX_ROW_BYTES}"
        )
    check_alignment(name, rows, size)
