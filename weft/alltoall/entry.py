"""Compiled dispatch and combine for one Shape, on a CPU or a GPU, behind the same calls.

Everything is compiled, loaded and compared with Python's mirrors here, at construction: a kernel
that had to be loaded at its first launch could never be, while a peer's kernel spins for it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weft.alltoall.args import CombineArgs, DispatchArgs
from weft.alltoall.layout import Layout
from weft.alltoall.plan import Plan, plan_combine, plan_dispatch, plan_home, plan_sums
from weft.alltoall.source import FEW, compile_cuda, cpu_source, doors
from weft.errors import InvalidArgument
from weft.jit import HOST_OPTIONS, CudaModule, Launcher, compile_shared, current_arch
from weft.runtime.args import Site
from weft.runtime.check import check_sms
from weft.runtime.stream import current_stream, loading
from weft.shape import Shape

STRUCTS: dict[str, type[ctypes.Structure]] = {
    "DispatchArgs": DispatchArgs,
    "CombineArgs": CombineArgs,
}
# From so many 16-byte words on, a launch that overlaps its predecessor only takes room from it: at
# 2048 tokens x 7168 it costs 0.5 %; at 32 it gains 4 %, at 128 up to 1 % (8 x H200, 2026-11-20).
LONG = 256 * 896


@dataclass(frozen=True, slots=True)
class Build:
    """How kernels are made and launched; equal Shapes may be built differently on each rank.

    num_sms: SMs that the kernels may fill; None for all. Up to 32, the bulk engine moves the rows.
    programmatic: launch short kernels with programmatic dependent launch.
    split_phase: also build each phase as send and receive.
    defines: macros for the compiler.
    """

    num_sms: int | None = None
    programmatic: bool = True
    split_phase: bool = False
    defines: Sequence[str] = ()

    def few(self, shape: Shape) -> bool:
        """Does the bulk engine move the rows?"""
        granted = self.num_sms is not None and self.num_sms <= FEW
        return granted and not self.split_phase and _fits_bulk(shape)


class Entries(Protocol):
    """The operations of one Shape on one kind of device, by name."""

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run, or enqueue, one operation on `tokens` tokens."""

    def close(self) -> None:
        """Give back what was loaded."""


class CpuEntries:
    """The operations as plain functions; they return when they are done."""

    def __init__(self, shape: Shape, layout: Layout, build: Build) -> None:
        check_sms(build.num_sms, None)
        library = compile_shared(
            cpu_source(shape), name="alltoall", options=HOST_OPTIONS, defines=build.defines
        )
        table = (ctypes.c_uint64 * len(layout.expected())).in_dll(library, "weft_layout")
        layout.verify(list(table))
        self._functions: dict[str, Any] = {}
        for name, door in doors(split_phase=True, few=False).items():
            function = getattr(library, name)
            function.restype = None
            function.argtypes = (ctypes.POINTER(STRUCTS[door.struct]),)
            self._functions[name] = function

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run one operation to its end."""
        self._functions[name](ctypes.byref(args))

    def close(self) -> None:
        """Nothing is held: the library stays loaded for the next object of this Shape."""


class CudaEntries:
    """The operations as kernels on the current device, enqueued on the current stream."""

    def __init__(self, shape: Shape, layout: Layout, rank: int, build: Build) -> None:
        available = torch.cuda.get_device_properties().multi_processor_count
        check_sms(build.num_sms, available)
        self._device = torch.cuda.current_device()
        self._sms, self._shape, few = build.num_sms or available, shape, build.few(shape)
        image = compile_cuda(
            shape,
            rank,
            current_arch(),
            split_phase=build.split_phase,
            few=few,
            defines=build.defines,
        )
        self._module = CudaModule(image, name="alltoall")
        layout.verify(self._table("weft_layout"))
        measure = Launcher(self._module.function("weft_measure"), Site)
        with self._module.own_stream() as stream:
            measure(Site(base=layout.share_bytes), (1, 1, 1), 1, stream)
        layout.verify_code(self._table("weft_measured"))
        self._shared = dict.fromkeys(doors(split_phase=build.split_phase, few=few), 0)
        if few:
            rings = self._table("weft_shared")
            self._shared = {"dispatch": rings[0], "combine": rings[1]}
        self._few, self._whole = few, self._sms == available
        self._launchers: dict[tuple[str, bool], Launcher] = {}
        for name, door in doors(split_phase=build.split_phase, few=few).items():
            function = self._module.function(name, shared=self._shared[name])
            for early in {False, build.programmatic}:
                self._launchers[name, early] = Launcher(
                    function, STRUCTS[door.struct], programmatic=early
                )
        self._programmatic = build.programmatic
        self._in_vectors = _in_vectors(shape)
        self._plans: dict[tuple[str, int], Plan] = {}

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Enqueue one operation."""
        device = torch.cuda.current_device()
        if device != self._device:
            raise InvalidArgument(
                f"the current device is cuda:{device}, this all-to-all works on "
                f"cuda:{self._device}: call torch.cuda.set_device({self._device}) first"
            )
        p = self._plans.get((name, tokens)) or self._plan(name, tokens)
        early = self._programmatic and tokens * self._in_vectors < LONG
        if p.strips:
            args.pushers, args.strips = p.pushers, p.strips
        grid = (p.workers, p.chunks, 1)
        self._launchers[name, early](args, grid, p.threads, current_stream(device))

    def close(self) -> None:
        """Unload the module, once its kernels have run."""
        self._module.unload(after=current_stream(self._device))

    def _plan_push(self, tokens: int, per_sm: Callable[[int], int]) -> Plan:
        """Rows of all sources are pushed, about as many as this rank's tokens have peers.

        A whole combine is resident as a whole, because its CTAs wait for what all of them pushed.
        """
        shape = self._shape
        rows = max(tokens, _few_tokens(shape)) * min(shape.ranks, shape.top_k)
        p = plan_combine(rows, shape.out_bytes // 16, sms=self._sms, per_sm=per_sm)
        most = self._sms * max(1, per_sm(p.threads))
        return Plan(p.workers, min(p.chunks, most), p.threads)

    def _plan_home(self, name: str, tokens: int, per_sm: Callable[[int], int]) -> Plan:
        """Rows of all sources are pushed, about as many as this rank's tokens have slots."""
        shape = self._shape
        if name == "combine_receive":
            return plan_sums(tokens, shape.hidden, sms=self._sms, per_sm=per_sm)
        slots = max(tokens, min(shape.tokens, 8)) * shape.ranks
        taken = tokens if name == "combine" else 0
        return plan_home(
            taken, slots, shape.hidden, sms=self._sms, per_sm=per_sm, whole=self._whole
        )

    def _table(self, name: str) -> list[int]:
        raw = self._module.global_bytes(name)
        return list(struct.unpack(f"<{len(raw) // 8}Q", raw))

    def _plan(self, name: str, tokens: int) -> Plan:
        """The launch of an operation on so many tokens; found once, kept."""
        shape, out_vectors = self._shape, self._shape.out_bytes // 16
        pushes = shape.combine in ("push", "push_fp8")

        def per_sm(threads: int) -> int:
            return self._module.occupancy(name, threads, shared=self._shared[name])

        if self._few:
            threads = doors(split_phase=False, few=True)[name].threads
            found = Plan(workers=self._sms, chunks=1, threads=threads)
        elif name == "dispatch_receive" or (name == "combine_send" and not pushes):
            found = Plan(workers=1, chunks=1, threads=64)  # flags only
        elif name.startswith("dispatch"):
            found = plan_dispatch(tokens, self._in_vectors, sms=self._sms, per_sm=per_sm)
        elif shape.combine == "push_fp8":
            found = self._plan_home(name, tokens, per_sm)
        elif not pushes or name == "combine_receive":
            found = plan_combine(tokens, out_vectors, sms=self._sms, per_sm=per_sm)
        else:
            found = self._plan_push(tokens, per_sm)
        self._plans[name, tokens] = found
        return found


def load_entries(
    device: torch.device, rank: int, shape: Shape, layout: Layout, build: Build
) -> Entries:
    """Compile and load the operations of a Shape for one rank's device."""
    if device.type == "cpu":
        return CpuEntries(shape, layout, build)
    with loading(device):
        return CudaEntries(shape, layout, rank, build)


def _few_tokens(shape: Shape) -> int:
    """Tokens that a push plans for at least: peers may send rows to a rank that has none itself."""
    return min(shape.tokens, 16)


def _fits_bulk(shape: Shape) -> bool:
    """Rows that the bulk engine can take: whole 16-byte words, opaque, three of them in 200 KiB."""
    row = shape.row_bytes[0]
    plain = shape.combine == "pull" and shape.quant == "none"
    return plain and row % 16 == 0 and row <= 66 * 1024 and shape.ranks <= 16


def _in_vectors(shape: Shape) -> int:
    """Loads of one token's payload: vectors of each row, or 16 columns of a quantised one."""
    rows = shape.row_bytes
    if shape.quant != "none":
        return shape.hidden // 16 + sum(_vectors(size) for size in rows[2:])
    return sum(_vectors(size) for size in rows)


def _vectors(row_bytes: int) -> int:
    unit = next(n for n in (16, 8, 4, 2, 1) if row_bytes % n == 0)
    return row_bytes // unit


def place_payload(args: DispatchArgs, tensors: Sequence[torch.Tensor], *, quantized: bool) -> None:
    """Put the addresses of the payload tensors, by plane, into the arguments.

    A quantised first payload arrives as two planes, numbers and scales, so the others move up.
    """
    planes = args.payload
    for i, tensor in enumerate(tensors):
        planes[i + 1 if quantized and i else i] = tensor.data_ptr()
