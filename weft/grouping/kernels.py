# SPDX-License-Identifier: Apache-2.0
"""Kernels of grouping: generated source and launches."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from weft.grouping.config import MAX_GROUPS, GroupArgs, GroupConfig
from weft.runtime.kernels import (
    Build,
    CpuKernels,
    CudaKernels,
    EntryPoints,
    Kernels,
    Launch,
    Program,
)
from weft.runtime.layout import vector_bytes
from weft.runtime.stream import current_stream, loading_context
from weft.shape import Shape

COUNT_THREADS = 512  # per CTA that counts rows
MAX_GATHER_THREADS = 512  # per CTA that copies rows
SUM_THREADS = 256  # per CTA that sums or sends rows
STRIP_BYTES = 512  # bytes of a row that a warp processes in one step
VECTORS_IN_FLIGHT = 4  # per thread that copies rows
# Threads per CTA, and CTAs per SM.
BOUNDS = {
    "group": (COUNT_THREADS, 2),
    "gather": (MAX_GATHER_THREADS, 2),
    "scatter": (SUM_THREADS, 3),
    "send": (SUM_THREADS, 3),
}


def build_cpu_program(shape: Shape, config: GroupConfig, *, sends: bool = False) -> Program:
    """Build the C++ program."""
    constants = f"constexpr weft::Shape S = {shape.to_cpp()};\n"
    return Program(
        name="grouping",
        label="grouping",
        ranks=shape.ranks,
        headers=("grouping/cpu.cpp",),
        constants=f"{constants}constexpr weft::Grouping G = {config.to_cpp()};\n",
        entry_points=_entry_points("gather", *result_entries(shape, sends)),
        offsets=(("weft::max_groups", MAX_GROUPS),),
    )


def build_cuda_program(shape: Shape, config: GroupConfig, *, sends: bool = False) -> Program:
    """Build the CUDA program."""
    program = build_cpu_program(shape, config, sends=sends)
    numbers = [
        ("weft::group_threads", COUNT_THREADS),
        ("weft::vectors_in_flight", VECTORS_IN_FLIGHT),
    ]
    numbers.append(("weft::warp_lanes * sizeof(uint4)", STRIP_BYTES))
    return replace(
        program,
        headers=("grouping/send.cuh",),
        entry_points=_entry_points("group", *program.entry_points),
        bounds=BOUNDS,
        offsets=(*program.offsets, *numbers),
    )


def _entry_points(*names: str) -> EntryPoints:
    return {name: (GroupArgs, f"{name}<S, G>") for name in names}


class CudaGroupKernels(CudaKernels):
    """Compiled kernels for one shape and config.

    Grids depend only on these, not on the received rows, so a captured call is valid for any
    routing.
    """

    def __init__(self, shape: Shape, config: GroupConfig, build: Build, *, sends: bool) -> None:
        super().__init__(build_cuda_program(shape, config, sends=sends), build)
        self._shape, self._config = shape, config
        for name in self._program.entry_points:
            self._launches[name, 0] = self._build_launch(name, 0)

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Enqueue one operation; a gather is preceded by the counting kernel."""
        stream = current_stream(torch.cuda.current_device())
        if name == "gather":
            count = self._launches["group", 0]
            count.launcher(args, count.grid, count.threads, stream)
        launch = self._launches[name, 0]
        launch.launcher(args, launch.grid, launch.threads, stream)

    def _build_launch(self, name: str, tokens: int) -> Launch:
        shape, config = self._shape, self._config
        slots = shape.ranks * shape.tokens
        if name == "group":
            ctas, threads = config.tiles(shape), COUNT_THREADS
        elif name == "gather":
            copied = max(size // vector_bytes(size) for size in shape.row_bytes)
            threads = _round_up_threads(-(-copied // VECTORS_IN_FLIGHT), MAX_GATHER_THREADS)
            padding = config.groups * (config.align - 1)
            ctas = min(max(slots, padding), self._sms * self._max_ctas_per_sm(name, threads))
        else:
            threads, warps = SUM_THREADS, slots * -(-shape.out_bytes // STRIP_BYTES)
            ctas = min(-(-warps * 32 // threads), self._sms * self._max_ctas_per_sm(name, threads))
        launcher = self._get_launcher(name, use_pdl=self._build.use_pdl)
        return Launch(launcher, (ctas, 1, 1), threads)


def load_kernels(
    device: torch.device, shape: Shape, config: GroupConfig, build: Build, *, sends: bool
) -> Kernels:
    """Compile and load the kernels for one rank's device."""
    if device.type == "cpu":
        return CpuKernels(build_cpu_program(shape, config, sends=sends), build)
    with loading_context(device):
        return CudaGroupKernels(shape, config, build, sends=sends)


def result_entries(shape: Shape, sends: bool) -> tuple[str, ...]:
    """Return the names of the entries that read the experts' results; gemm_push has no scatter."""
    scatter = () if shape.combine == "gemm_push" else ("scatter",)
    return (*scatter, "send") if sends else scatter


def _round_up_threads(minimum: int, limit: int) -> int:
    """Round up to whole warps, with at least two warps and at most `limit` threads."""
    return min(limit, max(64, -(-minimum // 32) * 32))
