"""The generated entry of the grouped GEMM on Hopper's tensor cores, and its arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_uint32, c_uint64

from weft.jit import CUDA_OPTIONS, compile_cubin
from weft.runtime.layout import assertions

SHARED = "weft_gemm_shared"
# The same constants as in gemm/shape.cuh.
THREADS = 384
ROW_BOXES = 4  # of 8, 16, 32 and 64 rows
BLOCK_M_GRANULARITY, MAX_SWAP_AB_M = 16, 160

SOURCE = """\
#include <weft/gemm/wgmma.cuh>
namespace weft {{
{instructions}}}  // namespace weft
#include <weft/gemm/grouped_gemm.cuh>
constexpr weft::GemmShape S = {shape};
static_assert(weft::gemm_threads == {threads});
{layout}extern "C" {{ extern __device__ const unsigned long long {shared}[1]; }}
__device__ const unsigned long long {shared}[1] = {{weft::gemm_shared_bytes<S>()}};
extern "C" __global__ void __launch_bounds__({threads}, 1)
grouped_gemm(const __grid_constant__ weft::GemmArgs a) {{ weft::grouped_gemm<S>(a); }}
"""

# For 32 bytes of k of each operand dtype, in PTX: how many numbers and their type, and what follows
# the predicate: signs and, for 16-bit numbers, that both operands are K-major.
OPERANDS = {
    "fp8": ("k32.f32.e4m3.e4m3", "1, 1"),
    "bf16": ("k16.f32.bf16.bf16", "1, 1, 0, 0"),
    "fp16": ("k16.f32.f16.f16", "1, 1, 0, 0"),
}

# `wgmma` of gemm/wgmma.cuh. NVRTC wants an instruction's text in one piece, so there is one
# function for each N, with a register for each accumulator.
INSTRUCTION = """\
template <> WEFT_FN void wgmma<Operand::{operand}, {n}>(float (&acc)[{count}], u64 a, u64 b,
                                                       bool accumulate) {{
    asm volatile(
        "{{.reg .pred p; setp.ne.b32 p, %{accumulate}, 0; "
        "wgmma.mma_async.sync.aligned.m64n{n}{types} {{{registers}}}, "
        "%{a}, %{b}, p, {flags};}}"
        : {outputs}
        : "l"(a), "l"(b), "r"(u32(accumulate)));
}}
"""


class GemmArgs(ctypes.Structure):
    """Mirror of `weft::GemmArgs` in gemm/shape.cuh."""

    _fields_ = (
        ("weights_map", c_uint64 * 16),
        ("rows_map", c_uint64 * 16 * ROW_BOXES),
        ("row_scales", c_uint64),
        ("weight_scales", c_uint64),
        ("out", c_uint64),
        ("out_scales", c_uint64),
        ("dst_addr", c_uint64),
        ("abort_flag", c_uint64),
        ("bias", c_uint64),
        ("counts", c_uint64),
        ("starts", c_uint64),
        ("row_scale_stride", c_int64),
        ("k_scale_stride", c_int64),
        ("max_rows", c_uint32),
        ("rows", c_uint32),
        ("alpha", c_float),
        ("offset", c_float),
        ("limit", c_float),
        ("reserved", c_uint32 * 5),
    )


def wgmma_ns(block_m: int) -> list[int]:
    """The N of a kernel's wgmma instructions: heights of its swapped tiles, and 128 of weights."""
    step = BLOCK_M_GRANULARITY
    fine = range(step, min(block_m, MAX_SWAP_AB_M) + 1, step)
    return [*fine, *range(MAX_SWAP_AB_M + 2 * step, block_m + 1, 2 * step)]


def instruction(n: int, operand: str) -> str:
    """`wgmma` for 64 rows of the A operand and n of the B operand."""
    count = n // 2
    types, flags = OPERANDS[operand]
    return INSTRUCTION.format(
        n=n,
        operand=operand,
        types=types,
        flags=flags,
        count=count,
        a=count,
        b=count + 1,
        accumulate=count + 2,
        registers=", ".join(f"%{i}" for i in range(count)),
        outputs=", ".join(f'"+f"(acc[{i}])' for i in range(count)),
    )


def cuda_source(shape: str, block_m: int, operand: str) -> str:
    """The entry of one `GemmShape`, given as a C++ literal.

    block_m: most rows of a tile.   operand: a key of OPERANDS.
    """
    return SOURCE.format(
        instructions="".join(instruction(n, operand) for n in wgmma_ns(block_m)),
        shape=shape,
        layout=assertions((GemmArgs,)),
        shared=SHARED,
        threads=THREADS,
    )


def compile_cuda(
    shape: str, block_m: int, operand: str, arch: str, *, options: Sequence[str] = ()
) -> bytes:
    """The kernel's cubin; needs no GPU. Arguments as in `cuda_source`.

    Raises CompileError showing the entry.
    """
    return compile_cubin(
        cuda_source(shape, block_m, operand),
        name="grouped_gemm",
        arch=arch,
        options=(*CUDA_OPTIONS, *options),
    )
