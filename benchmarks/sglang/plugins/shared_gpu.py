# SPDX-License-Identifier: Apache-2.0
"""SGLang's plug-in "weft_shared": several ranks on each GPU, for servers with more ranks than GPUs.

The ranks take turns on the GPU, so it shows results, and no speed. NCCL needs
NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

PLACES = ("managers.data_parallel_controller", "entrypoints.engine")


def register() -> None:
    """Wrap the function that chooses a rank's GPU."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for place in PLACES:
        target = f"sglang.srt.{place}.maybe_reindex_device_id"
        HookRegistry.register(target, share_gpu, HookType.AROUND)


def share_gpu(
    original: Callable[[int], AbstractContextManager[int]], gpu_id: int
) -> AbstractContextManager[int]:
    """Return the context in which the process of a rank starts, with its GPU."""
    from job import gpu_names

    return original(gpu_id % len(gpu_names()))
