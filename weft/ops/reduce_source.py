"""The generated entries of the fused all-reduce."""

from __future__ import annotations

from weft.jit.args import table_source
from weft.ops.reduce_args import ReduceArgs
from weft.ops.reduction import Reduction

# One rounding for each operation: bits must not depend on who fuses a multiply with an add.
HOST_OPTIONS = ("-ffp-contract=off",)
TABLE, ARGS_TABLE = "weft_reduction", "weft_reduce_args"
DOORS = {"oneshot": "oneshot", "twoshot": "twoshot", "twoshot_bulk": "bulk"}


def numbers(*, device: bool) -> str:
    """C++ that exports what `Reduction.expected` and `ReduceArgs` are compared with."""
    space = "__device__ " if device else ""
    return (
        f'extern "C" {space}const weft::u64 {TABLE}[] = {{sizeof(weft::ReductionShare<R>), '
        "WEFT_OFFSET(weft::ReductionShare<R>, slots), WEFT_OFFSET(weft::ReductionShare<R>, slots) "
        "+ WEFT_OFFSET(weft::Summands<R>, direct)};\n"
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
        "#include <weft/protocol/cpu.cpp>\n#include <weft/protocol/reduction_cpu.cpp>\n"
        f"constexpr weft::Reduction R = {reduction.literal()};\n{numbers(device=False)}{doors}"
    )
