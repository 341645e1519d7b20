"""Mirror of the one struct that crosses to the entries of the fused all-reduce."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_uint32, c_uint64

from weft.runtime.args import Site


class ReduceArgs(ctypes.Structure):
    """`weft::ReduceArgs` in allreduce/layout.cuh."""

    _fields_ = (
        ("site", Site),
        ("x", c_uint64),
        ("residual", c_uint64),
        ("weight", c_uint64),
        ("out", c_uint64),
        ("residual_out", c_uint64),
        ("norm_out", c_uint64),
        ("quant_out", c_uint64),
        ("scale_out", c_uint64),
        ("scale", c_uint64),
        ("rows", c_uint64),
        ("index", c_uint64),
        ("scales", c_uint64),
        ("shared", c_uint64),
        ("signature", c_uint64),
        ("row_limit", c_uint32),
        ("top_k", c_uint32),
        ("tokens", c_uint32),
        ("eps", c_float),
        ("weight_bias", c_float),
        ("weight_is_fp32", c_uint32),
        ("scales_are_fp32", c_uint32),
        ("coding", c_uint32),
        ("scale_stride", c_uint32),
        ("pushers", c_uint32),
        ("reducers", c_uint32),
        ("pushers_finish", c_uint32),
        ("routed_scaling_factor", c_float),
    )


# The tensors of a call, in the order in which ReduceArgs holds their addresses, without a gap.
ADDRESSES = (
    *("x", "residual", "weight"),
    *("out", "residual_out", "norm_out", "quant_out", "scale_out"),
    *("scale", "rows", "index", "scales", "shared"),
)
