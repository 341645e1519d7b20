"""Rows that tell of themselves, stored by a CPU: what a GPU's product does in its epilogue."""

from __future__ import annotations

import functools
from ctypes import c_uint64, c_void_p
from typing import Any

import torch

from weft.jit import compile_shared

SOURCE = """\
#include <weft/gemm/push_cpu.cpp>
extern "C" void tell_rows(const weft::u64* home, const weft::u8* from, weft::u64 rows,
                          weft::u64 bytes, weft::u64 wide, weft::u32* unless) {
    (wide ? weft::tell_rows<weft::Number::fp32> : weft::tell_rows<weft::Number::bf16>)(
        home, from, rows, bytes, unless);
}
"""


def tell_rows(home: torch.Tensor, rows: torch.Tensor, unless: torch.Tensor | None) -> None:
    """Store rows `[rows, columns]` at home, int64 `[rows]`; see `Push`.

    columns: as many as make whole words of 8 bytes.
    """
    rows, home = rows.contiguous(), home.contiguous()
    size = rows.element_size()
    sizes = len(rows), rows.shape[1] * size, size == 4
    _tell()(
        home.data_ptr(), rows.data_ptr(), *sizes, unless.data_ptr() if unless is not None else 0
    )


@functools.cache
def _tell() -> Any:
    function = compile_shared(SOURCE, name="tell").tell_rows
    function.restype = None
    function.argtypes = (c_void_p, c_void_p, *(c_uint64,) * 3, c_void_p)
    return function
