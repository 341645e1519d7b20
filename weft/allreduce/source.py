"""The generated entries of the fused all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.allreduce.args import ReduceArgs
from weft.allreduce.reduction import Reduction
from weft.jit import CUDA_OPTIONS, compile_cubin
from weft.jit.args import table_source

# One rounding for each operation: bits must not depend on who fuses a multiply with an add.
OPTIONS = (*CUDA_OPTIONS, "-fmad=false")
TABLE, ARGS_TABLE = "weft_reduction", "weft_reduce_args"
DOORS = {"oneshot": "oneshot", "twoshot": "twoshot", "twoshot_bulk": "bulk"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """The template behind one backend, and its launch bounds.

    pieces: vectors of a row that one thread of a summing CTA holds.   threads: most of a CTA, of
    which `per_sm` must fit on one SM.
    """

    call: str
    pieces: int
    threads: int
    per_sm: int


KERNELS = {
    "oneshot": Kernel("oneshot<R, {moe}>", 1, 512, 1),
    "twoshot": Kernel("twoshot<R, {moe}, 1, false>", 1, 512, 1),
    "twoshot_bulk": Kernel("twoshot<R, {moe}, 2, true>", 2, 512, 1),
}
MOE = "_moe"  # at the end of an entry's name: rows are made by a prologue


def numbers(*, device: bool) -> str:
    """C++ that exports what `Reduction.expected` and `ReduceArgs` are compared with."""
    space = "__device__ " if device else ""
    inbox = "WEFT_OFFSET(weft::ReductionShare<R>, inbox)"
    return (
        f'extern "C" {space}const weft::u64 {TABLE}[] = {{sizeof(weft::ReductionShare<R>), '
        f"{inbox}, {inbox} + WEFT_OFFSET(weft::ReductionInbox<R>, direct), "
        f"{inbox} + WEFT_OFFSET(weft::ReductionInbox<R>, trailer)}};\n"
        + table_source(ReduceArgs, "weft::ReduceArgs", ARGS_TABLE, device=device)
    )


def cpu_source(reduction: Reduction) -> str:
    """The generated C++ entries."""
    doors = "".join(
        f'extern "C" void {name}(const weft::ReduceArgs* a) '
        f"{{ weft::reduce<R, weft::Backend::{backend}>(*a); }}\n"
        for name, backend in DOORS.items()
    )
    return (
        "#include <weft/allreduce/cpu.cpp>\n"
        f"constexpr weft::Reduction R = {reduction.literal()};\n{numbers(device=False)}{doors}"
    )


def cuda_source(reduction: Reduction) -> str:
    """The generated CUDA entries."""
    doors = "".join(
        f'extern "C" __global__ void __launch_bounds__({kernel.threads}, {kernel.per_sm})\n'
        f"{name}{end}(const __grid_constant__ weft::ReduceArgs a) "
        f"{{ weft::{kernel.call.format(moe=moe)}(a); }}\n"
        for name, kernel in KERNELS.items()
        for end, moe in (("", "false"), (MOE, "true"))
    )
    return (
        "#include <weft/allreduce/oneshot.cuh>\n#include <weft/allreduce/twoshot.cuh>\n"
        f"constexpr weft::Reduction R = {reduction.literal()};\n{numbers(device=True)}{doors}"
    )


def compile_cuda(reduction: Reduction, arch: str, *, defines: Sequence[str] = ()) -> bytes:
    """The cubin of all backends; needs no GPU. Raises CompileError showing the entries."""
    return compile_cubin(
        cuda_source(reduction),
        name="allreduce",
        arch=arch,
        options=OPTIONS,
        defines=defines,
    )
