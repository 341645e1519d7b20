"""Descriptors of tensors for the copy engine (TMA), as the driver encodes them."""

from __future__ import annotations

import ctypes
import functools

from weft.errors import DriverError

WORDS, ALIGNMENT = 16, 64  # of a CUtensorMap; words of 8 bytes, and what the driver insists on
# From cuda.h: bytes, no interleaving, 128-byte swizzle, 128-byte promotion to L2, zeros outside.
_BYTES, _PLAIN, _SWIZZLE_128, _PROMOTE_128, _ZEROS = 0, 0, 3, 2, 0


@functools.lru_cache(maxsize=4096)
def tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> tuple[int, ...]:
    """The 16 words that describe a tensor of bytes; its boxes land in rows of 128 swizzled bytes.

    sizes: in bytes and then in rows, the fastest first.   strides: bytes from one to the next, of
    all dimensions but the first.   box: sizes of what one load brings; 128 first. A pure function
    of its arguments: the memory is not looked at. Raises DriverError.
    """
    room = (ctypes.c_uint64 * (WORDS + ALIGNMENT // 8))()
    start = ctypes.addressof(room)
    place = -(-start // ALIGNMENT) * ALIGNMENT
    rank = len(sizes)
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        ctypes.c_int(_BYTES),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        *map(ctypes.c_int, (_PLAIN, _SWIZZLE_128, _PROMOTE_128, _ZEROS)),
    )
    if status:
        raise DriverError(
            f"cuTensorMapEncodeTiled refused (error {status}) a tensor at {address:#x} of sizes "
            f"{sizes}, strides {strides}, box {box}; addresses and strides are multiples of 16"
        )
    return tuple((ctypes.c_uint64 * WORDS).from_address(place))


@functools.cache
def _driver() -> ctypes.CDLL:
    # Not through cuda.bindings: its CUtensorMap lies in a Python object, which need not be aligned.
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(
            f"the NVIDIA driver was not found: {error}; use CPU tensors on this machine"
        ) from error
