"""Compiled dispatch and combine for one Shape, on a CPU or a GPU, behind the same two calls.

Everything is compiled, loaded and compared with Python's mirrors here, at construction: a kernel
that had to be loaded at its first launch could never be, while a peer's kernel waits for it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from weft.errors import InvalidArgument
from weft.jit import CudaModule, Launcher, compile_cubin, compile_shared, current_arch
from weft.ops.args import CombineArgs, DispatchArgs
from weft.ops.layout import Layout
from weft.ops.plan import LARGEST, Plan, plan_combine, plan_dispatch
from weft.shape import MAX_PLANES, Shape

CPU_SOURCE = """\
#include <weft/protocol/cpu.cpp>
constexpr weft::Shape S = {literal};
WEFT_EXPORT(S, );
extern "C" void dispatch(const weft::DispatchArgs* a) {{ weft::dispatch<S>(*a); }}
extern "C" void combine(const weft::CombineArgs* a) {{ weft::combine<S>(*a); }}
"""

CUDA_SOURCE = """\
#include <weft/kernels/combine.cuh>
#include <weft/kernels/dispatch.cuh>
#include <weft/protocol/exports.cuh>
constexpr weft::Shape S = {literal};
WEFT_EXPORT(S, __device__);
extern "C" __global__ void __launch_bounds__({threads}, 2)
dispatch(const __grid_constant__ weft::DispatchArgs a) {{ weft::dispatch<S>(a); }}
extern "C" __global__ void __launch_bounds__({threads}, 1)
combine(const __grid_constant__ weft::CombineArgs a) {{ weft::combine<S, {rank}>(a); }}
"""

CUDA_OPTIONS = ("-default-device",)
# One rounding for each operation, as in the kernels: a fused multiply-add has one for two.
HOST_OPTIONS = ("-ffp-contract=off",)


class Entries(Protocol):
    """The two operations of one Shape on one kind of device."""

    def dispatch(self, args: DispatchArgs) -> None:
        """Run, or enqueue, one dispatch."""

    def combine(self, args: CombineArgs) -> None:
        """Run, or enqueue, one combine."""

    def close(self) -> None:
        """Give back what was loaded."""


def cuda_source(shape: Shape, rank: int) -> str:
    """The generated CUDA entry of a Shape on one rank."""
    return CUDA_SOURCE.format(literal=shape.literal(), threads=LARGEST, rank=rank)


def cpu_source(shape: Shape) -> str:
    """The generated C++ entry of a Shape."""
    return CPU_SOURCE.format(literal=shape.literal())


def compile_cuda(shape: Shape, rank: int, arch: str, *, defines: Sequence[str] = ()) -> bytes:
    """The cubin of both kernels; needs no GPU. Raises CompileError showing the entry."""
    return compile_cubin(
        cuda_source(shape, rank), name="alltoall", arch=arch, options=CUDA_OPTIONS, defines=defines
    )


class CpuEntries:
    """Both operations as plain functions; they return when they are done."""

    def __init__(self, shape: Shape, layout: Layout, *, defines: Sequence[str] = ()) -> None:
        library = compile_shared(
            cpu_source(shape), name="alltoall", options=HOST_OPTIONS, defines=defines
        )
        layout.verify(
            list((ctypes.c_uint64 * len(layout.expected())).in_dll(library, "weft_layout"))
        )
        self._dispatch: Callable[..., None] = library.dispatch
        self._combine: Callable[..., None] = library.combine
        for function, struct_type in (
            (library.dispatch, DispatchArgs),
            (library.combine, CombineArgs),
        ):
            function.restype = None
            function.argtypes = (ctypes.POINTER(struct_type),)

    def dispatch(self, args: DispatchArgs) -> None:
        """Run one dispatch to its end."""
        self._dispatch(ctypes.byref(args))

    def combine(self, args: CombineArgs) -> None:
        """Run one combine to its end."""
        self._combine(ctypes.byref(args))

    def close(self) -> None:
        """Nothing is held: the library stays loaded for the next object of this Shape."""


class CudaEntries:
    """Both operations as kernels on the current device, enqueued on the current stream."""

    def __init__(
        self,
        shape: Shape,
        layout: Layout,
        rank: int,
        *,
        num_sms: int | None = None,
        programmatic: bool = True,
        defines: Sequence[str] = (),
    ) -> None:
        available = torch.cuda.get_device_properties().multi_processor_count
        if num_sms is not None and not 1 <= num_sms <= available:
            raise InvalidArgument(f"num_sms is {num_sms}; this GPU has 1..{available}")
        self._sms = num_sms or available
        self._shape = shape
        self._module = CudaModule(
            compile_cuda(shape, rank, current_arch(), defines=defines), name="alltoall"
        )
        table = self._module.global_bytes("weft_layout")
        layout.verify(struct.unpack(f"<{len(table) // 8}Q", table))
        self._launch_dispatch = Launcher(
            self._module.function("dispatch"), DispatchArgs, programmatic=programmatic
        )
        self._launch_combine = Launcher(
            self._module.function("combine"), CombineArgs, programmatic=programmatic
        )
        self._out_vectors = shape.out_bytes // 16
        self._in_vectors = sum(-(-size // _vector_bytes(size)) for size in shape.row_bytes)
        self._plans: dict[tuple[str, int], Plan] = {}

    def dispatch(self, args: DispatchArgs) -> None:
        """Enqueue one dispatch."""
        p = self._plans.get(("dispatch", args.tokens)) or self._plan_dispatch(args.tokens)
        stream = torch.cuda.current_stream().cuda_stream
        self._launch_dispatch(args, (p.workers, p.chunks, 1), p.threads, stream)

    def combine(self, args: CombineArgs) -> None:
        """Enqueue one combine."""
        p = self._plans.get(("combine", args.tokens)) or self._plan_combine(args.tokens)
        stream = torch.cuda.current_stream().cuda_stream
        self._launch_combine(args, (p.workers, p.chunks, 1), p.threads, stream)

    def close(self) -> None:
        """Unload the module."""
        self._module.unload()

    def _plan_dispatch(self, tokens: int) -> Plan:
        found = plan_dispatch(
            tokens,
            self._in_vectors,
            sms=self._sms,
            per_sm=lambda threads: self._module.occupancy("dispatch", threads),
        )
        self._plans["dispatch", tokens] = found
        return found

    def _plan_combine(self, tokens: int) -> Plan:
        found = plan_combine(
            tokens,
            self._out_vectors,
            sms=self._sms,
            per_sm=lambda threads: self._module.occupancy("combine", threads),
        )
        self._plans["combine", tokens] = found
        return found


def _vector_bytes(row_bytes: int) -> int:
    return next(n for n in (16, 8, 4, 2, 1) if row_bytes % n == 0)


def payload_addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_uint64]:
    """The addresses of the payload tensors, as DispatchArgs holds them."""
    return (ctypes.c_uint64 * MAX_PLANES)(*(t.data_ptr() for t in tensors))
