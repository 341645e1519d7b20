"""Compiled all-reduces of one Reduction, on a CPU or a GPU, behind the same call.

Everything is compiled, loaded and compared with Python's mirrors at construction, for every
epilogue: a kernel that had to be loaded at its first launch could never be, while a peer's spins.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.allreduce.args import ReduceArgs
from weft.allreduce.plan import ReducePlan, plan_oneshot, plan_twoshot
from weft.allreduce.reduction import Reduction
from weft.allreduce.source import (
    ARGS_TABLE,
    DOORS,
    KERNELS,
    MOE,
    TABLE,
    compile_cuda,
    cpu_source,
)
from weft.errors import InvalidArgument
from weft.jit import HOST_OPTIONS, CudaModule, Launcher, compile_shared, current_arch
from weft.jit.args import decode, expected, verify
from weft.runtime.stream import current_stream, loading

# 16-byte words of a call, for each rank, from which on a launch that overlaps its predecessor only
# takes room from it: it gains 0.5 us up to 32 tokens x 7168 on 8 ranks, and loses 5 % at 128
# (8 x H200, 2026-11-20).
LONG = 7500


@dataclass(frozen=True, slots=True)
class Launch:
    """One backend on one number of tokens: all that does not change from call to call."""

    launcher: Launcher
    plan: ReducePlan
    grid: tuple[int, int, int]


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
        self._launches: dict[tuple[str, int, bool], Launch] = {}

    def run(self, name: str, args: ReduceArgs) -> None:
        """Enqueue one all-reduce."""
        # This is the path of every call: no more than it needs.
        device = torch.cuda.current_device()
        if device != self._device:
            raise InvalidArgument(
                f"the current device is cuda:{device}, this all-reduce works on "
                f"cuda:{self._device}: call torch.cuda.set_device({self._device}) first"
            )
        key = (name, args.tokens, args.x != 0)
        launch = self._launches.get(key) or self._launch(*key)
        p = launch.plan
        args.pushers, args.reducers, args.pushers_finish = p.pushers, p.reducers, p.pushers_finish
        launch.launcher(args, launch.grid, p.threads, current_stream(device))

    def close(self) -> None:
        """Unload the module, once its kernels have run."""
        self._module.unload(after=current_stream(self._device))

    def resident(self, name: str, threads: int, cluster: int) -> int:
        """CTAs of a kernel that fit on the GPU at once; of both kernels of a backend."""
        key = (name, threads, cluster)
        if key not in self._resident:
            self._resident[key] = cluster * min(
                self._module.resident_clusters(name + end, threads, cluster) for end in ("", MOE)
            )
        return self._resident[key]

    def _overlaps(self, name: str, tokens: int, p: ReducePlan) -> bool:
        """May a launch take its place while its predecessor runs?

        One shot only where three launches fit on the GPU. Where two hardly do, their clusters get
        in each other's way (7168, 2 x H200): 448 CTAs on a GPU that holds 660 took 907 us instead
        of 6.8 (64 tokens, 2026-11-20), 256 CTAs 1663 us instead of 11.8 (128, 2026-11-22).
        """
        if tokens * self._reduction.vectors >= LONG * self._reduction.ranks:
            return False
        return name != "oneshot" or 3 * p.ctas <= self.resident(name, p.threads, p.cluster)

    def _launch(self, name: str, tokens: int, plain: bool) -> Launch:
        """How a backend runs on so many tokens, with rows or with a prologue; found once, kept."""
        p = self._plans.get((name, tokens)) or self._plan(name, tokens)
        early = self._programmatic and self._overlaps(name, tokens, p)
        launcher = self._launcher(name if plain else name + MOE, p.cluster, early)
        found = Launch(launcher, p, (p.ctas, 1, 1))
        self._launches[name, tokens, plain] = found
        return found

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
    with loading(device):
        return CudaReduceEntries(reduction, programmatic, defines)
