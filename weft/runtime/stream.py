# SPDX-License-Identifier: Apache-2.0
"""The stream that torch enqueues on, and how what is in it is waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from weft.errors import OutOfOrder
from weft.memory.driver import call, fence, relaxed


def current_stream(device: int) -> int:
    """The CUstream that is current on a GPU, as `torch.cuda.current_stream().cuda_stream`.

    Torch gives it as a number to the launchers of its own compiler; the public call makes a Stream.
    """
    return torch._C._cuda_getCurrentRawStream(device)


@contextlib.contextmanager
def loading(device: torch.device | int) -> Iterator[None]:
    """Within, kernels may be loaded onto a GPU: it is current, and its primary context is there.

    Other streams may be captured meanwhile. Raises OutOfOrder while this thread's own is: what must
    have run before the first call would only be written into the graph.
    """
    with torch.cuda.device(device), relaxed():
        if torch.cuda.is_current_stream_capturing():
            raise OutOfOrder(
                "kernels are loaded and memory is filled before a graph is captured, not in it; "
                "make the object, or its first call, before the capture or in another stream"
            )
        torch.cuda.mem_get_info()  # makes the context
        yield


def capturing(device: torch.device) -> bool:
    """Is the current stream being captured into a graph?"""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def synchronize_stream(device: torch.device) -> None:
    """Wait for what this thread has enqueued: later calls may come in another stream."""
    if device.type == "cuda":
        with relaxed():
            torch.cuda.current_stream(device).synchronize()


def synchronize_device(device: torch.device) -> None:
    """Wait until a GPU has done all its work, whatever is being captured. Raises DriverError."""
    if device.type == "cuda":
        with torch.cuda.device(device), relaxed():
            torch.cuda.mem_get_info()  # makes the context current in this thread
            call("cuMemFree", fence())
