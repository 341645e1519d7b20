"""The compiled entry that stores packed rows at their tokens' owners, on a CPU or a GPU."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64

import torch

from weft.jit import Launcher, table_source
from weft.runtime.args import Site
from weft.runtime.entries import Build, CpuEntries, CudaEntries, Entries, Launch, Program
from weft.runtime.layout import struct_numbers
from weft.runtime.stream import loading
from weft.shape import Shape

THREADS = 256
COLUMNS = 512  # of a row, that one warp takes: Strip in grouping/send.cuh
TABLE = "weft_return_args"

CPU_SOURCE = """\
#include <weft/compat/return_rows_cpu.hpp>
constexpr weft::Shape S = {shape};
{table}extern "C" void return_rows(const weft::ReturnArgs* a) {{ weft::return_rows<S>(*a); }}
"""
CUDA_SOURCE = """\
#include <weft/compat/return_rows.cuh>
constexpr weft::Shape S = {shape};
{table}extern "C" __global__ void __launch_bounds__({threads}, 2)
return_rows(const __grid_constant__ weft::ReturnArgs a) {{ weft::return_rows<S>(a); }}
"""


class ReturnArgs(ctypes.Structure):
    """Mirror of `weft::ReturnArgs` in compat/return_layout.cuh."""

    _fields_ = (
        ("site", Site),
        ("rows", c_uint64),
        ("tokens", c_uint64),
        ("until", c_uint64),
        ("in_rank", c_uint64),
        ("arrived", c_uint64),
        ("limit", c_uint32),
        ("own_tokens", c_uint32),
    )


def program(shape: Shape, *, device: bool) -> Program:
    """The generated entry of a Shape."""
    table = table_source(ReturnArgs, "weft::ReturnArgs", TABLE, device=device)
    source = CUDA_SOURCE if device else CPU_SOURCE
    return Program(
        name="return_rows",
        what="normal-mode combine",
        source=source.format(shape=shape.literal(), table=table, threads=THREADS),
        doors={"return_rows": ReturnArgs},
        tables={TABLE: struct_numbers(ReturnArgs)},
    )


class CudaReturnEntries(CudaEntries):
    """The kernel of one Shape. Its grid depends on sizes alone: a captured call serves any rows."""

    def __init__(self, shape: Shape, build: Build) -> None:
        super().__init__(program(shape, device=True), build)
        self._shape = shape

    def _find(self, name: str, tokens: int) -> Launch:
        shape = self._shape
        warps = shape.ranks * shape.tokens * -(-shape.hidden // COLUMNS)
        resident = self._sms * max(1, self._module.occupancy(name, THREADS))
        ctas = min(-(-warps * 32 // THREADS), resident)
        launcher = Launcher(
            self._module.function(name), ReturnArgs, programmatic=self._build.programmatic
        )
        return Launch(launcher, (ctas, 1, 1), THREADS)


def load_entries(device: torch.device, shape: Shape, build: Build) -> Entries:
    """Compile and load the entry of a Shape for one rank's device."""
    if device.type == "cpu":
        return CpuEntries(program(shape, device=False), build)
    with loading(device):
        return CudaReturnEntries(shape, build)
