# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory: one share per rank of a group that every rank can address."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, TypeAlias

import torch

from weft.arguments import check_instance, check_int, check_ints, raise_invalid
from weft.cuda.memory import DeviceShares
from weft.errors import (
    CreationFailed,
    HandleUnsupported,
    InvalidArgument,
    OutOfOrder,
    RendezvousFailed,
)
from weft.group.group import Group
from weft.group.messages import Messages
from weft.heap.cpu import HostShares, make_buffer
from weft.heap.header import header_bytes
from weft.heap.host_memory import check_host_memory
from weft.keywords import internal
from weft.shape import MAILBOX_BYTES

_log = logging.getLogger(__name__)
INT64 = -(1 << 63), (1 << 63) - 1
MAX_BYTES = 1 << 48  # size of a share: the address space of a process
MAX_WRITE = MAILBOX_BYTES // 2  # bytes per write, which GPUs stage in half of the mailbox
Shares: TypeAlias = HostShares | DeviceShares


class _MemoryOwner:
    """Token that the open heap, its mailbox and every view reference; the last one frees it."""

    __slots__ = ("__weakref__",)


class Mailbox:
    """One page of host memory that this rank's device can write.

    Attributes:
        host: Address for the host.
        device: Address for the device; on CPU ranks the same.
    """

    def __init__(self, host: int, device: int, owner: object) -> None:
        self.host = host
        self.device = device
        self._owner = owner

    def view(self) -> memoryview:
        """Return the page as a writable memoryview [4096] that keeps the memory alive."""
        return memoryview(make_buffer(self.host, MAILBOX_BYTES, self._owner)).cast("B")


class Heap:
    """Symmetric memory: `size` bytes per rank that every rank of `group` can address.

    Rank r's share is at `base + r * stride` in this process and is initialised to zero. The bytes
    after each share are unmapped, so that overruns fault. `generation` is equal on all ranks and
    differs from that of the group's other heaps.
    """

    def __init__(self, group: Group, size: int, generation: int, shares: Shares) -> None:
        self.group = group
        self.size = size
        self.stride = shares.stride
        self.base = shares.base
        self.generation = generation
        self._shares: Shares | None = shares
        self._owner: _MemoryOwner | None = _MemoryOwner()
        self._asleep = False
        # Held while the host accesses a share, so that it is not unmapped. Reentrant: a signal
        # handler may close an operator.
        self._access = threading.RLock()
        self._failures: list[Exception] = []
        self._mailbox: Mailbox | None = Mailbox(*shares.mailbox, self._owner)
        # Not at exit: other threads may still use the memory, which the system then frees.
        weakref.finalize(self._owner, _free, shares, self._failures).atexit = False

    @classmethod
    def create(cls, group: Group, size: int) -> Heap:
        """Allocate a heap of `size` bytes per rank. Collective.

        Raises:
            InvalidArgument: the size is invalid or exceeds the memory of this host.
            CreationFailed: a rank failed. Every rank raises it.
            GeometryMismatch: the sizes differ.
        """
        check_instance("group", group, Group)
        with group.creation() as creation:
            heap = cls(group, size, *_create_shares(group, size))
            creation.add_heap(heap)
        group.add_heap(heap)
        return heap

    @property
    def closed(self) -> bool:
        """Whether the heap is closed."""
        return self._shares is None

    @property
    def asleep(self) -> bool:
        """Whether the memory is freed until `Group.wake`."""
        return self._asleep

    @property
    def mailbox(self) -> Mailbox:
        """Page of host memory that both this rank's kernels and the host write."""
        if self._mailbox is None:
            raise self._closed_error()
        return self._mailbox

    @property
    def stream(self) -> int:
        """CUstream of this heap that is never captured; 0 on CPU ranks."""
        return self._get_shares().stream

    def address(self, rank: int) -> int:
        """Return the address of a rank's share in this process.

        Raises:
            InvalidArgument: the group has no such rank, or it had exited before the creation or
                before `Group.wake`.
            OutOfOrder: the heap is closed or asleep.
        """
        shares = self._get_shares()
        rank = check_int("rank", rank, 0, self.group.size - 1)
        if self._asleep:
            raise OutOfOrder(
                f"the heap of generation {self.generation} "
                + (
                    "is asleep: call group.wake() first, on every rank"
                    if self.group.asleep
                    else "has no memory, because another rank closed it while the group was "
                    "asleep: close it on every rank, and create a new one"
                )
            )
        if rank not in shares.ranks:
            raise InvalidArgument(
                f"rank {rank} had exited before this heap was created or woken and has no share"
            )
        return self.base + rank * self.stride

    def tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        offset: int = 0,
        rank: int | None = None,
        stride: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return a view of a rank's share as a tensor, which keeps the memory alive after close().

        Args:
            shape: Shape of the view.
            dtype: Type of its elements.
            offset: First byte of the view in the share; a multiple of the element size.
            rank: Rank of the share. Default: this rank.
            stride: Strides in elements. Default: contiguous.

        Raises:
            InvalidArgument: the view is not inside the share.
            OutOfOrder: the heap is closed or asleep.
        """
        shares = self._get_shares()
        address = self.address(self.group.rank if rank is None else rank)
        check_instance("dtype", dtype, torch.dtype)
        shape, offset = (
            check_ints("shape", shape, *INT64),
            check_int("offset", offset, 0, MAX_BYTES),
        )
        steps = (
            _contiguous_strides(shape) if stride is None else check_ints("stride", stride, *INT64)
        )
        extent = _compute_extent(tuple(shape), steps) * dtype.itemsize
        if offset % dtype.itemsize != 0:
            raise InvalidArgument(
                f"offset is {offset}, but elements of {dtype} have {dtype.itemsize} bytes: pass a "
                "multiple of the element size"
            )
        if offset + extent > self.size:
            raise InvalidArgument(
                f"a tensor of shape {tuple(shape)} of {dtype} at offset {offset} ends at byte "
                f"{offset + extent}, but the share has {self.size} bytes; create a larger heap"
            )
        share = shares.view(address, self.size, self._owner)
        try:
            return share[offset : offset + extent].view(dtype).as_strided(tuple(shape), steps)
        except (RuntimeError, TypeError) as error:  # the sizes of an empty tensor overflow
            raise InvalidArgument(
                f"torch cannot create a tensor of shape {tuple(shape)}, stride {steps} and {dtype}"
                f": {error}"
            ) from error

    def header(self, rank: int | None = None) -> bytes:
        """Return a copy of the header of a rank's share, also of a dead rank.

        Raises:
            InvalidArgument: the share is smaller than a header.
            OutOfOrder: the heap is closed or asleep.
        """
        owner = self._owner  # another thread may close the heap during the read
        shares = self._get_shares()
        size = header_bytes(self.group.size)
        if self.size < size:
            raise InvalidArgument(
                f"the heap has {self.size} bytes per rank, but a header needs {size}"
            )
        with self._access:
            address = self.address(self.group.rank if rank is None else rank)
            content = shares.read(address, size)
        del owner
        return content

    def write(self, rank: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write up to 2048 bytes into a rank's share and wait for completion.

        Kernels may run during the write. Aligned 8-byte words are written atomically.

        Raises:
            InvalidArgument: the bytes are not inside the share.
            OutOfOrder: the heap is closed or asleep.
        """
        shares = self._get_shares()
        self.address(rank)  # checks the rank
        offset = check_int("offset", offset, 0, MAX_BYTES)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise_invalid("data", data, "bytes, a bytearray or a memoryview")
        try:
            content = bytes(data)
        except (ValueError, TypeError, BufferError) as error:  # a released memoryview
            raise InvalidArgument(f"data cannot be read: {error}; pass bytes") from error
        if len(content) > MAX_WRITE:
            raise InvalidArgument(
                f"data has {len(content)} bytes, which exceed the limit of {MAX_WRITE} per write: "
                "copy larger data into a tensor of the share, Heap.tensor(..., rank=rank)"
            )
        if offset + len(content) > self.size:
            raise InvalidArgument(
                f"{len(content)} bytes at offset {offset} end at byte {offset + len(content)}, but "
                f"the share has {self.size} bytes: write inside the share, or create a larger heap"
            )
        with self._access:
            shares.write(self.address(rank) + offset, content)

    @internal
    def release(self) -> None:
        """Free the memory of all shares and keep their addresses. Idempotent.

        Views must not be accessed until the memory is restored. Does nothing if the heap is closed.
        """
        owner, shares = self._owner, self._shares  # another thread may close the heap
        if shares is not None:
            with self._access:
                self._asleep = True
                shares.release()
        del owner

    @internal
    def prepare_restore(self) -> Callable[[], None] | None:
        """Return a function that restores the memory, or None if the heap is closed.

        The function is collective: it allocates new shares, zeroed, at the same addresses. It keeps
        the memory alive, so that all ranks finish it even if another thread closes the heap. If the
        memory of this host does not suffice, or a rank fails, every rank raises InvalidArgument or
        CreationFailed and has to call `release`.
        """
        owner, shares = self._owner, self._shares
        return None if shares is None else partial(self._restore, shares, owner)

    def _restore(self, shares: Shares, _: _MemoryOwner | None) -> None:
        group = self.group
        check_host_memory(group, self.size, label="waking a heap")
        group.run_collective(shares.create, action=f"allocating {self.size} bytes to wake a heap")
        _map_shares(group, shares, action="mapping the memory of every rank to wake a heap")
        self._asleep = False

    def close(self) -> None:
        """Close the heap; its memory is freed when the last view is released. Idempotent.

        Local: never waits for a peer, whose mappings stay valid.
        """
        self._shares = self._owner = self._mailbox = None
        if self._failures:
            raise self._failures.pop(0)

    def __enter__(self) -> Heap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _get_shares(self) -> Shares:
        if self._shares is None:
            raise self._closed_error()
        return self._shares

    def _closed_error(self) -> OutOfOrder:
        return OutOfOrder(
            f"the heap of generation {self.generation} is closed; create a new one (Heap.create)"
        )


def _create_shares(group: Group, size: int) -> tuple[int, Shares]:
    """Allocate and map the shares of a new heap; return its generation and them. Collective."""
    began = time.monotonic()
    try:
        size = group.run_collective(
            lambda: check_int("size", size, 1, MAX_BYTES), action="creating a heap"
        )
        group.agree({"size": size}, label="the heap's size")
        check_host_memory(group, size, label="a heap")
        generation = group.next_generation()
        on_gpu = group.device.type == "cuda"
        shares = _create_device_shares(group, size) if on_gpu else _create_host_shares(group, size)
        _log.info(
            "heap %d: %d bytes on each of %d ranks (%s), %d bytes mapped, created in %.3f s",
            *(generation, size, group.size, group.device.type, group.size * shares.stride),
            time.monotonic() - began,
        )
    except RendezvousFailed as error:
        raise CreationFailed(f"creating a heap failed: {error}") from error
    return generation, shares


def _create_host_shares(group: Group, size: int) -> HostShares:
    shares = HostShares(group.rank, group.size, size)
    try:
        group.run_collective(shares.allocate, action=f"allocating {size} bytes of shared memory")
        _map_shares(group, shares, action=f"mapping {size} bytes of every rank")
    except BaseException:
        shares.free()
        raise
    return shares


def _create_device_shares(group: Group, size: int) -> DeviceShares:
    shares = DeviceShares(group.device, group.rank, group.size, size)
    try:
        peers = group.all_gather(
            group.run_collective(shares.open, action=f"opening {group.device}")
        )
        without = [rank for rank in group.living if not peers[rank]["fabric"]]

        def check() -> None:
            shares.check(peers)
            if without and group.machines > group.hosts:
                _raise_fabric_lost(group, without[0], peers[without[0]]["name"])

        group.run_collective(check, action="checking peer access between GPUs")
        how = "POSIX file descriptors" if without else "fabric handles"
        _log.debug("rank %d: GPU memory is shared by %s", group.rank, how)
        group.run_collective(
            lambda: shares.allocate(fabric=not without),
            action=f"allocating {size} bytes of GPU memory",
        )
        _map_shares(group, shares, action="mapping the GPU memory of every rank")
    except BaseException:
        shares.free()
        raise
    return shares


def _raise_fabric_lost(group: Group, rank: int, name: str) -> NoReturn:
    """Raise HandleUnsupported for a rank that can no longer export fabric handles."""
    raise HandleUnsupported(
        f"rank {rank} on {name} can no longer export fabric handles, which the {group.machines} "
        "machines of this group need to share memory: free some of its memory, and check with "
        "`weft doctor` whether its IMEX channel is open"
    )


def _map_shares(group: Group, shares: Shares, action: str) -> None:
    """Send a handle of this rank's share to all ranks, and map all shares. Collective."""
    if isinstance(shares, DeviceShares) and shares.uses_fabric:
        _map_fabric(group, shares, action)
    else:
        group.map_shares(shares.share_fd, shares.map, action=action)


def _map_fabric(group: Group, shares: DeviceShares, action: str) -> None:
    """Send a fabric handle of this rank's share to all ranks, and map all shares. Collective."""

    def exchange(messages: Messages) -> None:
        handle = messages.run_collective(shares.export_fabric, action="exporting memory")
        handles = messages.all_gather(handle)
        new = {rank: handles[rank] for rank in messages.ranks_to_map}
        messages.run_collective(lambda: shares.map(new), action=action)

    group.record(exchange)


def _free(shares: Shares, failures: list[Exception]) -> None:
    """Free the shares after their last user; `close` raises the errors."""
    try:
        shares.free()
    except Exception as error:
        failures.append(error)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= max(n, 1)
    return tuple(reversed(steps))


def _compute_extent(shape: tuple[int, ...], steps: tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last of a strided tensor."""
    if len(shape) != len(steps):
        raise InvalidArgument(f"stride {steps} and shape {shape} have different lengths")
    if min(shape, default=0) < 0 or min(steps, default=0) < 0:
        raise InvalidArgument(f"shape {shape} and stride {steps} must not be negative")
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
