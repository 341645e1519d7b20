"""Grouped GEMM of experts, in Triton and in CUDA for Hopper. docs/gemm.md."""

from weft.gemm.api import grouped_gemm
from weft.gemm.epilogue import STORE, Epilogue, Gated, GatedQuant, Push, Store
from weft.gemm.plans import GemmPlan, WgmmaPlan, fastest_plan, plan
from weft.gemm.quantize_rows import quantize_rows

__all__ = [
    "STORE",
    "Epilogue",
    "Gated",
    "GatedQuant",
    "GemmPlan",
    "Push",
    "Store",
    "WgmmaPlan",
    "fastest_plan",
    "grouped_gemm",
    "plan",
    "quantize_rows",
]
