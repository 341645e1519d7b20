"""What every operator loads: its compiled entries, on a CPU or a GPU, behind the same call.

Everything is compiled, loaded and compared with Python's mirrors here, at construction: a kernel
that had to be loaded at its first launch could never be, while a peer's kernel spins for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from weft.jit.args import decode
from weft.runtime.args import Site
from weft.runtime.check import check_sms
from weft.runtime.layout import Numbers, compare
from weft.runtime.stream import current_stream


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


@dataclass(frozen=True, slots=True)
class Program:
    """The generated source of one operator on one kind of device.

    name: of its files in the cache.   what: it is, in errors.
    doors: the argument struct of each entry.
    tables: the numbers that each exported array must hold.
    share_bytes, measured: where the parts of a share of that size lie, as `weft_measure` of a cubin
        must find; none where nothing is measured.   options: of NVRTC.
    """

    name: str
    what: str
    source: str
    doors: Mapping[str, type[ctypes.Structure]]
    tables: Mapping[str, Numbers]
    share_bytes: int = 0
    measured: Numbers = ()
    options: Sequence[str] = CUDA_OPTIONS

    def cubin(self, arch: str, *, defines: Sequence[str] = ()) -> bytes:
        """All kernels; needs no GPU. Raises CompileError showing the entries."""
        return compile_cubin(
            self.source, name=self.name, arch=arch, options=self.options, defines=defines
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """One entry on one number of tokens: all that does not change from call to call.

    fields: arguments that the launch decides.
    """

    launcher: Launcher
    grid: tuple[int, int, int]
    threads: int
    fields: tuple[tuple[str, int], ...] = ()


class Entries(Protocol):
    """The operations of one operator on one kind of device, by name."""

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run, or enqueue, one operation on `tokens` tokens."""

    def close(self) -> None:
        """Give back what was loaded."""


class CpuEntries:
    """The operations as plain functions; they return when they are done."""

    def __init__(self, program: Program, build: Build) -> None:
        check_sms(build.num_sms, None)
        library = compile_shared(
            program.source, name=program.name, options=HOST_OPTIONS, defines=build.defines
        )
        for symbol, numbers in program.tables.items():
            exported = (ctypes.c_uint64 * len(numbers)).in_dll(library, symbol)
            compare(numbers, list(exported))
        self._functions: dict[str, Any] = {}
        for name, struct in program.doors.items():
            function = getattr(library, name)
            function.restype = None
            function.argtypes = (ctypes.POINTER(struct),)
            self._functions[name] = function

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run one operation to its end."""
        self._functions[name](ctypes.byref(args))

    def close(self) -> None:
        """Nothing is held: the library stays loaded for the next object of these sizes."""


class CudaEntries:
    """The operations as kernels on the current device, enqueued on the current stream.

    A room says in `_find` how one of its entries is launched.
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
        for symbol, numbers in program.tables.items():
            compare(numbers, self._table(symbol))
        if program.measured:
            measure = Launcher(self._module.function("weft_measure"), Site)
            with self._module.own_stream() as stream:
                measure(Site(base=program.share_bytes), (1, 1, 1), 1, stream)
            compare(
                program.measured, self._table("weft_measured"), "the code of the compiled entry"
            )
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

    def _table(self, symbol: str) -> Sequence[int]:
        return decode(self._module.global_bytes(symbol))
