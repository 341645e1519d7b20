# SPDX-License-Identifier: Apache-2.0
"""What every operator loads: its compiled entries, on a CPU or a GPU, called in the same way.

Everything is compiled and loaded here, at construction: a kernel that had to be loaded at its first
launch could never be, while a peer's kernel spins for it.
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
from weft.runtime.layout import Numbers, assertions, common_assertions
from weft.runtime.stream import current_stream
from weft.shape import NARROW_RANKS


@dataclass(frozen=True, slots=True)
class Build:
    """How kernels are made and launched; it may differ from rank to rank.

    num_sms: SMs that the kernels may fill; None for all.
    programmatic: launch short kernels with programmatic dependent launch.
    split_phase: also build each phase as send and receive.
    defines: macros for the compiler.
    """

    num_sms: int | None = None
    programmatic: bool = True
    split_phase: bool = False
    defines: Sequence[str] = ()


# Of each entry: its argument struct, and the template that it calls.
EntryPoints = Mapping[str, tuple[type[ctypes.Structure], str]]


@dataclass(frozen=True, slots=True)
class Program:
    """The generated source of one operator on one kind of device.

    name: of its files in the cache.   what: it is, in errors.   ranks: of its domain.
    headers: of weft, with the templates.   constants: C++ that these are made for.
    entry_points: of each entry, the argument struct and the template that it calls.
    bounds: of each kernel, threads of a CTA and CTAs that fit on an SM; None for a CPU's functions.
    offsets: C++ expressions, for instance of sizes and offsets in a share, and their values in
        Python: the source asserts them, and so the layout of every argument struct.
    structs: further mirrors that the source asserts.   options: of NVRTC.
    """

    name: str
    what: str
    ranks: int
    headers: Sequence[str]
    constants: str
    entry_points: EntryPoints
    bounds: Mapping[str, tuple[int, int]] | None = None
    offsets: Numbers = ()
    structs: Sequence[type[ctypes.Structure]] = ()
    options: Sequence[str] = CUDA_OPTIONS

    @property
    def source(self) -> str:
        """The entries, and after them the assertions that Python and C++ agree on every layout."""
        wide = "#define WEFT_WIDE 1\n" if self.ranks > NARROW_RANKS else ""
        headers = "".join(f"#include <weft/{header}>\n" for header in self.headers)
        entries = "".join(map(self._entry, self.entry_points))
        arguments = (struct for struct, _ in self.entry_points.values())
        structs = dict.fromkeys((*arguments, *self.structs))
        layout = common_assertions(self.ranks) + assertions(structs, self.offsets)
        return wide + headers + self.constants + entries + layout

    def _entry(self, name: str) -> str:
        """The source of an entry, which only calls its template."""
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
        """The name of an entry's kernel, as a profiler shows it."""
        return f"weft_{self.name}_{entry}"

    def cubin(self, arch: str, *, defines: Sequence[str] = ()) -> bytes:
        """All kernels; needs no GPU. Raises CompileError showing the entries."""
        options = (*self.options, *_macros(defines))
        return compile_cubin(self.source, name=self.name, arch=arch, options=options)


def _macros(defines: Sequence[str]) -> list[str]:
    return [f"-D{define}" for define in defines]


PARTS = {"": "whole", "_send": "send", "_receive": "recv"}  # of an entry's name: weft::PhasePart


def in_parts(phases: EntryPoints, *, split_phase: bool) -> EntryPoints:
    """The entries of phases whose templates take a PhasePart at `{}`: whole, or also in halves."""
    return {
        phase + part: (struct, template.format(f"weft::PhasePart::{cpp}"))
        for part, cpp in PARTS.items()
        if split_phase or not part
        for phase, (struct, template) in phases.items()
    }


def numbers_of(raw: bytes) -> tuple[int, ...]:
    """The 64-bit numbers of an exported array, as the machine orders them."""
    return unpack(f"={len(raw) // 8}Q", raw)


@dataclass(frozen=True, slots=True)
class Launch:
    """One entry on one number of tokens: all that does not change from call to call.

    fields: arguments that the launch decides.
    """

    launcher: Launcher
    grid: tuple[int, int, int]
    threads: int
    fields: tuple[tuple[str, int], ...] = ()


class Kernels(Protocol):
    """The operations of one operator on one kind of device, by name."""

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run, or enqueue, one operation on `tokens` tokens."""

    def close(self) -> None:
        """Give back what was loaded."""


class CpuKernels:
    """The operations as plain functions; they return when they are done."""

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
        """Run one operation to its end."""
        self._functions[name](ctypes.byref(args))

    def close(self) -> None:
        """Nothing is held: the library stays loaded for the next object of these sizes."""


class CudaKernels:
    """The operations as kernels on the current device, enqueued on the current stream.

    A subclass says in `_find` how one of its entries is launched.
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
        # All of them now: none could be loaded while a peer's kernel spins.
        self._functions = {
            name: self._module.function(program.kernel(name)) for name in program.entry_points
        }
        self._launchers: dict[tuple[str, bool, int], Launcher] = {}
        self._launches: dict[tuple[str, int], Launch] = {}

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Enqueue one operation."""
        # This is the path of every call: no more than it needs.
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
        """Unload the module, once its kernels have run."""
        self._module.unload(after=current_stream(self._device))

    def _find(self, name: str, tokens: int) -> Launch:
        """How an entry runs on so many tokens; asked once for each number."""
        raise NotImplementedError

    def _launcher(self, name: str, *, programmatic: bool, cluster: int = 1) -> Launcher:
        """The launcher of an entry, which launches of all sizes share."""
        key = (name, programmatic, cluster)
        if key not in self._launchers:
            function, (struct, _) = self._functions[name], self._program.entry_points[name]
            self._launchers[key] = Launcher(
                function, struct, programmatic=programmatic, cluster=cluster
            )
        return self._launchers[key]

    def _per_sm(self, name: str, threads: int) -> int:
        """CTAs of an entry, of so many threads, that fit on an SM."""
        return max(1, self._module.occupancy(self._program.kernel(name), threads))
