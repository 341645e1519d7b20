"""Grouped matrix products of experts, in Triton and in CUDA; knows no peers. docs/gemm.md."""

from weft.gemm.call import grouped_gemm
from weft.gemm.choice import fastest_plan
from weft.gemm.epilogue import STORE, Epilogue, Gated, GatedQuant, Push, Store
from weft.gemm.hopper import WgmmaPlan
from weft.gemm.plan import GemmPlan, plan
from weft.gemm.rows import quantize_rows

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
