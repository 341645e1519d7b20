# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels of an operator, with the same interface for CPUs and GPUs.

All kernels are compiled and loaded at construction. A lazy load at the first launch could deadlock,
because it waits for the GPU to become idle while the kernel of a peer spins.
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
from weft.runtime.check import check_num_sms
from weft.runtime.layout import CppValues, common_static_asserts, static_asserts
from weft.runtime.stream import current_stream
from weft.shape import NARROW_RANKS


@dataclass(frozen=True, slots=True)
class Build:
    """Options of compilation and launches, which may differ between ranks.

    Attributes:
        num_sms: Number of SMs that the kernels may use; None for all.
        use_pdl: Whether short kernels use programmatic dependent launch.
        split_phase: Whether to compile the send and receive halves of each phase separately, too.
        defines: Macros for the compiler.
    """

    num_sms: int | None = None
    use_pdl: bool = True
    split_phase: bool = False
    defines: Sequence[str] = ()


# Argument struct and called template of each entry.
EntryPoints = Mapping[str, tuple[type[ctypes.Structure], str]]


@dataclass(frozen=True, slots=True)
class Program:
    """The generated source of one operator for CPU or GPU.

    Attributes:
        name: Name of the files in the cache.
        label: Name of the operator in errors.
        ranks: Number of ranks of the NVLink domain.
        headers: Headers of weft with the templates.
        constants: C++ definitions that the templates are instantiated with.
        entry_points: Argument struct and called template of each entry.
        bounds: Threads per CTA and CTAs per SM of each kernel (`__launch_bounds__`); None for CPU.
        offsets: C++ expressions, such as sizes and offsets in a share, and their values in Python.
            The source asserts them, as well as the layout of every argument struct.
        structs: Mirrors of further C++ structs whose layout the source asserts.
        options: Options of NVRTC.
    """

    name: str
    label: str
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
        """Source of the entries, with assertions that Python and C++ agree on every layout."""
        wide = "#define WEFT_WIDE 1\n" if self.ranks > NARROW_RANKS else ""
        headers = "".join(f"#include <weft/{header}>\n" for header in self.headers)
        entries = "".join(map(self._entry_source, self.entry_points))
        arguments = (struct for struct, _ in self.entry_points.values())
        structs = dict.fromkeys((*arguments, *self.structs))
        layout = common_static_asserts(self.ranks) + static_asserts(structs, self.offsets)
        return wide + headers + self.constants + entries + layout

    def _entry_source(self, name: str) -> str:
        """Generate the source of one entry."""
        struct, call = self.entry_points[name]
        args = f"weft::{struct.__name__}"
        if self.bounds is None:
            return f'extern "C" void {name}(const {args}* a) {{ weft::{call}(*a); }}\n'
        threads, per_sm = self.bounds[name]
        return (
            f'extern "C" __global__ void __launch_bounds__({threads}, {per_sm})\n'
            f"{self.kernel_name(name)}(const __grid_constant__ {args} a) {{ weft::{call}(a); }}\n"
        )

    def kernel_name(self, entry: str) -> str:
        """Return the name of the kernel of an entry."""
        return f"weft_{self.name}_{entry}"

    def compile_cubin(self, arch: str, *, defines: Sequence[str] = ()) -> bytes:
        """Compile all kernels to a cubin; needs no GPU. Raises CompileError."""
        options = (*self.options, *_macros(defines))
        return compile_cubin(self.source, name=self.name, arch=arch, options=options)


def _macros(defines: Sequence[str]) -> list[str]:
    return [f"-D{define}" for define in defines]


PHASE_PARTS = {"": "whole", "_send": "send", "_receive": "recv"}  # entry suffix -> weft::PhasePart


def split_entries(phases: EntryPoints, *, split_phase: bool) -> EntryPoints:
    """Return the entries of each phase: the whole phase and, with `split_phase`, its halves.

    The templates have `{}` in place of the PhasePart.
    """
    return {
        phase + suffix: (struct, template.format(f"weft::PhasePart::{part}"))
        for suffix, part in PHASE_PARTS.items()
        if split_phase or not suffix
        for phase, (struct, template) in phases.items()
    }


def unpack_uint64s(raw: bytes) -> tuple[int, ...]:
    """Unpack an array of 64-bit integers in native byte order."""
    return unpack(f"={len(raw) // 8}Q", raw)


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch parameters of one entry for one number of tokens.

    Attributes:
        launcher: Launcher of the entry.
        grid: CTAs in x, y and z.
        threads: Threads per CTA.
        fields: Names and values of kernel arguments that depend on the launch.
    """

    launcher: Launcher
    grid: tuple[int, int, int]
    threads: int
    fields: tuple[tuple[str, int], ...] = ()


class Kernels(Protocol):
    """Compiled operations of one operator."""

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run or enqueue the operation `name` on `tokens` tokens."""

    def close(self) -> None:
        """Unload the kernels."""


class CpuKernels:
    """Operations for CPU ranks, which are synchronous C++ functions."""

    def __init__(self, program: Program, build: Build) -> None:
        check_num_sms(build.num_sms, None)
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
        """Do nothing: the library stays loaded for other objects with the same sizes."""


class CudaKernels:
    """Operations for GPU ranks, which are kernels on the current device and stream."""

    def __init__(self, program: Program, build: Build) -> None:
        available = torch.cuda.get_device_properties().multi_processor_count
        check_num_sms(build.num_sms, available)
        self._device = torch.cuda.current_device()
        self._sms, self._uses_all_sms = (
            build.num_sms or available,
            build.num_sms in (None, available),
        )
        self._build, self._program = build, program
        self._module = CudaModule(
            program.compile_cubin(current_arch(), defines=build.defines), name=program.name
        )
        self._functions = {
            name: self._module.function(program.kernel_name(name)) for name in program.entry_points
        }
        self._launchers: dict[tuple[str, bool, int], Launcher] = {}
        self._launches: dict[tuple[str, int], Launch] = {}

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Enqueue one operation."""
        # Hot path of every call.
        device = torch.cuda.current_device()
        if device != self._device:
            raise InvalidArgument(
                f"the current device is cuda:{device}, but this {self._program.label} was created "
                f"on cuda:{self._device}: call torch.cuda.set_device({self._device}) first"
            )
        launch = self._launches.get((name, tokens))
        if launch is None:
            launch = self._launches[name, tokens] = self._build_launch(name, tokens)
        for field, value in launch.fields:
            setattr(args, field, value)
        launch.launcher(args, launch.grid, launch.threads, current_stream(device))

    def close(self) -> None:
        """Unload the module after its kernels have finished."""
        self._module.unload(after=current_stream(self._device))

    def _build_launch(self, name: str, tokens: int) -> Launch:
        """Build the launch of an entry for a number of tokens; the result is cached."""
        raise NotImplementedError

    def _get_launcher(self, name: str, *, use_pdl: bool, cluster: int = 1) -> Launcher:
        """Return the launcher of an entry, which launches of all sizes share."""
        key = (name, use_pdl, cluster)
        if key not in self._launchers:
            function, (struct, _) = self._functions[name], self._program.entry_points[name]
            self._launchers[key] = Launcher(function, struct, use_pdl=use_pdl, cluster=cluster)
        return self._launchers[key]

    def _max_ctas_per_sm(self, name: str, threads: int) -> int:
        """Return the maximum number of resident CTAs per SM, at least 1."""
        return max(1, self._module.occupancy(self._program.kernel_name(name), threads))
