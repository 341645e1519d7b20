"""A grouped product on its way to the GPU: descriptors, constants and the grid of one launch."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from weft.errors import InvalidArgument
from weft.gemm.epilogue import Gated, GatedQuant, Push
from weft.gemm.plan import COLUMNS, FP8, GemmPlan
from weft.gemm.request import Request


def launch(request: Request, plan: GemmPlan, num_sms: int | None, programmatic: bool) -> None:
    """Enqueue the product in the current stream. Raises InvalidArgument without Triton."""
    rows, experts = len(request.a), len(request.b)
    if not rows or not experts:
        return
    triton = installed()
    device = request.a.device
    sms = num_sms or torch.cuda.get_device_properties(device).multi_processor_count
    blocks = plan.column_blocks(request.b.shape[1], request.gated)
    grid = min(sms * plan.ctas_per_sm, plan.max_row_blocks(rows, experts) * blocks)
    constants = kernel_constants(request, plan, programmatic)
    with torch.cuda.device(device):
        kernel_of()[(grid,)](
            *kernel_arguments(request, plan, triton.tools.tensor_descriptor.TensorDescriptor),
            **constants,
            num_warps=plan.warps,
            num_stages=plan.stages,
            launch_pdl=programmatic,
        )


@functools.cache
def installed() -> Any:
    """Triton, with its descriptors. Raises InvalidArgument that says what to install."""
    try:
        triton = importlib.import_module("triton")
        importlib.import_module("triton.tools.tensor_descriptor")
    except ImportError as error:
        raise InvalidArgument(
            f"grouped products on a GPU need Triton 3.6 or newer: {error}; pip install 'weft[gpu]'"
        ) from error
    return triton


def is_installed() -> bool:
    """Is there a Triton that can make grouped products?"""
    try:
        installed()
    except InvalidArgument:
        return False
    return True


@functools.cache
def kernel_of() -> Any:
    """The kernel; its module needs Triton, so it is not imported before the first call."""
    return importlib.import_module("weft.gemm.kernel").grouped_kernel


def kernel_arguments(request: Request, plan: GemmPlan, descriptor: Any) -> tuple[Any, ...]:
    """The kernel's arguments up to its constants.

    descriptor: makes a TMA descriptor of (tensor, shape, strides, block).
    """
    rows, k = request.a.shape
    experts, n, _ = request.b.shape
    depth = plan.block_depth
    a = descriptor(request.a, [rows, k], [k, 1], [plan.block_rows, depth])
    b = descriptor(request.b, [experts * n, k], [k, 1], [COLUMNS, depth])
    scale_row, scale_step = request.a_scale.stride() if request.a_scale is not None else (0, 0)
    home = request.epilogue.home if isinstance(request.epilogue, Push) else None
    return (
        *(a, b, request.a_scale, request.b_scale, request.bias, request.out, request.out_scale),
        *(home, request.counts, request.starts, request.most, rows),
        *(scale_row, scale_step),
    )


def kernel_constants(
    request: Request, plan: GemmPlan, programmatic: bool = False
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    experts, n, k = request.b.shape
    epilogue = request.epilogue
    gating = epilogue if isinstance(epilogue, Gated) else Gated()
    return {
        "EXPERTS": experts,
        "PADDED": 1 << (experts - 1).bit_length(),
        "N": n,
        "K": k,
        "ROWS": plan.block_rows,
        "COLUMNS": COLUMNS,
        "DEPTH": plan.block_depth,
        "STAGES": plan.stages,
        "SCALED": request.a.dtype == FP8,
        "PAIR": plan.block_columns > COLUMNS,
        "SWAP": plan.swap,
        "FLATTEN": plan.flatten,
        "EPILOGUE": _word(epilogue),
        "OUT": _triton_type(request.out_dtype),
        "ALPHA": gating.alpha,
        "OFFSET": gating.offset,
        "LIMIT": gating.limit,
        "PROGRAMMATIC": programmatic,
    }


def _word(epilogue: object) -> str:
    if isinstance(epilogue, GatedQuant):
        return "quant"
    if isinstance(epilogue, Gated):
        return "gated"
    return "push" if isinstance(epilogue, Push) else "store"


def _triton_type(dtype: torch.dtype) -> Any:
    language = importlib.import_module("triton.language")
    return {
        torch.bfloat16: language.bfloat16,
        torch.float16: language.float16,
        torch.float32: language.float32,
        FP8: language.float8e4nv,
    }[dtype]
