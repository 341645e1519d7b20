"""Compiled grouping of one Shape, on a CPU or a GPU, behind the same two calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_uint64
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weft.jit import (
    CUDA_OPTIONS,
    HOST_OPTIONS,
    CudaModule,
    Launcher,
    compile_cubin,
    compile_shared,
    current_arch,
)
from weft.jit.args import decode, expected, table_source, verify
from weft.runtime.args import Site
from weft.runtime.stream import current_stream
from weft.shape import MAX_PLANES, Shape

MAX_GROUPS = 1024  # static_assert in grouping/group.cuh
TILE = 128  # tokens that one CTA counts
COUNTING = 512  # threads of a CTA that counts: group_threads in grouping/group.cuh
GATHERING = 512  # most threads of a CTA that copies rows
SCATTERING = 256  # and of one that sums them
SENDING = 256  # and of one that sums and sends them
SEND_COLUMNS = 512  # of a row, that one warp sends: grouping/send.cuh
IN_FLIGHT = 4  # vectors that a copying thread holds: vectors_in_flight in grouping/rows.cuh

CPU_SOURCE = """\
#include <weft/grouping/cpu.cpp>
constexpr weft::Shape S = {shape};
constexpr weft::Grouping G = {grouping};
{table}extern "C" void gather(const weft::GroupArgs* a) {{ weft::gather<S, G>(*a); }}
"""
CPU_DOOR = 'extern "C" void {name}(const weft::GroupArgs* a) {{ weft::{name}<S, G>(*a); }}\n'

CUDA_SOURCE = """\
#include <weft/grouping/{file}.cuh>
constexpr weft::Shape S = {shape};
constexpr weft::Grouping G = {grouping};
{table}extern "C" __global__ void __launch_bounds__({counting}, 2)
group(const __grid_constant__ weft::GroupArgs a) {{ weft::group<S, G>(a); }}
extern "C" __global__ void __launch_bounds__({gathering}, 2)
gather(const __grid_constant__ weft::GroupArgs a) {{ weft::gather<S, G>(a); }}
"""
CUDA_DOOR = """\
extern "C" __global__ void __launch_bounds__({threads}, {per_sm})
{name}(const __grid_constant__ weft::GroupArgs a) {{ weft::{name}<S, G>(a); }}
"""

TABLE = "weft_group_args"


class GroupArgs(ctypes.Structure):
    """Mirror of `weft::GroupArgs` in grouping/layout.cuh."""

    _fields_ = (
        ("site", Site),
        ("rows", c_uint64 * MAX_PLANES),
        ("slot", c_uint64),
        ("weight", c_uint64),
        ("ids", c_uint64),
        ("offsets", c_uint64),
        ("counts", c_uint64),
        ("position", c_uint64),
        ("within", c_uint64),
        ("before", c_uint64),
        ("arrived", c_uint64),
        ("y", c_uint64),
        ("dst_addr", c_uint64),
    )


@dataclass(frozen=True, slots=True)
class Grouping:
    """What specialises grouping beside the Shape; `weft::Grouping` in grouping/layout.cuh.

    packing: "contiguous", "masked" or "sources".
    groups: local experts, or sources.   align: groups start at multiples of it.
    rows: contiguous: rows that all groups share; otherwise rows of each group.
    """

    packing: str
    groups: int
    rows: int
    align: int

    @property
    def total(self) -> int:
        """Rows of the whole buffer."""
        return self.rows if self.packing == "contiguous" else self.groups * self.rows

    def entries(self, shape: Shape) -> int:
        """Entries of a token that may become rows."""
        return 1 if self.packing == "sources" else shape.top_k

    def tiles(self, shape: Shape) -> int:
        """Tiles of all sources: CTAs of the counting kernel."""
        return shape.ranks * -(-shape.tokens // TILE)

    def literal(self) -> str:
        """The C++ initialiser."""
        return (
            f"weft::Grouping{{.packing = weft::Packing::{self.packing}, .groups = {self.groups}, "
            f".rows = {self.rows}, .align = {self.align}, .tile = {TILE}}}"
        )


class GroupEntries(Protocol):
    """The operations on one kind of device."""

    def gather(self, args: GroupArgs) -> None:
        """Run, or enqueue, one gather."""

    def scatter(self, args: GroupArgs) -> None:
        """Run, or enqueue, one scatter."""

    def send(self, args: GroupArgs) -> None:
        """Run, or enqueue, one send."""

    def close(self) -> None:
        """Give back what was loaded."""


def cuda_source(shape: Shape, grouping: Grouping, *, sends: bool = False) -> str:
    """The generated CUDA entry."""
    source = CUDA_SOURCE.format(
        file="send" if sends else "rows",
        shape=shape.literal(),
        grouping=grouping.literal(),
        table=table_source(GroupArgs, "weft::GroupArgs", TABLE, device=True),
        counting=COUNTING,
        gathering=GATHERING,
    )
    bounds = {"scatter": (SCATTERING, 4), "send": (SENDING, 2)}
    for name in results(shape, sends):
        threads, per_sm = bounds[name]
        source += CUDA_DOOR.format(name=name, threads=threads, per_sm=per_sm)
    return source


def cpu_source(shape: Shape, grouping: Grouping, *, sends: bool = False) -> str:
    """The generated C++ entry."""
    source = CPU_SOURCE.format(
        shape=shape.literal(),
        grouping=grouping.literal(),
        table=table_source(GroupArgs, "weft::GroupArgs", TABLE, device=False),
    )
    return source + "".join(CPU_DOOR.format(name=name) for name in results(shape, sends))


def compile_cuda(
    shape: Shape,
    grouping: Grouping,
    arch: str,
    *,
    sends: bool = False,
    options: Sequence[str] = (),
    defines: Sequence[str] = (),
) -> bytes:
    """The cubin of the kernels; needs no GPU. Raises CompileError showing the entry."""
    return compile_cubin(
        cuda_source(shape, grouping, sends=sends),
        name="group",
        arch=arch,
        options=(*CUDA_OPTIONS, *options),
        defines=defines,
    )


class CpuGroupEntries:
    """The operations as plain functions; they return when they are done."""

    def __init__(
        self, shape: Shape, grouping: Grouping, *, sends: bool, defines: Sequence[str]
    ) -> None:
        library = compile_shared(
            cpu_source(shape, grouping, sends=sends),
            name="group",
            options=HOST_OPTIONS,
            defines=defines,
        )
        table = (c_uint64 * len(expected(GroupArgs))).in_dll(library, TABLE)
        verify(GroupArgs, list(table))
        self._functions: dict[str, Any] = {}
        for name in ("gather", *results(shape, sends)):
            function = getattr(library, name)
            function.restype = None
            function.argtypes = (ctypes.POINTER(GroupArgs),)
            self._functions[name] = function

    def gather(self, args: GroupArgs) -> None:
        """Run one gather to its end."""
        self._functions["gather"](ctypes.byref(args))

    def scatter(self, args: GroupArgs) -> None:
        """Run one scatter to its end."""
        self._functions["scatter"](ctypes.byref(args))

    def send(self, args: GroupArgs) -> None:
        """Run one send to its end."""
        self._functions["send"](ctypes.byref(args))

    def close(self) -> None:
        """Nothing is held: the library stays loaded for the next object of these sizes."""


class CudaGroupEntries:
    """The kernels on the current device, enqueued on the current stream.

    Grids depend on sizes alone, never on what was received, so a captured call serves any routing.
    """

    def __init__(
        self,
        shape: Shape,
        grouping: Grouping,
        *,
        programmatic: bool,
        sends: bool,
        defines: Sequence[str],
    ) -> None:
        image = compile_cuda(shape, grouping, current_arch(), sends=sends, defines=defines)
        self._device = torch.cuda.current_device()
        self._module = CudaModule(image, name="group")
        verify(GroupArgs, decode(self._module.global_bytes(TABLE)))
        self._launchers = {
            name: Launcher(self._module.function(name), GroupArgs, programmatic=programmatic)
            for name in ("group", "gather", *results(shape, sends))
        }
        copied = max(_vectors(size) for size in shape.row_bytes)
        summed = shape.out_bytes // 16
        self._tiles = grouping.tiles(shape)
        self._gather_threads = _threads(-(-copied // IN_FLIGHT), GATHERING)
        self._scatter_threads = _threads(summed, SCATTERING)
        slots = shape.ranks * shape.tokens
        padding = grouping.groups * (grouping.align - 1)
        self._gather_ctas = min(max(slots, padding), self._resident("gather", self._gather_threads))
        if "scatter" in self._launchers:
            self._scatter_ctas = min(slots, self._resident("scatter", self._scatter_threads))
        if sends:
            warps = slots * -(-shape.hidden // SEND_COLUMNS)
            self._send_ctas = min(-(-warps * 32 // SENDING), self._resident("send", SENDING))

    def gather(self, args: GroupArgs) -> None:
        """Enqueue one gather."""
        stream = current_stream(torch.cuda.current_device())
        self._launchers["group"](args, (self._tiles, 1, 1), COUNTING, stream)
        grid = (self._gather_ctas, 1, 1)
        self._launchers["gather"](args, grid, self._gather_threads, stream)

    def scatter(self, args: GroupArgs) -> None:
        """Enqueue one scatter."""
        stream = current_stream(torch.cuda.current_device())
        grid = (self._scatter_ctas, 1, 1)
        self._launchers["scatter"](args, grid, self._scatter_threads, stream)

    def send(self, args: GroupArgs) -> None:
        """Enqueue one send."""
        stream = current_stream(torch.cuda.current_device())
        self._launchers["send"](args, (self._send_ctas, 1, 1), SENDING, stream)

    def close(self) -> None:
        """Unload the module, once its kernels have run."""
        self._module.unload(after=current_stream(self._device))

    def _resident(self, name: str, threads: int) -> int:
        sms = torch.cuda.get_device_properties().multi_processor_count
        return sms * max(1, self._module.occupancy(name, threads))


def results(shape: Shape, sends: bool) -> tuple[str, ...]:
    """The entries that take the experts' results. Choices are not scattered: they have homes."""
    scatter = () if shape.combine == "gemm_push" else ("scatter",)
    return (*scatter, "send") if sends else scatter


def _vectors(row_bytes: int) -> int:
    """Widest vectors that rows of this size can be copied with, to a row."""
    return row_bytes // next(n for n in (16, 8, 4, 2, 1) if row_bytes % n == 0)


def _threads(wanted: int, most: int) -> int:
    """Whole warps, two at least."""
    return min(most, max(64, -(-wanted // 32) * 32))
