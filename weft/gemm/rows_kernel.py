"""Rows to FP8 on a GPU: one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from weft.gemm.scaling import quantize


@triton.jit
def quantize_kernel(
    x, out, out_scale, rows,
    K: tl.constexpr, ROWS: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """A block of ROWS rows and 128 columns."""
    if PROGRAMMATIC:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    alive = row < rows
    at = row.to(tl.int64)[:, None] * K + column[None, :]
    numbers = tl.load(x + at, mask=alive[:, None], other=0.0).to(tl.float32)
    numbers, scale = quantize(numbers)
    tl.store(out + at, numbers.to(out.dtype.element_ty), mask=alive[:, None])
    tl.store(out_scale + row.to(tl.int64) * (K // 128) + tl.program_id(1), scale, mask=alive)
