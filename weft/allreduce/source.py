"""The generated entries of the fused all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

from weft.allreduce.args import ReduceArgs
from weft.allreduce.reduction import Reduction
from weft.jit import CUDA_OPTIONS
from weft.runtime.kernels import Program

# One rounding for each operation: bits must not depend on who fuses a multiply with an add.
OPTIONS = (*CUDA_OPTIONS, "-fmad=false")
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


def cpu_program(reduction: Reduction) -> Program:
    """The generated C++ entries: one of a backend serves rows and prologues."""
    doors = "".join(
        f'extern "C" void {name}{end}(const weft::ReduceArgs* a) '
        f"{{ weft::reduce<R, weft::Backend::{backend}>(*a); }}\n"
        for name, backend in DOORS.items()
        for end in ("", MOE)
    )
    return _program(reduction, "#include <weft/allreduce/cpu.cpp>\n", doors)


def cuda_program(reduction: Reduction) -> Program:
    """The generated CUDA entries."""
    doors = "".join(
        f'extern "C" __global__ void __launch_bounds__({kernel.threads}, {kernel.per_sm})\n'
        f"{name}{end}(const __grid_constant__ weft::ReduceArgs a) "
        f"{{ weft::{kernel.call.format(moe=moe)}(a); }}\n"
        for name, kernel in KERNELS.items()
        for end, moe in (("", "false"), (MOE, "true"))
    )
    headers = "#include <weft/allreduce/oneshot.cuh>\n#include <weft/allreduce/twoshot.cuh>\n"
    return _program(reduction, headers, doors)


def _program(reduction: Reduction, headers: str, doors: str) -> Program:
    constant = f"constexpr weft::Reduction R = {reduction.literal()};\n"
    return Program(
        name="allreduce",
        what="all-reduce",
        body=headers + constant + doors,
        entry_points={name + end: ReduceArgs for name in DOORS for end in ("", MOE)},
        offsets=reduction.asserted(),
        options=OPTIONS,
    )
