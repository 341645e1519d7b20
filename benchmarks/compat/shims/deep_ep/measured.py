# SPDX-License-Identifier: Apache-2.0
"""DeepEP's measurement of single kernels, which looks for kernels of its own names in a profile.

Here the call is made, and every kernel is said to take a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    *_: Any,
    num_kernels_per_period: int = 1,
    **__: Any,
) -> Any:
    """Seconds of each kernel by its name; a list where a call launches several."""
    fn()
    each: Any = 1.0 if num_kernels_per_period == 1 else [1.0] * num_kernels_per_period
    return each if isinstance(kernel_names, str) else (each,) * len(kernel_names)
