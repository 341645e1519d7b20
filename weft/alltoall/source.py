"""The generated entries: a Shape literal and a three-line door for each operation."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from weft.alltoall.args import CombineArgs, DispatchArgs
from weft.alltoall.layout import Layout
from weft.alltoall.plan import LARGEST
from weft.runtime.entries import Program
from weft.shape import Shape

SPLIT_PARTS = {"send": "send", "receive": "recv"}  # entry -> weft::PhasePart
STRUCTS: Mapping[str, type[ctypes.Structure]] = {
    "DispatchArgs": DispatchArgs,
    "CombineArgs": CombineArgs,
}


@dataclass(frozen=True, slots=True)
class Door:
    """One `extern "C"` entry: its argument struct, the template behind it, its launch bounds."""

    struct: str
    call: str
    threads: int = LARGEST
    per_sm: int = 1


def doors(*, split_phase: bool, tma: bool) -> dict[str, Door]:
    """The entries of an all-to-all, by name.

    split_phase: also each phase as send and receive.   tma: rows by bulk copies (TMA), for few SMs.
    """
    if tma:
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


def cuda_program(
    shape: Shape, rank: int, *, split_phase: bool = False, tma: bool = False
) -> Program:
    """The generated CUDA entries of a Shape on one rank."""
    found = doors(split_phase=split_phase, tma=tma)
    lines = [
        f"#include <weft/alltoall/{'dispatch_combine_tma' if tma else 'combine'}.cuh>",
        "#include <weft/alltoall/dispatch.cuh>",
        "#include <weft/alltoall/exports.cuh>",
        f"constexpr weft::Shape S = {shape.literal()};",
        f"constexpr weft::u32 rank = {rank};",
        "WEFT_EXPORT(S, __device__);",
        'extern "C" __device__ weft::u64 weft_measured[weft::measured_offsets] = {};',
        'extern "C" __global__ void weft_measure(const __grid_constant__ weft::Site a) '
        "{ weft::measure<S>(a.base, weft_measured); }",
    ]
    if tma:
        lines.append(
            'extern "C" __device__ const weft::u64 weft_shared[] = '
            "{sizeof(weft::RowRing<S>), sizeof(weft::PieceRing<S>)};"
        )
    for name, door in found.items():
        lines += [
            f'extern "C" __global__ void __launch_bounds__({door.threads}, {door.per_sm})',
            f"{name}(const __grid_constant__ weft::{door.struct} a) {{ weft::{door.call}(a); }}",
        ]
    return _program(shape, lines, found)


def cpu_program(shape: Shape) -> Program:
    """The generated C++ entries of a Shape; both halves of a phase included, they cost nothing."""
    found = doors(split_phase=True, tma=False)
    lines = [
        "#include <weft/alltoall/cpu.cpp>",
        f"constexpr weft::Shape S = {shape.literal()};",
        "WEFT_EXPORT(S, );",
    ]
    for name, door in found.items():
        call = door.call.replace("S, rank", "S")
        lines.append(
            f'extern "C" void {name}(const weft::{door.struct}* a) {{ weft::{call}(*a); }}'
        )
    return _program(shape, lines, found)


def _program(shape: Shape, lines: list[str], found: Mapping[str, Door]) -> Program:
    layout = Layout.of(shape)
    return Program(
        name="alltoall",
        what="all-to-all",
        source="\n".join(lines) + "\n",
        doors={name: STRUCTS[door.struct] for name, door in found.items()},
        tables={"weft_layout": layout.expected()},
        share_bytes=layout.share_bytes,
        measured=layout.places(),
    )
