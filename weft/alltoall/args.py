"""Mirrors of the arguments in alltoall/layout.cuh: one struct crosses to each entry."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64

from weft.runtime.args import Site
from weft.shape import MAX_PLANES


class DispatchArgs(ctypes.Structure):
    """Arguments of the dispatch entry."""

    _fields_ = (
        ("site", Site),
        ("payload", c_uint64 * MAX_PLANES),
        ("ids", c_uint64),
        ("weights", c_uint64),
        ("placement", c_uint64),
        ("num_tokens", c_uint64),
        ("tokens", c_uint32),
        ("ids_bytes", c_uint32),
        ("stats", c_uint64),
        ("source_rows", c_uint32),
        ("reserved", c_uint32),
    )


class CombineArgs(ctypes.Structure):
    """Arguments of the combine entry."""

    _fields_ = (
        ("site", Site),
        ("out", c_uint64),
        ("add", c_uint64),
        ("tokens", c_uint32),
        ("pushers", c_uint32),
        ("strips", c_uint32),
        ("source_rows", c_uint32),
    )
