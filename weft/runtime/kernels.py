# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels of an operator, with one interface for CPU and GPU.

All kernels are compiled and loaded at construction. Loading one at its first launch would deadlock,
because a lazy load waits for the GPU to become idle while a peer's kernel spins.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import unpack
from typing import Any, Protocol

import torch

from weft.errors import InvalidArgument
from weft.jit import (
    CUDA_OPTIONS,
    HOST_OPTIONS,
    CudaModule,
    Launcher,
    compile_cubin,
    compile_shared,
    current_arch,
)
from weft.runtime.check import check_sms
from weft.runtime.layout import CppValues, common_static_asserts, static_asserts
from weft.runtime.stream import current_stream
from weft.shape import NARROW_RANKS


@dataclass(frozen=True, slots=True)
class Build:
    """Build and launch options of kernels; they may differ between ranks.

    Attributes:
        num_sms: Number of SMs that the kernels may use; None for all.
        programmatic: Whether short kernels use programmatic dependent launch.
        split_phase: Whether each phase is also built as separate send and receive halves.
        defines: Macros for the compiler.
    """

    num_sms: int | None = None
    programmatic: bool = True
    split_phase: bool = False
    defines: Sequence[str] = ()


# The argument struct of each entry, and the template that it calls.
EntryPoints = Mapping[str, tuple[type[ctypes.Structure], str]]


@dataclass(frozen=True, slots=True)
class Program:
    """The generated source of one operator for CPU or GPU.

    Attributes:
        name: Name of the files in the cache.
        what: Name of the operator in errors.
        ranks: Number of ranks of the NVLink domain.
        headers: Headers of weft with the templates.
        constants: C++ definitions that the templates are instantiated with.
        entry_points: The argument struct of each entry, and the template that it calls.
        bounds: Threads per CTA and CTAs per SM of each kernel (`__launch_bounds__`); None for CPU.
        offsets: C++ expressions, such as sizes and offsets in a share, and their values in Python.
            The source asserts them, together with the layout of every argument struct.
        structs: Further mirrors of C++ structs whose layout the source asserts.
        options: Options of NVRTC.
    """

    name: str
    what: str
    ranks: int
    headers: Sequence[str]
    constants: str
    entry_points: EntryPoints
    bounds: Mapping[str, tuple[int, int]] | None = None
    offsets: CppValues = ()
    structs: Sequence[type[ctypes.Structure]] = ()
    options: Sequence[str] = CUDA_OPTIONS

    @property
    def source(self) -> str:
        """The entries, followed by assertions that Python and C++ agree on every layout."""
        wide = "#define WEFT_WIDE 1\n" if self.ranks > NARROW_RANKS else ""
        headers = "".join(f"#include <weft/{header}>\n" for header in self.headers)
        entries = "".join(map(self._entry, self.entry_points))
        arguments = (struct for struct, _ in self.entry_points.values())
        structs = dict.fromkeys((*arguments, *self.structs))
        layout = common_static_asserts(self.ranks) + static_asserts(structs, self.offsets)
        return wide + headers + self.constants + entries + layout

    def _entry(self, name: str) -> str:
        """Return the source of an entry, which calls its template."""
        struct, call = self.entry_points[name]
        args = f"weft::{struct.__name__}"
        if self.bounds is None:
            return f'extern "C" void {name}(const {args}* a) {{ weft::{call}(*a); }}\n'
        threads, per_sm = self.bounds[name]
        return (
            f'extern "C" __global__ void __launch_bounds__({threads}, {per_sm})\n'
            f"{self.kernel(name)}(const __grid_constant__ {args} a) {{ weft::{call}(a); }}\n"
        )

    def kernel(self, entry: str) -> str:
        """Return the name of an entry's kernel, as a profiler shows it."""
        return f"weft_{self.name}_{entry}"

    def cubin(self, arch: str, *, defines: Sequence[str] = ()) -> bytes:
        """Compile all kernels, without a GPU. Raises CompileError with the source."""
        options = (*self.options, *_macros(defines))
        return compile_cubin(self.source, name=self.name, arch=arch, options=options)


def _macros(defines: Sequence[str]) -> list[str]:
    return [f"-D{define}" for define in defines]


PARTS = {"": "whole", "_send": "send", "_receive": "recv"}  # entry suffix -> weft::PhasePart


def in_parts(phases: EntryPoints, *, split_phase: bool) -> EntryPoints:
    """Return the entries of phases whose templates have `{}` for the PhasePart.

    With `split_phase` each phase also has a send and a receive entry.
    """
    return {
        phase + part: (struct, template.format(f"weft::PhasePart::{cpp}"))
        for part, cpp in PARTS.items()
        if split_phase or not part
        for phase, (struct, template) in phases.items()
    }


def unpack_uint64s(raw: bytes) -> tuple[int, ...]:
    """Return the 64-bit numbers of an exported array (native byte order)."""
    return unpack(f"={len(raw) // 8}Q", raw)


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch parameters of one entry for one number of tokens.

    Attributes:
        launcher: Launcher of the entry.
        grid: CTAs in x, y and z.
        threads: Threads per CTA.
        fields: Names and values of arguments that depend on the launch.
    """

    launcher: Launcher
    grid: tuple[int, int, int]
    threads: int
    fields: tuple[tuple[str, int], ...] = ()


class Kernels(Protocol):
    """The operations of one operator on a CPU or a GPU, by name."""

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run, or enqueue, one operation on `tokens` tokens."""

    def close(self) -> None:
        """Unload the kernels."""


class CpuKernels:
    """The operations as synchronous C++ functions."""

    def __init__(self, program: Program, build: Build) -> None:
        check_sms(build.num_sms, None)
        options = (*HOST_OPTIONS, *_macros(build.defines))
        library = compile_shared(program.source, name=program.name, options=options)
        self._functions: dict[str, Any] = {}
        for name, (struct, _) in program.entry_points.items():
            function = getattr(library, name)
            function.restype = None
            function.argtypes = (ctypes.POINTER(struct),)
            self._functions[name] = function

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run one operation; returns when it has finished."""
        self._functions[name](ctypes.byref(args))

    def close(self) -> None:
        """Do nothing: the library stays loaded for later objects of the same sizes."""


class CudaKernels:
    """The operations as kernels on the current device, enqueued on the current stream.

    A subclass implements `_find`, which returns the launch parameters of an entry.
    """

    def __init__(self, program: Program, build: Build) -> None:
        available = torch.cuda.get_device_properties().multi_processor_count
        check_sms(build.num_sms, available)
        self._device = torch.cuda.current_device()
        self._sms, self._whole = build.num_sms or available, build.num_sms in (None, available)
        self._build, self._program = build, program
        self._module = CudaModule(
            program.cubin(current_arch(), defines=build.defines), name=program.name
        )
        # Load all kernels now: none can be loaded while a peer's kernel spins.
        self._functions = {
            name: self._module.function(program.kernel(name)) for name in program.entry_points
        }
        self._launchers: dict[tuple[str, bool, int], Launcher] = {}
        self._launches: dict[tuple[str, int], Launch] = {}

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Enqueue one operation."""
        # Hot path of every call.
        device = torch.cuda.current_device()
        if device != self._device:
            raise InvalidArgument(
                f"the current device is cuda:{device}, this {self._program.what} works on "
                f"cuda:{self._device}: call torch.cuda.set_device({self._device}) first"
            )
        launch = self._launches.get((name, tokens))
        if launch is None:
            launch = self._launches[name, tokens] = self._find(name, tokens)
        for field, value in launch.fields:
            setattr(args, field, value)
        launch.launcher(args, launch.grid, launch.threads, current_stream(device))

    def close(self) -> None:
        """Unload the module after its kernels have finished."""
        self._module.unload(after=current_stream(self._device))

    def _find(self, name: str, tokens: int) -> Launch:
        """Return the launch of an entry for a number of tokens; called once for each number."""
        raise NotImplementedError

    def _launcher(self, name: str, *, programmatic: bool, cluster: int = 1) -> Launcher:
        """Return the launcher of an entry, shared by launches of all sizes."""
        key = (name, programmatic, cluster)
        if key not in self._launchers:
            function, (struct, _) = self._functions[name], self._program.entry_points[name]
            self._launchers[key] = Launcher(function, struct, use_pdl=programmatic, cluster=cluster)
        return self._launchers[key]

    def _per_sm(self, name: str, threads: int) -> int:
        """Return the number of CTAs of an entry that fit on an SM, at least 1."""
        return max(1, self._module.occupancy(self._program.kernel(name), threads))
