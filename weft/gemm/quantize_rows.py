"""`quantize_rows`: rows to FP8 that no dispatch has quantised."""

from __future__ import annotations

import importlib

import torch

from weft.arguments import flags, listed
from weft.errors import InvalidArgument
from weft.gemm.plans import FP8
from weft.gemm.problem import OUT_DTYPES, check_dense
from weft.gemm.triton_launch import installed
from weft.reference import quantize
from weft.runtime.check import check_alignment
from weft.shape import FP8_BLOCK

BLOCK_M = 8  # rows of a CTA, which is one warp


def quantize_rows(
    x: torch.Tensor, *, programmatic_launch: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn `[rows, k]`, float32 scales `[rows, k / 128]`) of x `[rows, k]`.

    x: bfloat16, float16 or float32, contiguous; k a multiple of 128.   programmatic_launch: as in
    grouped_gemm. The bits of `weft.reference.quantize(x, "fp8")`, in one launch that may be
    captured; allocates its results. Raises InvalidArgument.
    """
    flags(programmatic_launch=programmatic_launch)
    check_dense("x", x)
    check_alignment("x", x, x.itemsize)
    if x.ndim != 2 or x.shape[1] % FP8_BLOCK or not x.is_contiguous():
        raise InvalidArgument(
            f"x is {list(x.shape)} in strides {x.stride()}; want contiguous [rows, k], k a "
            f"multiple of {FP8_BLOCK}"
        )
    if x.dtype not in OUT_DTYPES:
        raise InvalidArgument(f"x is {x.dtype}; choose one of {listed(OUT_DTYPES)}")
    if x.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"x is on {x.device}; rows are quantised on cpu and cuda")
    if x.device.type != "cuda":
        return quantize(x, "fp8")
    rows, k = x.shape
    out = torch.empty((rows, k), dtype=FP8, device=x.device)
    scales = torch.empty((rows, k // FP8_BLOCK), dtype=torch.float32, device=x.device)
    if rows:
        installed()
        kernel = importlib.import_module("weft.gemm.triton_kernels").quantize_rows_kernel
        with torch.cuda.device(x.device):
            kernel[(-(-rows // BLOCK_M), k // FP8_BLOCK)](
                *(x, out, scales, rows),
                K=k,
                BLOCK_M=BLOCK_M,
                PROGRAMMATIC=programmatic_launch,
                num_warps=1,
                launch_pdl=programmatic_launch,
            )
    return out, scales
