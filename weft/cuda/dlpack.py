# SPDX-License-Identifier: Apache-2.0
"""torch tensors over device addresses, through DLPack.

DLPack lets us say which device a tensor is on. `__cuda_array_interface__` does not: torch asks the
driver, gets the GPU that holds the memory, and would copy a peer's share or run its kernels on
a GPU where this process has not mapped it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch.utils.dlpack import from_dlpack

_NAME = b"dltensor"  # the capsule keeps the pointer, so the bytes must outlive it
_UNSIGNED = 1
_KINDS = {"cpu": 1, "cuda": 2}


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

# What each tensor keeps alive, by the address of its struct, until torch calls the deleter.
_alive: dict[int, tuple[object, ...]] = {}


def _forget(address: int, pop: Callable[..., object] = _alive.pop) -> None:
    # `pop` is bound here: at interpreter exit the module's names are gone before its tensors.
    pop(address, None)


_delete = _Deleter(_forget)
# Never freed, for the same reason: a tensor that dies last must not return into freed code.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_delete))


def tensor_at(address: int, count: int, device: torch.device, keeper: object) -> torch.Tensor:
    """uint8 tensor [count] over `address` on `device`; it and its views keep `keeper` alive."""
    shape = (ctypes.c_int64 * 1)(count)
    managed = _Managed()
    managed.tensor.data = address
    managed.tensor.device = _Device(_KINDS[device.type], device.index or 0)
    managed.tensor.ndim = 1
    managed.tensor.dtype = _Type(_UNSIGNED, 8, 1)
    managed.tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _delete
    where = ctypes.addressof(managed)
    _alive[where] = (managed, shape, keeper)
    try:
        return from_dlpack(_new_capsule(where, _NAME, None))
    except BaseException:
        _alive.pop(where, None)
        raise
