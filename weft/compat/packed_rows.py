# SPDX-License-Identifier: Apache-2.0
"""CPU and GPU kernels that pack rows by source, and return packed rows to their owners."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64

import torch

from weft.heap.header import Site
from weft.runtime.kernels import Build, CpuKernels, CudaKernels, Kernels, Launch, Program
from weft.runtime.stream import loading_context
from weft.shape import Shape

THREADS = 256
PIECE_BYTES = 1024  # bytes of a row that one warp copies at a time


class PackedRows(ctypes.Structure):
    """Mirror of `weft::PackedRows` in compat/packed_layout.cuh."""

    _fields_ = (
        ("tokens", c_uint64),
        ("prefix", c_uint64),
        ("limit", c_uint32),
        ("reserved", c_uint32),
    )


class FetchArgs(ctypes.Structure):
    """Mirror of `weft::FetchArgs` in compat/packed_layout.cuh."""

    _fields_ = (
        ("site", Site),
        ("packed", PackedRows),
        ("rows", c_uint64),
        ("scales", c_uint64),
        ("row_bytes", c_uint32),
        ("scale_bytes", c_uint32),
    )


class ReturnArgs(ctypes.Structure):
    """Mirror of `weft::ReturnArgs` in compat/packed_layout.cuh."""

    _fields_ = (
        ("site", Site),
        ("packed", PackedRows),
        ("rows", c_uint64),
        ("in_rank", c_uint64),
        ("arrived", c_uint64),
        ("num_tokens", c_uint32),
        ("reserved", c_uint32),
    )


ENTRY_ARGS: dict[str, type[ctypes.Structure]] = {"fetch_rows": FetchArgs, "return_rows": ReturnArgs}


def build_program(name: str, shape: Shape, *, device: bool) -> Program:
    """Return the program of one of ENTRIES for a Shape."""
    return Program(
        name="packed",
        label="normal mode",
        ranks=shape.ranks,
        headers=(f"compat/packed_rows{'.cuh' if device else '_cpu.hpp'}",),
        constants=f"constexpr weft::Shape S = {shape.to_cpp()};\n",
        entry_points={name: (ENTRY_ARGS[name], f"{name}<S>")},
        bounds={name: (THREADS, 2)} if device else None,
        structs=(PackedRows,),
    )


class CudaRowKernels(CudaKernels):
    """A compiled GPU kernel for one Shape; its grid depends only on sizes, as captured calls need.

    `max_rows` is the maximum number of rows on a rank.
    """

    def __init__(self, name: str, shape: Shape, max_rows: int, build: Build) -> None:
        super().__init__(build_program(name, shape, device=True), build)
        self._num_warps = max_rows * -(-shape.out_bytes // PIECE_BYTES)
        # Load it now: later, a peer's kernel may be spinning.
        self._launches[name, 0] = self._build_launch(name, 0)

    def _build_launch(self, name: str, tokens: int) -> Launch:
        ctas = min(
            -(-self._num_warps * 32 // THREADS), self._sms * self._max_ctas_per_sm(name, THREADS)
        )
        launcher = self._get_launcher(name, use_pdl=self._build.use_pdl)
        return Launch(launcher, (ctas, 1, 1), THREADS)


def load_kernel(
    device: torch.device, name: str, shape: Shape, max_rows: int, build: Build
) -> Kernels:
    """Compile and load a kernel for a Shape on a rank's device."""
    if device.type == "cpu":
        return CpuKernels(build_program(name, shape, device=False), build)
    with loading_context(device):
        return CudaRowKernels(name, shape, max_rows, build)
