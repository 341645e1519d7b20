# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMM of experts in Triton, and in CUDA for Hopper; see docs/user/gemm.md."""

from weft.gemm.config import (
    STORE,
    Epilogue,
    Gated,
    GatedQuant,
    GemmPlan,
    Push,
    Store,
    StoreQuant,
    WgmmaPlan,
    fastest_plan,
    plan,
)
from weft.gemm.mxfp4 import pack_mxfp4, quantize_mxfp4, unpack_mxfp4
from weft.gemm.operator import grouped_gemm, quantize_rows
from weft.keywords import explain_keywords

__all__ = [
    "STORE",
    "Epilogue",
    "Gated",
    "GatedQuant",
    "GemmPlan",
    "Push",
    "Store",
    "StoreQuant",
    "WgmmaPlan",
    "fastest_plan",
    "grouped_gemm",
    "pack_mxfp4",
    "plan",
    "quantize_mxfp4",
    "quantize_rows",
    "unpack_mxfp4",
]

explain_keywords(globals())
