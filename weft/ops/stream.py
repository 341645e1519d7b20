"""The stream that torch enqueues on, read at the cost of a launch and not of an object."""

from __future__ import annotations

import torch


def current_stream(device: int) -> int:
    """The CUstream that is current on a GPU, as `torch.cuda.current_stream().cuda_stream`.

    Torch gives it as a number to the launchers of its own compiler; the public call makes a Stream.
    """
    return torch._C._cuda_getCurrentRawStream(device)
