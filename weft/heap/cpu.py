# SPDX-License-Identifier: Apache-2.0
"""Shares of CPU ranks: one sealed memfd per rank, mapped into one address range per process."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Mapping

import torch

from weft.group.pages import (
    MAP_FIXED,
    PROT_NONE,
    check_sealed,
    create_sealed_memfd,
    exclude_from_fork,
    map_memory,
    unmap,
)
from weft.shape import MAILBOX_BYTES


class HostShares:
    """Shares of all ranks, mapped in this process.

    Attributes:
        ranks: Ranks whose shares are mapped.
        stride: Bytes between two shares.
        base: Address of rank 0's share. Rank r's is at `base + r * stride`.
        mailbox: Host and device address of one private page; equal on the CPU.
        stream: 0, since the CPU has no streams.
    """

    stream = 0

    def __init__(self, rank: int, num_ranks: int, size: int) -> None:
        page = mmap.PAGESIZE
        self.ranks: set[int] = set()
        self._num_ranks = num_ranks
        self._mapped = -(-size // page) * page
        self._fd = -1
        self._owner = os.getpid()
        self.stride = self._mapped + page  # the last page stays unmapped, so that overruns fault
        self._mailbox_bytes = -(-MAILBOX_BYTES // page) * page
        self._reserved = num_ranks * self.stride + self._mailbox_bytes
        self.base = 0
        self.mailbox = (0, 0)

    def allocate(self) -> None:
        """Allocate this rank's share, zeroed, and reserve the address range. Raises OSError."""
        self.create()
        self.base = map_memory(
            0, self._reserved, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1
        )
        mailbox = self.base + self._num_ranks * self.stride
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        map_memory(mailbox, self._mailbox_bytes, writable, private | MAP_FIXED, -1)
        self.mailbox = (mailbox, mailbox)

    def create(self) -> None:
        """Allocate this rank's share, zeroed. Raises OSError."""
        self._fd = create_sealed_memfd("weft-share", self._mapped)

    def release(self) -> None:
        """Unmap all shares and free this rank's; keep the address range. Idempotent.

        Accesses fault until `create` and `map`. Raises OSError.
        """
        reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        while self.ranks:
            address = self.base + self.ranks.pop() * self.stride
            map_memory(address, self._mapped, PROT_NONE, reserved, -1)
        self._close_fd()

    def map(self, fds: Mapping[int, int]) -> None:
        """Map shares from their descriptors. Raises HandleUnsupported for an invalid descriptor."""
        for rank, fd in fds.items():
            check_sealed(rank, fd, self._mapped)
            address = self.base + rank * self.stride
            writable = mmap.PROT_READ | mmap.PROT_WRITE
            map_memory(address, self._mapped, writable, mmap.MAP_SHARED | MAP_FIXED, fd)
            # Peers could not distinguish the stores of a forked child from those of its parent.
            exclude_from_fork(address, self._mapped)
            self.ranks.add(rank)

    def share_fd(self) -> int:
        """Return a new descriptor of this rank's share. The caller closes it."""
        return os.dup(self._fd)

    def view(self, address: int, count: int, owner: object) -> torch.Tensor:
        """Return a uint8 tensor [count] over `address` that keeps `owner` alive."""
        return torch.frombuffer(make_buffer(address, count, owner), dtype=torch.uint8)

    def read(self, address: int, count: int) -> bytes:
        """Return a copy of `count` bytes."""
        return ctypes.string_at(address, count)

    def write(self, address: int, data: bytes) -> None:
        """Store `data`. An aligned 8-byte word is written atomically."""
        if len(data) == 8 and address % 8 == 0:
            ctypes.c_uint64.from_address(address).value = int.from_bytes(data, sys.byteorder)
        else:
            ctypes.memmove(address, data, len(data))

    def free(self) -> None:
        """Release all resources. Idempotent. Raises OSError.

        A forked child unmaps nothing: its address range may hold other memory.
        """
        self._close_fd()
        base, self.base = self.base, 0
        if base and os.getpid() == self._owner:
            unmap(base, self._reserved)

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def make_buffer(address: int, count: int, owner: object) -> ctypes.Array[ctypes.c_ubyte]:
    """Return `count` bytes at `address` as a buffer that keeps `owner` alive."""
    array = (ctypes.c_ubyte * count).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    return array
