"""Compiled all-reduces of one Reduction, on a CPU or a GPU, behind the same call.

Everything is compiled, loaded and compared with Python's mirrors at construction, for every
epilogue: a kernel that had to be loaded at its first launch could never be, while a peer's spins.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from weft.jit import compile_shared
from weft.jit.args import expected, verify
from weft.ops.reduce_args import ReduceArgs
from weft.ops.reduce_source import ARGS_TABLE, DOORS, HOST_OPTIONS, TABLE, cpu_source
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


def load_entries(
    device: torch.device, reduction: Reduction, programmatic: bool, defines: Sequence[str]
) -> ReduceEntries:
    """Compile and load all backends of a Reduction for one rank's device."""
    if device.type == "cpu":
        return CpuReduceEntries(reduction, defines)
    raise NotImplementedError
