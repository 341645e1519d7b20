"""The generated entries: a Shape literal and a three-line door for each operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.alltoall.plan import LARGEST
from weft.jit import CUDA_OPTIONS, compile_cubin
from weft.shape import Shape

SPLIT_PARTS = {"send": "send", "receive": "recv"}  # entry -> weft::PhasePart
FEW = 32  # up to so many SMs, the bulk engine moves the rows


@dataclass(frozen=True, slots=True)
class Door:
    """One `extern "C"` entry: its argument struct, the template behind it, its launch bounds."""

    struct: str
    call: str
    threads: int = LARGEST
    per_sm: int = 1


def doors(*, split_phase: bool, few: bool) -> dict[str, Door]:
    """The entries of an all-to-all, by name.

    split_phase: also each phase as send and receive.   few: move rows with the bulk engine.
    """
    if few:
        return {
            "dispatch": Door("DispatchArgs", "dispatch_tma<S>", threads=32),
            # Reducing threads, and the warp that loads.
            "combine": Door("CombineArgs", "combine_tma<S, rank>", threads=256 + 32),
        }
    found = {
        "dispatch": Door("DispatchArgs", "dispatch<S>", per_sm=2),
        "combine": Door("CombineArgs", "combine<S, rank>"),
    }
    if split_phase:
        for part, cpp in SPLIT_PARTS.items():
            found[f"dispatch_{part}"] = Door(
                "DispatchArgs", f"dispatch<S, weft::PhasePart::{cpp}>", per_sm=2
            )
            found[f"combine_{part}"] = Door(
                "CombineArgs", f"combine<S, rank, weft::PhasePart::{cpp}>"
            )
    return found


def cuda_source(shape: Shape, rank: int, *, split_phase: bool = False, few: bool = False) -> str:
    """The generated CUDA entries of a Shape on one rank."""
    lines = [
        f"#include <weft/alltoall/{'dispatch_combine_tma' if few else 'combine'}.cuh>",
        "#include <weft/alltoall/dispatch.cuh>",
        "#include <weft/alltoall/exports.cuh>",
        f"constexpr weft::Shape S = {shape.literal()};",
        f"constexpr weft::u32 rank = {rank};",
        "WEFT_EXPORT(S, __device__);",
        'extern "C" __device__ weft::u64 weft_measured[weft::measured_offsets] = {};',
        'extern "C" __global__ void weft_measure(const __grid_constant__ weft::Site a) '
        "{ weft::measure<S>(a.base, weft_measured); }",
    ]
    if few:
        lines.append(
            'extern "C" __device__ const weft::u64 weft_shared[] = '
            "{sizeof(weft::RowRing<S>), sizeof(weft::PieceRing<S>)};"
        )
    for name, door in doors(split_phase=split_phase, few=few).items():
        lines += [
            f'extern "C" __global__ void __launch_bounds__({door.threads}, {door.per_sm})',
            f"{name}(const __grid_constant__ weft::{door.struct} a) {{ weft::{door.call}(a); }}",
        ]
    return "\n".join(lines) + "\n"


def cpu_source(shape: Shape) -> str:
    """The generated C++ entries of a Shape; halves included, they cost nothing."""
    lines = [
        "#include <weft/alltoall/cpu.cpp>",
        f"constexpr weft::Shape S = {shape.literal()};",
        "WEFT_EXPORT(S, );",
    ]
    for name, door in doors(split_phase=True, few=False).items():
        call = door.call.replace("S, rank", "S")
        lines.append(
            f'extern "C" void {name}(const weft::{door.struct}* a) {{ weft::{call}(*a); }}'
        )
    return "\n".join(lines) + "\n"


def compile_cuda(
    shape: Shape,
    rank: int,
    arch: str,
    *,
    split_phase: bool = False,
    few: bool = False,
    defines: Sequence[str] = (),
) -> bytes:
    """The cubin of all kernels; needs no GPU. Raises CompileError showing the entries."""
    return compile_cubin(
        cuda_source(shape, rank, split_phase=split_phase, few=few),
        name="alltoall",
        arch=arch,
        options=CUDA_OPTIONS,
        defines=defines,
    )
