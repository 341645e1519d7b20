"""Routing on GPUs: one kernel for each rule, compiled once and launched on the current stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_uint32, c_uint64

import torch

from weft.errors import OutOfOrder
from weft.jit import CUDA_OPTIONS, CudaModule, Launcher, compile_cubin, current_arch
from weft.jit.args import decode, table_source, verify
from weft.runtime.stream import current_stream, loading

MAX_EXPERTS, MAX_TOP_K = 512, 32  # static_assert in moe/route.cuh
TOKENS = 4  # of a CTA: route_warps in moe/route.cuh
THREADS = 32 * TOKENS
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # DType in device/header.cuh
TABLE = "weft_route_args"

SOURCE = """\
#include <weft/moe/route.cuh>
constexpr weft::Routing R = {rule};
{table}extern "C" __global__ void __launch_bounds__({threads})
route(const __grid_constant__ weft::RouteArgs a) {{ weft::route<R>(a); }}
"""


class RouteArgs(ctypes.Structure):
    """Mirror of `weft::RouteArgs` in moe/route.cuh."""

    _fields_ = (
        ("logits", c_uint64),
        ("correction", c_uint64),
        ("num_tokens", c_uint64),
        ("ids", c_uint64),
        ("weights", c_uint64),
        ("row_stride", c_int64),
        ("column_stride", c_int64),
        ("tokens", c_uint32),
        ("number", c_uint32),
        ("scale", c_float),
    )


def cuda_source(rule: str) -> str:
    """The generated entry of one rule, `Routing.literal()`."""
    table = table_source(RouteArgs, "weft::RouteArgs", TABLE, device=True)
    return SOURCE.format(rule=rule, table=table, threads=THREADS)


def compile_cuda(rule: str, arch: str, *, options: Sequence[str] = ()) -> bytes:
    """The kernel's cubin; needs no GPU. Raises CompileError showing the entry."""
    return compile_cubin(
        cuda_source(rule), name="route", arch=arch, options=(*CUDA_OPTIONS, *options)
    )


def args_of(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
    scale: float,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> RouteArgs:
    """The struct of one call; all tensors were checked."""
    return RouteArgs(
        logits=logits.data_ptr(),
        correction=0 if correction is None else correction.data_ptr(),
        num_tokens=0 if num_tokens is None else num_tokens.data_ptr(),
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        row_stride=logits.stride(0),
        column_stride=logits.stride(1),
        tokens=len(logits),
        number=DTYPES[logits.dtype],
        scale=scale,
    )


class _Loaded(threading.local):
    """Launchers of this thread by device and rule: a launcher serves one thread at a time."""

    def __init__(self) -> None:
        self.launchers: dict[tuple[int, str], Launcher] = {}


_loaded = _Loaded()


def enqueue(rule: str, args: RouteArgs, device: torch.device) -> None:
    """Launch the rule's kernel on a device's current stream; load it at the rule's first call.

    Raises OutOfOrder where that first call is being captured: loading is no part of a graph.
    """
    current = torch.cuda.current_device()
    index = current if device.index is None else device.index
    if index != current:
        with torch.cuda.device(index):
            return enqueue(rule, args, device)
    launcher = _loaded.launchers.get((index, rule))
    if launcher is None:
        launcher = _loaded.launchers[index, rule] = _load(rule)
    if args.tokens:
        grid = (-(-args.tokens // TOKENS), 1, 1)
        launcher(args, grid, THREADS, current_stream(index))
    return None


def _load(rule: str) -> Launcher:
    """Compile and load for the current device; the module stays for as long as the process."""
    if torch.cuda.is_current_stream_capturing():
        raise OutOfOrder(
            "the first route() of a rule on a device loads its kernel, which a graph cannot hold; "
            "call it once before capturing, with zero tokens if you like"
        )
    with loading(torch.cuda.current_device()):
        module = CudaModule(compile_cuda(rule, current_arch()), name="route", stays=True)
        verify(RouteArgs, decode(module.global_bytes(TABLE)))
        return Launcher(module.function("route"), RouteArgs, programmatic=True)
