"""Kernels that keep nothing between calls: compiled once for each rule, for any stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import torch

from weft.errors import OutOfOrder
from weft.jit import CUDA_OPTIONS, CudaModule, Launcher, compile_cubin, current_arch
from weft.runtime.layout import assertions
from weft.runtime.stream import current_stream, loading


class StatelessKernel(threading.local):
    """Launchers of this thread by device and rule: a launcher serves one thread at a time.

    name: of the kernel, and of its files in the cache.   args: its one struct of arguments.
    text: the entry of a rule, a C++ initialiser or nothing.
    doing: how errors call it.
    """

    def __init__(
        self,
        name: str,
        args: type[ctypes.Structure],
        text: Callable[[str], str],
        doing: str,
    ) -> None:
        self.name, self.doing = name, doing
        self.args, self._text = args, text
        self._launchers: dict[tuple[int, str], Launcher] = {}

    def source(self, rule: str = "") -> str:
        """The generated entry of one rule, with the layout of its arguments."""
        return self._text(rule) + assertions((self.args,))

    def compile(self, rule: str, arch: str, *, options: Sequence[str] = ()) -> bytes:
        """The kernel's cubin; needs no GPU. Raises CompileError showing the entry."""
        return compile_cubin(
            self.source(rule), name=self.name, arch=arch, options=(*CUDA_OPTIONS, *options)
        )

    def enqueue(
        self, rule: str, args: ctypes.Structure, device: torch.device, ctas: int, threads: int
    ) -> None:
        """Launch a rule's kernel on a device's current stream; load it at the rule's first call.

        Raises OutOfOrder where that first call is being captured: loading is no part of a graph.
        """
        current = torch.cuda.current_device()
        index = current if device.index is None else device.index
        if index != current:
            with torch.cuda.device(index):
                return self.enqueue(rule, args, device, ctas, threads)
        launcher = self._launchers.get((index, rule))
        if launcher is None:
            launcher = self._launchers[index, rule] = self._load(rule)
        if ctas:
            launcher(args, (ctas, 1, 1), threads, current_stream(index))
        return None

    def _load(self, rule: str) -> Launcher:
        """Compile and load for the current device; the module stays for as long as the process."""
        if torch.cuda.is_current_stream_capturing():
            raise OutOfOrder(
                f"the first {self.doing} on a device loads its kernel, which a graph cannot hold; "
                "call it once before capturing, with zero tokens if you like"
            )
        with loading(torch.cuda.current_device()):
            cubin = self.compile(rule, current_arch())
            module = CudaModule(cubin, name=self.name, stays=True)
            return Launcher(module.function(self.name), self.args, programmatic=True)
