"""Mirror of `Site` in device/header.cuh: where a heap is, and which rank this is."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64


class Site(ctypes.Structure):
    """Where the shares are and which rank this is."""

    _fields_ = (
        ("base", c_uint64),
        ("stride", c_uint64),
        ("mailbox", c_uint64),
        ("rank", c_uint32),
        ("descriptor", c_uint32),
    )
