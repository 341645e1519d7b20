# SPDX-License-Identifier: Apache-2.0
"""Launchers of the stateless routing kernels, compiled once per routing rule."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import c_float, c_int64, c_uint32, c_uint64

import torch

from weft.errors import OutOfOrder
from weft.jit import CUDA_OPTIONS, CudaModule, Launcher, compile_cubin, current_arch
from weft.runtime.layout import static_asserts
from weft.runtime.stream import current_stream, loading_context

KERNEL_MAX_EXPERTS, KERNEL_MAX_TOP_K = 1024, 32  # static_assert in moe/routing/route.cuh
TOKENS_PER_CTA = 4  # route_warps in moe/routing/route.cuh
ROUTE_THREADS = 32 * TOKENS_PER_CTA
NORMALIZE_THREADS = 128  # normalize_threads in moe/routing/normalize_topk.cuh
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # DType in device/header.cuh


class RouteArgs(ctypes.Structure):
    """Arguments of a routing rule's kernel: `weft::RouteArgs` in moe/routing/route.cuh."""

    _fields_ = (
        ("logits", c_uint64),
        ("correction", c_uint64),
        ("num_tokens", c_uint64),
        ("ids", c_uint64),
        ("weights", c_uint64),
        ("row_stride", c_int64),
        ("column_stride", c_int64),
        ("tokens", c_uint32),
        ("dtype", c_uint32),
        ("scale", c_float),
    )


class NormalizeArgs(ctypes.Structure):
    """Arguments of normalize_topk: `weft::NormalizeArgs` in moe/routing/normalize_topk.cuh."""

    _fields_ = (
        ("ids", c_uint64),
        ("weights", c_uint64),
        ("num_tokens", c_uint64),
        ("replicas", c_uint64),
        ("out_ids", c_uint64),
        ("out_weights", c_uint64),
        ("padding_id", c_int64),
        ("entries", c_uint32),
        ("top_k", c_uint32),
        ("ids_bytes", c_uint32),
        ("dtype", c_uint32),
        ("experts", c_uint32),
        ("width", c_uint32),
        ("rank", c_uint32),
        ("skips_zeros", c_uint32),
    )


class StatelessKernel(threading.local):
    """A kernel's launchers by device and rule, one set per thread: launchers are not thread-safe.

    Args:
        name: Name of the kernel and of its files in the cache.
        args: Its only argument, a struct.
        build_source: Function from a rule (a C++ initialiser, or "") to the source of the kernel's
            entry.
        label: Name of the call, for errors.
    """

    def __init__(
        self,
        name: str,
        args: type[ctypes.Structure],
        build_source: Callable[[str], str],
        label: str,
    ) -> None:
        self.name, self.label = name, label
        self.args, self._build_source = args, build_source
        self._launchers: dict[tuple[int, str], Launcher] = {}

    def get_source(self, rule: str = "") -> str:
        """Return the source of a rule's entry, with assertions on the layout of its arguments."""
        return self._build_source(rule) + static_asserts((self.args,))

    def enqueue(
        self, rule: str, args: ctypes.Structure, device: torch.device, ctas: int, threads: int
    ) -> None:
        """Launch a rule's kernel on a device's current stream; the first call loads it.

        Raises:
            OutOfOrder: the first call is being captured. Loading cannot be captured.
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
        """Compile and load the kernel for the current device; it is never unloaded."""
        if torch.cuda.is_current_stream_capturing():
            raise OutOfOrder(
                f"the first {self.label} on a device loads its kernel, which cannot be captured; "
                "call it once before capturing, for example with zero tokens"
            )
        with loading_context(torch.cuda.current_device()):
            source, arch = self.get_source(rule), current_arch()
            cubin = compile_cubin(source, name=self.name, arch=arch, options=CUDA_OPTIONS)
            module = CudaModule(cubin, name=self.name, permanent=True)
            return Launcher(module.function(self.name), self.args, use_pdl=True)


def _build_route_source(rule: str) -> str:
    return f"""\
#include <weft/moe/routing/route.cuh>
constexpr weft::Routing R = {rule};
extern "C" __global__ void __launch_bounds__({ROUTE_THREADS})
weft_route(const __grid_constant__ weft::RouteArgs a) {{ weft::route<R>(a); }}
"""


def _build_normalize_source(_: str) -> str:
    return f"""\
#include <weft/moe/routing/normalize_topk.cuh>
extern "C" __global__ void __launch_bounds__({NORMALIZE_THREADS})
weft_normalize_topk(const __grid_constant__ weft::NormalizeArgs a) {{ weft::normalize_topk(a); }}
"""


# One kernel for each `Routing.to_cpp`.
ROUTE = StatelessKernel("weft_route", RouteArgs, _build_route_source, "route() of a rule")
NORMALIZE = StatelessKernel(
    "weft_normalize_topk", NormalizeArgs, _build_normalize_source, "normalize_topk()"
)
