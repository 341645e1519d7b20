"""Compiled all-reduces of one Reduction, on a CPU or a GPU, behind the same call.

Everything is compiled, loaded and compared with Python's mirrors at construction, for every
epilogue: a kernel that had to be loaded at its first launch could never be, while a peer's spins.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from weft.errors import InvalidArgument
from weft.jit import CudaModule, Launcher, compile_shared, current_arch
from weft.jit.args import decode, expected, verify
from weft.ops.entry import LONG
from weft.ops.reduce_args import ReduceArgs
from weft.ops.reduce_plan import ReducePlan, plan_oneshot, plan_twoshot
from weft.ops.reduce_source import (
    ARGS_TABLE,
    DOORS,
    HOST_OPTIONS,
    KERNELS,
    MOE,
    TABLE,
    compile_cuda,
    cpu_source,
)
from weft.ops.reduction import Reduction


class ReduceEntries(Protocol):
    """The backends on one kind of device, by name."""

    def run(self, name: str, args: ReduceArgs) -> None:
        """Run, or enqueue, one all-reduce."""

    def close(self) -> None:
        """Give back what was loaded."""


class CpuReduceEntries:
    """The backends as plain functions; they return when they are done."""

    def __init__(self, reduction: Reduction, defines: Sequence[str]) -> None:
        library = compile_shared(
            cpu_source(reduction), name="allreduce", options=HOST_OPTIONS, defines=defines
        )
        count = len(reduction.expected())
        reduction.verify(list((ctypes.c_uint64 * count).in_dll(library, TABLE)))
        count = len(expected(ReduceArgs))
        verify(ReduceArgs, list((ctypes.c_uint64 * count).in_dll(library, ARGS_TABLE)))
        self._functions: dict[str, Callable[..., None]] = {}
        for name in DOORS:
            function = getattr(library, name)
            function.restype = None
            function.argtypes = (ctypes.POINTER(ReduceArgs),)
            self._functions[name] = function

    def run(self, name: str, args: ReduceArgs) -> None:
        """Run one all-reduce to its end."""
        self._functions[name](ctypes.byref(args))

    def close(self) -> None:
        """Nothing is held: the library stays loaded for the next object of these sizes."""


class CudaReduceEntries:
    """The backends as kernels on the current device, enqueued on the current stream."""

    def __init__(self, reduction: Reduction, programmatic: bool, defines: Sequence[str]) -> None:
        self._device = torch.cuda.current_device()
        self._sms = torch.cuda.get_device_properties().multi_processor_count
        self._reduction, self._programmatic = reduction, programmatic
        image = compile_cuda(reduction, current_arch(), defines=defines)
        self._module = CudaModule(image, name="allreduce")
        reduction.verify(decode(self._module.global_bytes(TABLE)))
        verify(ReduceArgs, decode(self._module.global_bytes(ARGS_TABLE)))
        self._functions = {
            name + end: self._module.function(name + end) for name in KERNELS for end in ("", MOE)
        }
        self._launchers: dict[tuple[str, int, bool], Launcher] = {}
        self._resident: dict[tuple[str, int, int], int] = {}
        self._plans: dict[tuple[str, int], ReducePlan] = {}

    def run(self, name: str, args: ReduceArgs) -> None:
        """Enqueue one all-reduce."""
        if torch.cuda.current_device() != self._device:
            raise InvalidArgument(
                f"the current device is cuda:{torch.cuda.current_device()}, this all-reduce works "
                f"on cuda:{self._device}: call torch.cuda.set_device({self._device}) first"
            )
        p = self._plans.get((name, args.tokens)) or self._plan(name, args.tokens)
        args.pushers, args.reducers, args.pushers_finish = p.pushers, p.reducers, p.pushers_finish
        early = self._programmatic and args.tokens * self._reduction.vectors < LONG
        launcher = self._launcher(name if args.x else name + MOE, p.cluster, early)
        stream = torch.cuda.current_stream().cuda_stream
        launcher(args, (p.ctas, 1, 1), p.threads, stream)

    def close(self) -> None:
        """Unload the module."""
        self._module.unload()

    def resident(self, name: str, threads: int, cluster: int) -> int:
        """CTAs of a kernel that fit on the GPU at once; of both kernels of a backend."""
        key = (name, threads, cluster)
        if key not in self._resident:
            self._resident[key] = cluster * min(
                self._module.resident_clusters(name + end, threads, cluster) for end in ("", MOE)
            )
        return self._resident[key]

    def _launcher(self, name: str, cluster: int, early: bool) -> Launcher:
        key = (name, cluster, early)
        if key not in self._launchers:
            self._launchers[key] = Launcher(
                self._functions[name], ReduceArgs, programmatic=early, cluster=cluster
            )
        return self._launchers[key]

    def _plan(self, name: str, tokens: int) -> ReducePlan:
        """The launch of a backend on so many tokens; found once, kept."""

        def resident(threads: int, cluster: int) -> int:
            return self.resident(name, threads, cluster)

        vectors, ranks = self._reduction.vectors, self._reduction.ranks
        if name == "oneshot":
            found = plan_oneshot(tokens, vectors, sms=self._sms, resident=resident)
        else:
            pieces = KERNELS[name].pieces
            found = plan_twoshot(tokens, vectors, ranks, pieces=pieces, resident=resident)
        self._plans[name, tokens] = found
        return found


def load_entries(
    device: torch.device, reduction: Reduction, programmatic: bool, defines: Sequence[str]
) -> ReduceEntries:
    """Compile and load all backends of a Reduction for one rank's device."""
    if device.type == "cpu":
        return CpuReduceEntries(reduction, defines)
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the primary context that the module is loaded into
        return CudaReduceEntries(reduction, programmatic, defines)
