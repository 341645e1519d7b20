"""The Triton kernel, on the host: descriptors, constants and the grid of one launch."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from weft.errors import InvalidArgument
from weft.gemm.epilogue import Gated, GatedQuant, Push
from weft.gemm.plans import BLOCK_N, FP8, GemmPlan
from weft.gemm.problem import GemmProblem


def check_plan(problem: GemmProblem, plan: GemmPlan) -> None:
    """Refuse a plan that does not fit the call. Raises InvalidArgument."""
    if problem.a.dtype == FP8 and plan.block_k != 128:
        raise InvalidArgument(f"block_k is {plan.block_k}; FP8 has a scale per 128 columns")
    if problem.gated and plan.block_n != 2 * BLOCK_N:
        raise InvalidArgument(
            f"block_n is {plan.block_n}; gating needs {2 * BLOCK_N}, half of it gate, half up"
        )
    if problem.a.dtype == FP8 and not problem.gated and problem.out_columns % plan.block_n:
        raise InvalidArgument(
            f"{problem.out_columns} columns, block_n {plan.block_n}: FP8 needs a multiple"
        )
    push = isinstance(problem.epilogue, Push) and problem.epilogue
    if push and push.flag_in_data and problem.a.device.type == "cuda":
        raise InvalidArgument(
            "Push(flag_in_data=True) needs a WgmmaPlan, which runs on Hopper only: leave "
            "flag_in_data out"
        )


def launch(problem: GemmProblem, plan: GemmPlan, num_sms: int | None, programmatic: bool) -> None:
    """Enqueue the kernel in the current stream. Raises InvalidArgument without Triton."""
    rows, experts = len(problem.a), len(problem.b)
    if not rows or not experts:
        return
    triton = installed()
    device = problem.a.device
    sms = num_sms or torch.cuda.get_device_properties(device).multi_processor_count
    n_blocks = plan.n_blocks(problem.b.shape[1], problem.gated)
    grid = min(sms * plan.ctas_per_sm, plan.max_m_blocks(rows, experts) * n_blocks)
    constants = kernel_constants(problem, plan, programmatic)
    with torch.cuda.device(device):
        grouped_kernel()[(grid,)](
            *kernel_arguments(problem, plan, triton.tools.tensor_descriptor.TensorDescriptor),
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
            f"the grouped GEMM on a GPU needs Triton 3.6 or newer: {error}; pip install 'weft[gpu]'"
        ) from error
    return triton


def is_installed() -> bool:
    """Whether there is a Triton that the grouped GEMM can use."""
    try:
        installed()
    except InvalidArgument:
        return False
    return True


@functools.cache
def grouped_kernel() -> Any:
    """The kernel; its module needs Triton, so it is not imported before the first call."""
    return importlib.import_module("weft.gemm.triton_kernels").grouped_kernel


def kernel_arguments(problem: GemmProblem, plan: GemmPlan, descriptor: Any) -> tuple[Any, ...]:
    """The kernel's arguments up to its constants.

    descriptor: makes a TMA descriptor of (tensor, shape, strides, block).
    """
    rows, k = problem.a.shape
    experts, n, _ = problem.b.shape
    a = descriptor(problem.a, [rows, k], [k, 1], [plan.block_m, plan.block_k])
    b = descriptor(problem.b, [experts * n, k], [k, 1], [BLOCK_N, plan.block_k])
    row_stride, k_stride = problem.a_scale.stride() if problem.a_scale is not None else (0, 0)
    dst_addr = problem.epilogue.dst_addr if isinstance(problem.epilogue, Push) else None
    return (
        *(a, b, problem.a_scale, problem.b_scale, problem.bias, problem.out, problem.out_scale),
        *(dst_addr, problem.counts, problem.starts, problem.max_rows, rows),
        *(row_stride, k_stride),
    )


def kernel_constants(
    problem: GemmProblem, plan: GemmPlan, programmatic: bool = False
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    experts, n, k = problem.b.shape
    epilogue = problem.epilogue
    gating = epilogue if isinstance(epilogue, Gated) else Gated()
    return {
        "EXPERTS": experts,
        "PADDED": 1 << (experts - 1).bit_length(),
        "N": n,
        "K": k,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": plan.block_k,
        "STAGES": plan.stages,
        "SCALED": problem.a.dtype == FP8,
        "DUAL_N": plan.block_n > BLOCK_N,
        "SWAP": plan.swap,
        "FLATTEN": plan.flatten,
        "EPILOGUE": _epilogue_name(epilogue),
        "OUT_DTYPE": _triton_dtype(problem.out_dtype),
        "ALPHA": gating.alpha,
        "OFFSET": gating.offset,
        "LIMIT": gating.limit,
        "PROGRAMMATIC": programmatic,
    }


def _epilogue_name(epilogue: object) -> str:
    if isinstance(epilogue, GatedQuant):
        return "quant"
    if isinstance(epilogue, Gated):
        return "gated"
    return "push" if isinstance(epilogue, Push) else "store"


def _triton_dtype(dtype: torch.dtype) -> Any:
    language = importlib.import_module("triton.language")
    return {
        torch.bfloat16: language.bfloat16,
        torch.float16: language.float16,
        torch.float32: language.float32,
        FP8: language.float8e4nv,
    }[dtype]
