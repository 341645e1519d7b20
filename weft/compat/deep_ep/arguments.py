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
Numbers: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def check_argument(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    *dtypes: torch.dtype,
    device: torch.device,
    unit: int | None = None,
) -> None:
    """Raise InvalidArgument for another kind of tensor; `unit` is its alignment in bytes."""
    check_tensor(name, tensor, shape=shape, dtypes=dtypes, device=device)
    check_alignment(name, tensor, unit or tensor.itemsize)


def check_handle(handle: object, kind: type, call: str) -> None:
    """Raise InvalidArgument unless `handle` is what `call` returned."""
    if not isinstance(handle, kind):
        raise_invalid("handle", handle, f"the handle that {call} returned")


def check_ids(ids: torch.Tensor, tokens: int | None, device: torch.device) -> None:
    """Raise InvalidArgument unless `ids` are int32 or int64 `[tokens, top_k]`."""
    check_argument("topk_idx", ids, (tokens, None), *IDS, device=device)
    check_int("topk_idx.shape[1]", ids.shape[1], 1, MAX_TOP_K)


def check_topk(
    tokens: int, ids: torch.Tensor | None, weights: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return ids and weights after checking them; None if both are absent."""
    if ids is None and weights is None:
        return None
    if ids is None or weights is None:
        present, missing = ("topk_idx", "topk_weights")[:: 1 if weights is None else -1]
        raise InvalidArgument(f"{present} without {missing}; pass both, or none")
    check_ids(ids, tokens, device)
    check_argument("topk_weights", weights, tuple(ids.shape), torch.float32, device=device)
    return ids, weights


def check_layout(
    tokens: int, ranks: int, device: torch.device, *tensors: torch.Tensor | None
) -> Layout:
    """Return num_tokens_per_rank, num_tokens_per_expert and is_token_in_rank after checks."""
    kinds = (
        ("num_tokens_per_rank", (ranks,), torch.int32),
        ("num_tokens_per_expert", (None,), torch.int32),
        ("is_token_in_rank", (tokens, ranks), torch.bool),
    )
    checked: list[torch.Tensor] = []
    for (name, shape, dtype), tensor in zip(kinds, tensors, strict=True):
        if tensor is None:
            raise_invalid(name, None, "a tensor from get_dispatch_layout, or pass a handle")
        check_argument(name, tensor, shape, dtype, device=device)
        checked.append(tensor)
    layout = Layout(*checked)
    experts = len(layout.per_expert)
    if not experts or experts % ranks:
        raise InvalidArgument(
            f"num_tokens_per_expert has {experts} entries; it must be a multiple of the {ranks} "
            "ranks"
        )
    return layout


def check_rows(x: Numbers, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows of a dispatch and their scales after checks, both contiguous."""
    if not isinstance(x, tuple):
        check_argument("x", x, (None, None), torch.bfloat16, device=device)
        _check_row_bytes("x", x)
        return x, None
    if len(x) != 2:
        raise InvalidArgument(f"x has {len(x)} tensors; pass one, or FP8 numbers and scales")
    numbers, scales = x
    check_argument("x[0]", numbers, (None, None), torch.float8_e4m3fn, device=device)
    _check_row_bytes("x[0]", numbers)
    if isinstance(scales, torch.Tensor) and scales.layout is torch.strided:
        scales = scales.contiguous()
    kinds = torch.float32, torch.int32
    check_argument("x[1]", scales, (len(numbers), None), *kinds, device=device)
    _check_row_bytes("x[1]", scales, scales.itemsize)
    return numbers, scales


def check_biases(
    bias: Numbers | None, tokens: int, hidden: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return the biases of a combine after checks."""
    biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
    if len(biases) > 2:
        raise InvalidArgument(f"bias has {len(biases)} tensors; pass one, or a tuple of two")
    for place, each in enumerate(biases):
        name = "bias" if len(biases) == 1 else f"bias[{place}]"
        size = (tokens, hidden)
        check_argument(name, each, size, torch.bfloat16, device=device, unit=VECTOR_BYTES)
    return biases


def check_weights(weights: torch.Tensor, rows: int, device: torch.device) -> None:
    """Raise InvalidArgument unless `weights` are float32 `[rows, top_k]`."""
    check_argument("topk_weights", weights, (rows, None), torch.float32, device=device)
    top_k = check_int("topk_weights.shape[1]", weights.shape[1], 1, MAX_TOP_K)
    check_alignment("topk_weights", weights, top_k * weights.itemsize)


def _check_row_bytes(name: str, rows: torch.Tensor, unit: int = VECTOR_BYTES) -> None:
    size = rows.shape[1] * rows.itemsize
    if not size or size % unit or size > MAX_ROW_BYTES:
        raise InvalidArgument(
            f"{name} has rows of {size} bytes; they must be a multiple of {unit}, up to "
            f"{MAX_ROW_BYTES}"
        )
    check_alignment(name, rows, size)
