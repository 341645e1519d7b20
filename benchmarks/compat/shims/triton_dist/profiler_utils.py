# SPDX-License-Identifier: Apache-2.0
"""Timing by events."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def perf_func(call: Callable[[], Any], iters: int, warmup_iters: int) -> tuple[Any, float]:
    """Return the last result, and milliseconds per call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(warmup_iters):
        call()
    begin.record()
    for _ in range(iters):
        result = call()
    end.record()
    torch.cuda.synchronize()
    return result, begin.elapsed_time(end) / iters


def get_torch_prof_ctx(enabled: bool) -> AbstractContextManager[Any]:
    """Return a context without profiling."""
    if enabled:
        raise NotImplementedError("triton_dist's profiles")
    return nullcontext()
