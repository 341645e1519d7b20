# SPDX-License-Identifier: Apache-2.0
"""Reference implementation of the grouped GEMM in torch; also the implementation for CPUs.

A row's bits depend on that row alone, as on GPUs. torch's products choose kernels by the number of
rows, and its elementwise functions round the last elements of a tensor differently, so the product
is weft's own and rows are gated one by one.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_uint64, c_void_p
from typing import Any

import torch

from weft.errors import InvalidArgument
from weft.gemm.call import QUANTISING, GemmCall
from weft.gemm.config import MXFP4, Gated, GemmPlan, Push, WgmmaPlan
from weft.gemm.mxfp4 import unpack_mxfp4
from weft.jit import compile_shared
from weft.reference import dequantize, quantize

CPU_SOURCE = """\
#include <weft/gemm/multiply_cpu.cpp>
#include <weft/gemm/push_cpu.cpp>
extern "C" void multiply(const float* x, const float* weights, float* out, weft::u64 rows,
                         weft::u64 n, weft::u64 columns) {
    weft::multiply(x, weights, out, rows, n, columns);
}
extern "C" void push_rows(const weft::u64* dst_addr, const weft::u8* from, weft::u64 rows,
                          weft::u64 bytes, weft::u64 fp32, weft::u32* abort_flag) {
    (fp32 ? weft::push_rows<weft::DType::fp32> : weft::push_rows<weft::DType::bf16>)(
        dst_addr, from, rows, bytes, abort_flag);
}
"""


def run_reference(call: GemmCall, plan: GemmPlan | WgmmaPlan) -> None:
    """Run a grouped GEMM expert by expert. Synchronizes, and ignores the plan."""
    counts = call.counts.clamp(min=0, max=call.max_rows)
    starts = None if call.starts is None else call.starts.tolist()
    for expert, count in enumerate(counts.tolist()):
        first = expert * call.max_rows if starts is None else starts[expert]
        if count := min(count, len(call.a) - first):
            _store(call, _multiply(call, expert, first, count), first)


def _multiply(call: GemmCall, expert: int, first: int, count: int) -> torch.Tensor:
    """Return `a @ b.T + bias` of one expert in fp32."""
    rows = slice(first, first + count)
    x, w = call.a[rows], call.b[expert]
    if call.a_scale is not None and call.b_scale is not None:
        if w.dtype == MXFP4:
            weights = unpack_mxfp4(w.unsqueeze(0), call.b_scale[expert].unsqueeze(0))[0]
        else:
            weights = dequantize(w, call.b_scale[expert].repeat_interleave(128, dim=0))
        x = dequantize(x, call.a_scale[rows])
    else:
        x, weights = x.float(), w.float()
    x, weights = x.contiguous(), weights.contiguous()
    y = x.new_empty((count, len(weights)))
    pointers = x.data_ptr(), weights.data_ptr(), y.data_ptr()
    _load_functions().multiply(*pointers, *y.shape, x.shape[1])
    return y if call.bias is None else y + call.bias[expert].float()


def apply_gating(gating: Gated, y: torch.Tensor) -> torch.Tensor:
    """Apply a gating to gate and up `[..., n]` in fp32; the result is `[..., n / 2]`."""
    g, u = y.chunk(2, dim=-1)
    if gating.limit is not None:
        g, u = g.clamp(max=gating.limit), u.clamp(-gating.limit, gating.limit)
    sigmoid = torch.sigmoid(gating.alpha * g)
    if gating.beta is not None and gating.linear_beta is not None:
        g = gating.beta * torch.tanh(g / gating.beta)
        u = gating.linear_beta * torch.tanh(u / gating.linear_beta)
    return g * sigmoid * (u + gating.offset)


def _store(call: GemmCall, y: torch.Tensor, first: int) -> None:
    """Apply the epilogue to consecutive rows from `first` on and store the result."""
    epilogue = call.epilogue
    rows = slice(first, first + len(y))
    if isinstance(epilogue, Push):
        _push(epilogue, rows, y.to(call.out_dtype))
        return
    if isinstance(epilogue, Gated):
        y = torch.stack([apply_gating(epilogue, row) for row in y])
    elif epilogue.activation == "relu2":
        y = torch.relu(y).square()
    out = call.out
    assert out is not None
    flat = out.view(-1, call.out_columns)
    if isinstance(epilogue, QUANTISING):
        y, scales = quantize(y, "fp8")
        assert call.out_scale is not None
        call.out_scale.view(-1, scales.shape[1])[rows] = scales
    flat[rows] = y.to(out.dtype)


def _push(push: Push, indices: slice, rows: torch.Tensor) -> None:
    if rows.device.type != "cpu":
        raise InvalidArgument(f"rows are on {rows.device}; the reference pushes only on CPUs")
    rows, dst_addr = rows.contiguous(), push.dst_addr[indices]
    if push.flag_in_data:
        push_rows(dst_addr, rows, push.abort_flag)
        return
    row_bytes = rows.shape[1] * rows.element_size()
    for row, address in zip(rows, dst_addr.tolist(), strict=True):
        if address:
            ctypes.memmove(address, row.data_ptr(), row_bytes)


def push_rows(dst_addr: torch.Tensor, rows: torch.Tensor, abort_flag: torch.Tensor | None) -> None:
    """Store each row at its own address with relaxed stores, see `Push.flag_in_data`.

    Args:
        dst_addr: int64 `[rows]`, addresses; 0 skips the row.
        rows: `[rows, columns]`; a row must be a multiple of 8 bytes.
        abort_flag: See `Push`.
    """
    rows, dst_addr = rows.contiguous(), dst_addr.contiguous()
    itemsize = rows.element_size()
    _load_functions().push_rows(
        dst_addr.data_ptr(),
        rows.data_ptr(),
        len(rows),
        rows.shape[1] * itemsize,
        itemsize == 4,
        0 if abort_flag is None else abort_flag.data_ptr(),
    )


@functools.cache
def _load_functions() -> Any:
    functions = compile_shared(CPU_SOURCE, name="gemm")
    functions.multiply.restype = functions.push_rows.restype = None
    functions.multiply.argtypes = (*(c_void_p,) * 3, *(c_uint64,) * 3)
    functions.push_rows.argtypes = (c_void_p, c_void_p, *(c_uint64,) * 3, c_void_p)
    return functions
