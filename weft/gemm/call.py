# SPDX-License-Identifier: Apache-2.0
"""Validation of the tensors of a grouped GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.arguments import format_choices, format_value
from weft.errors import InvalidArgument
from weft.gemm.config import (
    BLOCK_N,
    FP8,
    MXFP4,
    WEIGHT_DTYPES,
    Epilogue,
    Gated,
    GatedQuant,
    Push,
    StoreQuant,
)
from weft.gemm.mxfp4 import UNIT_BYTES, check_tensor_like, weight_sizes
from weft.runtime.check import OverlapRule, find_overlap, get_memory_range, raise_not_tensor

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_ROWS = 2**31 - 1
OUT, OUT_SCALE = 2, 3  # indices in GemmCall.tensors
NAMES = (
    *("a_scale", "b_scale", "out", "the scales of out", "dst_addr", "abort_flag"),
    *("bias", "counts", "offsets", "a", "b"),
)
QUANTISING = (GatedQuant, StoreQuant)  # epilogues that return values and scales
Out = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class GemmCall:
    """Checked tensors of one grouped GEMM, with rows flattened to `[rows, ...]`.

    Attributes:
        starts: int32, first row of each expert; None if expert e starts at `e * max_rows`.
        max_rows: Maximum rows of an expert; larger counts are clamped.
        prefetch_weights: See `grouped_gemm`.
    """

    a: torch.Tensor
    b: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor | None
    max_rows: int
    a_scale: torch.Tensor | None
    b_scale: torch.Tensor | None
    bias: torch.Tensor | None
    out: torch.Tensor | None
    out_scale: torch.Tensor | None
    out_dtype: torch.dtype
    epilogue: Epilogue
    prefetch_weights: bool = False

    @property
    def gated(self) -> bool:
        """Whether the columns of `a @ b.T` are gate and up."""
        return isinstance(self.epilogue, Gated)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, n and k of the weights."""
        return weight_sizes(self.b)

    @property
    def out_columns(self) -> int:
        """Columns of the result."""
        n = self.sizes[1]
        return n // 2 if self.gated else n

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors: those with pointers in `GemmArgs`, then a and b, which have tensor maps."""
        push = self.epilogue if isinstance(self.epilogue, Push) else None
        return (
            *(self.a_scale, self.b_scale, self.out, self.out_scale),
            None if push is None else push.dst_addr,
            None if push is None else push.abort_flag,
            *(self.bias, self.counts, self.starts, self.a, self.b),
        )

    @property
    def addresses(self) -> list[int]:
        """Addresses of `tensors`; 0 for None."""
        return [0 if tensor is None else tensor.data_ptr() for tensor in self.tensors]

    @property
    def overlap_rules(self) -> tuple[OverlapRule, ...]:
        """Rules that no result may overlap another tensor."""
        return build_overlap_rules(self.tensors, (OUT, OUT_SCALE))


def build_overlap_rules(
    tensors: Sequence[torch.Tensor | None], results: Sequence[int]
) -> tuple[OverlapRule, ...]:
    """Return the rules that no result may overlap another tensor.

    Args:
        results: Indices of the results in `tensors`.
    """
    sizes = {i: _span_bytes(t) for i, t in enumerate(tensors) if t is not None}
    return tuple(
        (result, sizes[result], tuple((i, n, False) for i, n in sizes.items() if i != result))
        for result in results
        if result in sizes
    )


def check_overlap_rules(
    addresses: Sequence[int], rules: tuple[OverlapRule, ...], names: Sequence[str] = NAMES
) -> None:
    """Raise InvalidArgument if a result overlaps another tensor.

    Args:
        addresses: Addresses of the tensors, in the order of the rules and names.
    """
    pair = find_overlap(addresses, rules)
    if pair is not None:
        raise InvalidArgument(
            f"{names[pair[0]]} overlaps {names[pair[1]]} in memory: results are written while "
            "other tensors of the call are read; pass a separate tensor"
        )


def _span_bytes(tensor: torch.Tensor) -> int:
    start, end = get_memory_range(tensor)
    return end - start


def check_call(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    counts: torch.Tensor,
    offsets: torch.Tensor | None,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: Out,
    epilogue: Epilogue,
    prefetch_weights: bool = False,
) -> GemmCall:
    """Check the tensors of a call and allocate missing results. Raises InvalidArgument."""
    _check_operands(a, b)
    _check_groups(a, len(b), counts, offsets)
    _check_scales(a, b, a_scale, b_scale)
    if bias is not None:
        check_tensor_like("bias", bias, a, weight_sizes(b)[:2], OUT_DTYPES)
    n, k = weight_sizes(b)[1:]
    rows = a.shape[:-1].numel()
    columns = n // 2 if isinstance(epilogue, Gated) else n
    _check_epilogue(a, n, columns, epilogue)
    result, scales = _check_results(a, columns, epilogue, out)
    if a_scale is not None:  # _check_scales has checked that the strides allow flattening
        a_scale = a_scale.as_strided((rows, k // BLOCK_N), a_scale.stride()[-2:])
    return GemmCall(
        a=a.view(-1, k),
        b=b,
        counts=counts,
        starts=offsets,
        max_rows=a.shape[1] if a.ndim == 3 else rows,
        a_scale=a_scale,
        b_scale=b_scale,
        bias=bias,
        out=result,
        out_scale=scales,
        out_dtype=_select_out_dtype(a, epilogue) if result is None else result.dtype,
        epilogue=epilogue,
        prefetch_weights=prefetch_weights,
    )


def _check_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    for name, tensor in (("a", a), ("b", b)):
        if not isinstance(tensor, torch.Tensor):
            raise_not_tensor(name, tensor)
    mxfp4 = b.dtype == MXFP4
    shape: tuple[int | str, ...] = ("experts", "n", "k")
    if mxfp4:
        shape = ("experts", "n / 64", "k / 128", UNIT_BYTES)
    check_tensor_like("b", b, b, shape, WEIGHT_DTYPES, aligned=16)
    experts, n, k = weight_sizes(b)
    rows: tuple[int | str, ...] = (experts, "max_rows") if a.ndim == 3 else ("rows",)
    check_tensor_like("a", a, b, (*rows, k), (FP8 if mxfp4 else b.dtype,), aligned=16)
    unit = BLOCK_N if a.dtype == FP8 else 8
    for name, size in (("n", n), ("k", k)):
        if size % unit or not size:
            raise InvalidArgument(
                f"{name} is {size}; for {a.dtype} it must be a positive multiple of {unit}"
            )
    for name, tensor in (("a", a), ("b", b)):
        if tensor.numel() // k > MAX_ROWS:
            raise InvalidArgument(f"{name} has {tensor.numel() // k} rows; at most {MAX_ROWS}")


def _check_groups(
    a: torch.Tensor, experts: int, counts: torch.Tensor, offsets: torch.Tensor | None
) -> None:
    check_tensor_like("counts", counts, a, (experts,), (torch.int32,))
    if (a.ndim == 2) != (offsets is not None):
        raise InvalidArgument(
            f"a is {list(a.shape)} and offsets are {'set' if offsets is not None else 'None'}; "
            "pass offsets with rows [rows, k], and None with blocks [experts, max_rows, k]"
        )
    if offsets is not None:
        check_tensor_like("offsets", offsets, a, ("experts + 1",), (torch.int32,))
        if len(offsets) not in (experts, experts + 1):
            raise InvalidArgument(
                f"offsets are [{len(offsets)}]; they must be [{experts + 1}] or [{experts}]"
            )


def _check_scales(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor | None, b_scale: torch.Tensor | None
) -> None:
    if a.dtype != FP8:
        if a_scale is not None or b_scale is not None:
            name, scale = ("b_scale", b_scale) if a_scale is None else ("a_scale", a_scale)
            raise InvalidArgument(
                f"{name} is {format_value(scale)}; scales belong to {FP8}, and a is {a.dtype}"
            )
        return
    if a_scale is None or b_scale is None:
        name = "a_scale" if a_scale is None else "b_scale"
        raise InvalidArgument(f"{name} is None; {FP8} needs a_scale and b_scale")
    experts, n, k = weight_sizes(b)
    single = (torch.float32,)
    check_tensor_like("a_scale", a_scale, a, (*a.shape[:-1], k // BLOCK_N), single, strided=True)
    blocks = (experts, n) if b.dtype == MXFP4 else (experts, n // BLOCK_N, k // BLOCK_N)
    check_tensor_like("b_scale", b_scale, a, blocks, single)
    if a.ndim == 3 and a_scale.stride(0) != a.shape[1] * a_scale.stride(1) and len(a) > 1:
        raise InvalidArgument(
            f"a_scale has strides {a_scale.stride()}; all rows must have the same distance, also "
            "between experts"
        )


def _check_epilogue(a: torch.Tensor, n: int, columns: int, epilogue: Epilogue) -> None:
    if isinstance(epilogue, QUANTISING) and columns % BLOCK_N:
        name, half = type(epilogue).__name__, " / 2" if isinstance(epilogue, Gated) else ""
        raise InvalidArgument(
            f"n is {n}; {name} needs n{half} to be a multiple of {BLOCK_N}, the columns per scale"
        )
    if isinstance(epilogue, Gated) and n % (2 * (BLOCK_N if a.dtype == FP8 else 8)):
        raise InvalidArgument(f"n is {n}: gate and up must be halves of it")
    if not isinstance(epilogue, Push):
        return
    check_tensor_like(
        "epilogue.dst_addr", epilogue.dst_addr, a, (a.shape[:-1].numel(),), (torch.int64,)
    )
    if epilogue.abort_flag is not None:
        check_tensor_like("epilogue.abort_flag", epilogue.abort_flag, a, (1,), (torch.int32,))
        if not epilogue.flag_in_data:
            raise InvalidArgument("abort_flag of Push needs flag_in_data=True")
    if _select_out_dtype(a, epilogue) not in OUT_DTYPES:
        raise InvalidArgument(
            f"epilogue.dtype is {format_value(epilogue.dtype)}; choose one of "
            f"{format_choices(OUT_DTYPES)}"
        )


def _select_out_dtype(a: torch.Tensor, epilogue: Epilogue) -> torch.dtype:
    if isinstance(epilogue, Push) and epilogue.dtype is not None:
        return epilogue.dtype
    return torch.bfloat16 if a.dtype == FP8 else a.dtype


def _check_results(
    a: torch.Tensor, columns: int, epilogue: Epilogue, out: Out
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Check the results that the caller passed, or allocate them."""
    size = (*a.shape[:-1], columns)
    if isinstance(epilogue, Push):
        if out is not None:
            raise InvalidArgument(
                f"out is {format_value(out)}; it must be None with Push, which stores rows at "
                "their dst_addr"
            )
        return None, None
    if isinstance(epilogue, QUANTISING):
        blocks = (*size[:-1], columns // BLOCK_N)
        if out is None:
            scales = torch.empty(blocks, dtype=torch.float32, device=a.device)
            return torch.empty(size, dtype=FP8, device=a.device), scales
        if not isinstance(out, tuple) or len(out) != 2:
            raise InvalidArgument(
                f"out is {format_value(out)}; with {type(epilogue).__name__} it must be a pair, "
                "values and scales"
            )
        check_tensor_like("out[0]", out[0], a, size, (FP8,), aligned=16)
        check_tensor_like("out[1]", out[1], a, blocks, (torch.float32,))
        return out
    if out is None:
        return torch.empty(size, dtype=_select_out_dtype(a, epilogue), device=a.device), None
    if isinstance(out, tuple):
        raise InvalidArgument(
            f"out is {format_value(out)}; it must be one tensor, or None: only GatedQuant and "
            "StoreQuant return a pair"
        )
    check_tensor_like("out", out, a, size, OUT_DTYPES, aligned=16)
    return out, None
