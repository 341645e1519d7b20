# SPDX-License-Identifier: Apache-2.0
"""Memory of one rank whose pages `Group.sleep` frees and whose addresses stay."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch

from weft.cuda.memory import DeviceShares
from weft.group import Group
from weft.heap.cpu import HostShares

# Smaller buffers come from torch: the driver allocates multiples of 2 MiB.
MIN_BYTES = 2 << 20
_ALIGNMENT = 256  # bytes, as torch's allocator
TensorSpec: TypeAlias = tuple[Sequence[int], torch.dtype]  # shape and dtype of a buffer
Allocate: TypeAlias = Callable[[Iterable[TensorSpec]], list[torch.Tensor]]


class LocalMemory:
    """Zero-initialised memory of this rank, which its tensors keep alive."""

    def __init__(self, group: Group, size: int) -> None:
        device = group.device
        self._size = size
        shares: HostShares | DeviceShares
        if device.type == "cuda":
            shares = DeviceShares(device, 0, 1, size)
        else:
            shares = HostShares(0, 1, size)
        self._shares = shares
        try:
            if isinstance(shares, DeviceShares):
                shares.open()
                shares.allocate(fabric=False)
            else:
                shares.allocate()
            self._map()
        except BaseException:
            shares.free()
            raise
        weakref.finalize(self, shares.free).atexit = False
        group.local.add_buffers(self)

    def view(self) -> torch.Tensor:
        """Return a uint8 tensor [size] over the memory."""
        return self._shares.view(self._shares.base, self._size, self)

    def release(self) -> None:
        """Free the memory and keep its address; it must not be accessed. Idempotent."""
        self._shares.release()

    def restore(self) -> None:
        """Allocate new memory, zeroed, at the same address."""
        self._shares.create()
        self._map()

    def _map(self) -> None:
        if isinstance(self._shares, DeviceShares):
            self._shares.map({0: -1})  # the own share needs no handle
            return
        with contextlib.ExitStack() as opened:
            fd = self._shares.share_fd()
            opened.callback(os.close, fd)
            self._shares.map({0: fd})


def allocate_local(group: Group, specs: Iterable[TensorSpec]) -> list[torch.Tensor]:
    """Return zero-initialised buffers of this rank, in one allocation that `Group.sleep` frees.

    Below `MIN_BYTES` in total they come from torch and stay allocated.

    Args:
        group: Group whose `sleep` frees the buffers.
        specs: Shape and dtype of each buffer.
    """
    shapes = [(tuple(shape), dtype) for shape, dtype in specs]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    steps = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    if sum(steps) < MIN_BYTES:
        memory = torch.zeros(sum(steps), dtype=torch.uint8, device=group.device)
    else:
        memory = LocalMemory(group, sum(steps)).view()
    parts = torch.split(memory, steps)
    return [
        part[:size].view(dtype).view(shape)
        for part, size, (shape, dtype) in zip(parts, sizes, shapes, strict=True)
    ]


def allocate_meta(specs: Iterable[TensorSpec]) -> list[torch.Tensor]:
    """Return buffers without memory, to compute sizes."""
    return [torch.empty(tuple(shape), dtype=dtype, device="meta") for shape, dtype in specs]
