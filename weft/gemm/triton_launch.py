# SPDX-License-Identifier: Apache-2.0
"""Host side of the Triton kernel: tensor descriptors, constants and launch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch

from weft.distribution import install_hint
from weft.errors import InvalidArgument
from weft.gemm.call import GemmCall
from weft.gemm.config import (
    BLOCK_N,
    FP8,
    MXFP4,
    Gated,
    GatedQuant,
    GemmPlan,
    Push,
    Store,
    StoreQuant,
)


def check_plan(call: GemmCall, plan: GemmPlan) -> None:
    """Raise InvalidArgument if the plan does not fit the call."""
    if call.b.dtype == MXFP4:
        raise InvalidArgument(
            f"{plan} does not support MXFP4 weights: use a WgmmaPlan, or omit plan"
        )
    if call.a.dtype == FP8 and plan.block_k != 128:
        raise InvalidArgument(
            f"block_k is {plan.block_k}; FP8 needs 128, the number of columns per scale"
        )
    if call.gated and plan.block_n != 2 * BLOCK_N:
        raise InvalidArgument(
            f"block_n is {plan.block_n}; gating needs {2 * BLOCK_N}, half of it gate, half up"
        )
    by_128_columns = call.a.dtype == FP8 or isinstance(call.epilogue, StoreQuant)
    if by_128_columns and not call.gated and call.out_columns % plan.block_n:
        raise InvalidArgument(
            f"out has {call.out_columns} columns; FP8 needs a multiple of block_n, {plan.block_n}"
        )
    has_flags = isinstance(call.epilogue, Push) and call.epilogue.flag_in_data
    if has_flags and call.a.device.type == "cuda":
        raise InvalidArgument(
            "Push(flag_in_data=True) needs a WgmmaPlan, which only Hopper GPUs support: omit "
            "flag_in_data"
        )


class TritonLaunch:
    """Launcher of calls that differ only in tensor addresses, for one device.

    Raises:
        InvalidArgument: Triton is not installed.
    """

    def __init__(self, call: GemmCall, plan: GemmPlan, num_sms: int | None, use_pdl: bool) -> None:
        rows, experts = len(call.a), len(call.b)
        triton = import_triton()
        sms = num_sms or torch.cuda.get_device_properties().multi_processor_count
        n_blocks = plan.n_blocks(call.b.shape[1], call.gated)
        ctas = min(sms * plan.ctas_per_sm, plan.max_m_blocks(rows, experts) * n_blocks)
        self._kernel = import_grouped_kernel()[(ctas,)]
        self._arguments = TritonArguments(call, plan)
        self._descriptor = triton.tools.tensor_descriptor.TensorDescriptor
        self._constants = build_kernel_constants(call, plan, use_pdl) | {
            "num_warps": plan.warps,
            "num_stages": plan.stages,
            "launch_pdl": use_pdl,
        }

    def __call__(self, tensors: Sequence[torch.Tensor | None], addresses: Sequence[int]) -> None:
        """Launch the kernel on the current stream."""
        self._kernel(*self._arguments.build(tensors, self._descriptor), **self._constants)


class TritonArguments:
    """Runtime arguments of the kernel for calls that differ only in tensor addresses."""

    def __init__(self, call: GemmCall, plan: GemmPlan) -> None:
        rows, k = call.a.shape
        experts, n, _ = call.b.shape
        self._a = [rows, k], [k, 1], [plan.block_m, plan.block_k]
        self._b = [experts * n, k], [k, 1], [BLOCK_N, plan.block_k]
        strides = (0, 0) if call.a_scale is None else call.a_scale.stride()
        self._sizes = (call.max_rows, rows, *strides)

    def build(self, tensors: Sequence[torch.Tensor | None], descriptor: Any) -> tuple[Any, ...]:
        """Build the arguments for the tensors of a call.

        Args:
            tensors: See `GemmCall.tensors`.
            descriptor: Function that creates a TMA descriptor from tensor, shape, strides, block.
        """
        a_scale, b_scale, out, out_scale, dst_addr, _, bias, counts, starts, a, b = tensors
        return (
            *(descriptor(a, *self._a), descriptor(b, *self._b), a_scale, b_scale, bias),
            *(out, out_scale, dst_addr, counts, starts, *self._sizes),
        )


@functools.cache
def import_triton() -> Any:
    """Import triton. Raises InvalidArgument if it is not installed."""
    try:
        triton = importlib.import_module("triton")
        importlib.import_module("triton.tools.tensor_descriptor")
    except ImportError as error:
        raise InvalidArgument(
            f"the grouped GEMM on a GPU needs Triton 3.6 or newer: {error}; {install_hint('gpu')}"
        ) from error
    return triton


def is_triton_installed() -> bool:
    """Whether a Triton version that supports the grouped GEMM is installed."""
    try:
        import_triton()
    except InvalidArgument:
        return False
    return True


@functools.cache
def import_grouped_kernel() -> Any:
    """Import the module of the kernel, which needs Triton, and return the kernel."""
    return importlib.import_module("weft.gemm.triton_kernels").weft_grouped_gemm


def build_kernel_constants(call: GemmCall, plan: GemmPlan, use_pdl: bool = False) -> dict[str, Any]:
    """Return the kernel's compile-time constants."""
    experts, n, k = call.b.shape
    epilogue = call.epilogue
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
        "SCALED": call.a.dtype == FP8,
        "DUAL_N": plan.block_n > BLOCK_N,
        "SWAP": plan.swap,
        "FLATTEN": plan.flatten,
        "EPILOGUE": _epilogue_name(epilogue),
        "ACTIVATION": epilogue.activation if isinstance(epilogue, Store) else None,
        "OUT_DTYPE": _triton_dtype(call.out_dtype),
        "ALPHA": gating.alpha,
        "OFFSET": gating.offset,
        "LIMIT": gating.limit,
        "BETA": gating.beta,
        "LINEAR_BETA": gating.linear_beta,
        "PROGRAMMATIC": use_pdl,
    }


def _epilogue_name(epilogue: object) -> str:
    if isinstance(epilogue, GatedQuant):
        return "gated_quant"
    if isinstance(epilogue, StoreQuant):
        return "store_quant"
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
