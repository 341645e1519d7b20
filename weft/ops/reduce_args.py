"""Mirror of the one struct that crosses to the entries of the fused all-reduce."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_uint32, c_uint64

from weft.ops.args import Site

BACKENDS = {"oneshot": 1, "twoshot": 2, "twoshot_bulk": 3}
CODINGS = {"none": 0, "static": 1, "token": 2, "group": 3, "group_ue8m0": 4}
SLOTS = {
    1: "row",
    2: "row to be summed",
    3: "summed row",
    4: "statistics of the summed row",
    5: "call word",
}


class ReduceArgs(ctypes.Structure):
    """`weft::ReduceArgs` in protocol/reduction.cuh."""

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
    )


# The tensors of a call, in the order in which ReduceArgs holds their addresses, without a gap.
ADDRESSES = (
    *("x", "residual", "weight"),
    *("out", "residual_out", "norm_out", "quant_out", "scale_out"),
    *("scale", "rows", "index", "scales", "shared"),
)


def signature(tokens: int, backend: int, *, parts: tuple[bool, ...], coding: int, salt: int) -> int:
    """What a call is, in 40 bits: tokens 20, backend 4, inputs and outputs 4, coding 4, salt 8."""
    flags = sum(1 << i for i, present in enumerate(parts) if present)
    return tokens << 20 | backend << 16 | flags << 12 | coding << 8 | (salt & 0xFF)


def signature_text(word: int) -> str:
    """A call word in words."""
    tokens, backend = word >> 20 & 0xFFFFF, word >> 16 & 15
    flags, coding = word >> 12 & 15, word >> 8 & 15
    names = [name for name, number in BACKENDS.items() if number == backend]
    codings = [name for name, number in CODINGS.items() if number == coding]
    parts = [
        name for i, name in enumerate(("residual", "weight", "the sum wanted")) if flags >> i & 1
    ]
    return (
        f"{tokens} tokens by {names[0] if names else f'backend {backend}'}, "
        f"with {' and '.join(parts) or 'no residual, no weight'}, "
        f"quant {codings[0] if codings else coding}, constants {word & 0xFF:#04x}"
    )
