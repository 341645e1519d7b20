"""The generated entry of the product on Hopper's tensor cores, and its arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_uint32, c_uint64

from weft.jit import CUDA_OPTIONS, compile_cubin
from weft.jit.args import table_source

TABLE = "weft_product_args"
SHARED = "weft_product_shared"
THREADS = 384  # product_threads in gemm/tiles.cuh
ROW_BOXES = 4  # of 8, 16, 32 and 64 rows
ROW_STEP, FINE_ROWS = 16, 160  # row_step, fine_rows in gemm/tiles.cuh

SOURCE = """\
#include <weft/gemm/wgmma.cuh>
namespace weft {{
{instructions}}}  // namespace weft
#include <weft/gemm/grouped_gemm.cuh>
constexpr weft::Product P = {product};
{table}extern "C" {{ extern __device__ const unsigned long long {shared}[1]; }}
__device__ const unsigned long long {shared}[1] = {{weft::product_shared_bytes<P>()}};
extern "C" __global__ void __launch_bounds__({threads}, 1)
product(const __grid_constant__ weft::ProductArgs a) {{ weft::product<P>(a); }}
"""

# Of each operand's 32 bytes of k, in PTX: how many numbers, their type, and what follows the
# predicate: signs and, for two-byte numbers, that both lie k by k.
OPERANDS = {
    "fp8": ("k32.f32.e4m3.e4m3", "1, 1"),
    "bf16": ("k16.f32.bf16.bf16", "1, 1, 0, 0"),
    "fp16": ("k16.f32.f16.f16", "1, 1, 0, 0"),
}

# `multiply` of gemm/wgmma.cuh. NVRTC wants an instruction's text in one piece, so there is one
# function for each width, with a register for each sum.
INSTRUCTION = """\
template <> WEFT_FN void multiply<Operand::{operand}, {n}>(float (&sum)[{sums}], u64 a, u64 b,
                                                          bool add) {{
    asm volatile(
        "{{.reg .pred p; setp.ne.b32 p, %{add}, 0; "
        "wgmma.mma_async.sync.aligned.m64n{n}{types} {{{registers}}}, "
        "%{a}, %{b}, p, {flags};}}"
        : {outputs}
        : "l"(a), "l"(b), "r"(u32(add)));
}}
"""


class ProductArgs(ctypes.Structure):
    """Mirror of `weft::ProductArgs` in gemm/tiles.cuh."""

    _fields_ = (
        ("weights_map", c_uint64 * 16),
        ("rows_map", c_uint64 * 16 * ROW_BOXES),
        ("row_scales", c_uint64),
        ("weight_scales", c_uint64),
        ("out", c_uint64),
        ("out_scales", c_uint64),
        ("home", c_uint64),
        ("unless", c_uint64),
        ("bias", c_uint64),
        ("counts", c_uint64),
        ("starts", c_uint64),
        ("scale_row", c_int64),
        ("scale_step", c_int64),
        ("most", c_uint32),
        ("rows", c_uint32),
        ("alpha", c_float),
        ("offset", c_float),
        ("limit", c_float),
        ("reserved", c_uint32 * 5),
    )


def widths(most_rows: int) -> list[int]:
    """Rows of the second operand of a kernel's instructions: of its tiles; 128 of weights, too."""
    fine = range(ROW_STEP, min(most_rows, FINE_ROWS) + 1, ROW_STEP)
    return [*fine, *range(FINE_ROWS + 2 * ROW_STEP, most_rows + 1, 2 * ROW_STEP)]


def instruction(rows: int, operand: str) -> str:
    """`multiply` for 64 rows of the first operand by so many of the second."""
    sums = rows // 2
    types, flags = OPERANDS[operand]
    return INSTRUCTION.format(
        n=rows,
        operand=operand,
        types=types,
        flags=flags,
        sums=sums,
        a=sums,
        b=sums + 1,
        add=sums + 2,
        registers=", ".join(f"%{i}" for i in range(sums)),
        outputs=", ".join(f'"+f"(sum[{i}])' for i in range(sums)),
    )


def cuda_source(product: str, most_rows: int, operand: str) -> str:
    """The entry of one `Product`, given as a C++ literal.

    most_rows: of a tile.   operand: a key of OPERANDS.
    """
    return SOURCE.format(
        instructions="".join(instruction(rows, operand) for rows in widths(most_rows)),
        product=product,
        table=table_source(ProductArgs, "weft::ProductArgs", TABLE, device=True),
        shared=SHARED,
        threads=THREADS,
    )


def compile_cuda(
    product: str, most_rows: int, operand: str, arch: str, *, options: Sequence[str] = ()
) -> bytes:
    """The kernel's cubin; needs no GPU. Arguments as in `cuda_source`.

    Raises CompileError showing the entry.
    """
    return compile_cubin(
        cuda_source(product, most_rows, operand),
        name="product",
        arch=arch,
        options=(*CUDA_OPTIONS, *options),
    )
