"""Routing on GPUs: one kernel for each rule, compiled once and launched on the current stream."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_uint32, c_uint64

import torch

from weft.moe.stateless import StatelessKernel

MAX_EXPERTS, MAX_TOP_K = 512, 32  # static_assert in moe/route.cuh
TOKENS = 4  # of a CTA: route_warps in moe/route.cuh
THREADS = 32 * TOKENS
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # DType in device/header.cuh


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


def _text(rule: str) -> str:
    return f"""\
#include <weft/moe/route.cuh>
constexpr weft::Routing R = {rule};
extern "C" __global__ void __launch_bounds__({THREADS})
route(const __grid_constant__ weft::RouteArgs a) {{ weft::route<R>(a); }}
"""


# One kernel for each `Routing.literal()`.
ROUTE = StatelessKernel("route", RouteArgs, _text, "route() of a rule")


def enqueue(rule: str, args: RouteArgs, device: torch.device) -> None:
    """Launch a rule's kernel on a device's current stream. Raises OutOfOrder."""
    ROUTE.enqueue(rule, args, device, -(-args.tokens // TOKENS), THREADS)
