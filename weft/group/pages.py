# SPDX-License-Identifier: Apache-2.0
"""Shared memory of CPU processes: sealed memfds, and mappings that forked children do not inherit.

A memfd has no name, so it is freed when its processes end. The seals keep a peer from shrinking
it, which would turn the next access into SIGBUS.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from weft.errors import HandleUnsupported

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PROT_NONE = 0
MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def create_sealed_memfd(name: str, size: int) -> int:
    """Create a memfd of `size` zero bytes that cannot be resized. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_sealed(rank: int, fd: int, size: int) -> None:
    """Raise HandleUnsupported unless a rank's `fd` is a sealed memfd of `size` bytes."""
    actual = os.fstat(fd).st_size
    if actual != size:
        raise HandleUnsupported(
            f"rank {rank} sent memory of {actual} bytes, but the ranks agreed on {size}"
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise HandleUnsupported(
            f"rank {rank} sent a descriptor that is not a memfd: it has no seals ({error.strerror})"
        ) from error
    if seals & SEALS != SEALS:
        raise HandleUnsupported(
            f"rank {rank} sent memory with seals {seals:#x}, but {SEALS:#x} are required: it could "
            "shrink while others read it"
        )


def map_shared(fd: int, size: int, *, writable: bool) -> int:
    """Map `fd`, exclude it from forked children, and return the address. Raises OSError."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = map_memory(0, size, protection, mmap.MAP_SHARED, fd)
    exclude_from_fork(address, size)
    return address


def unmap(address: int, size: int) -> None:
    """Remove a mapping. Raises OSError."""
    if _libc.munmap(address, size) != 0:
        raise _os_error("munmap", size)


def exclude_from_fork(address: int, size: int) -> None:
    """Exclude a mapping from forked children. Raises OSError."""
    if _libc.madvise(address, size, mmap.MADV_DONTFORK) != 0:
        raise _os_error("madvise", size)


def map_memory(address: int, size: int, protection: int, flags: int, fd: int) -> int:
    """Map memory, at `address` unless it is 0, and return its address. Raises OSError."""
    result = _libc.mmap(address or None, size, protection, flags | _MAP_NORESERVE, fd, 0)
    if result == _MAP_FAILED:
        raise _os_error("mmap", size)
    return int(result)


def _os_error(call: str, size: int) -> OSError:
    number = ctypes.get_errno()
    return OSError(
        number, f"{call} of {size} bytes: {os.strerror(number)}; see `ulimit -v` and free memory"
    )
