# SPDX-License-Identifier: Apache-2.0
"""The current CUDA stream, and synchronization that is safe during captures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from weft.cuda.driver import allocate_fence, call_driver, relaxed_capture
from weft.errors import OutOfOrder


def current_stream(device: int) -> int:
    """Return the current CUstream of a GPU, as `torch.cuda.current_stream().cuda_stream`.

    Uses the function of torch's own compiler, because the public one constructs a Stream object.
    """
    return torch._C._cuda_getCurrentRawStream(device)


@contextlib.contextmanager
def loading_context(device: torch.device | int) -> Iterator[None]:
    """Make a GPU and its primary context current, so that kernels can be loaded.

    Other streams may be under capture.

    Raises:
        OutOfOrder: this thread's current stream is being captured. The initialisation would become
            part of the graph instead of running before the first call.
    """
    with torch.cuda.device(device), relaxed_capture():
        if torch.cuda.is_current_stream_capturing():
            raise OutOfOrder(
                "kernels cannot be loaded, and memory cannot be initialised, during a capture of "
                "this stream; create the object, or make its first call, before the capture or in "
                "another stream"
            )
        torch.cuda.mem_get_info()  # creates the context
        yield


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def synchronize_stream(device: torch.device) -> None:
    """Wait for the current stream, because later calls may use another stream."""
    if device.type == "cuda":
        with relaxed_capture():
            torch.cuda.current_stream(device).synchronize()


def synchronize_device(device: torch.device) -> None:
    """Wait for all work of a GPU; allowed while streams are captured. Raises DriverError."""
    if device.type == "cuda":
        with torch.cuda.device(device), relaxed_capture():
            torch.cuda.mem_get_info()  # makes the context current in this thread
            call_driver("cuMemFree", allocate_fence())
