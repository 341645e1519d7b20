# SPDX-License-Identifier: Apache-2.0
"""SGLang's plug-in "weft_one_gpu": all ranks run on the first GPU.

NCCL allows this with NCCL_MULTI_RANK_GPU_ENABLE=1. The ranks take turns, so times mean nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def register() -> None:
    """Replace the functions that select a rank's GPU."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for module in ("managers.data_parallel_controller", "entrypoints.engine"):
        target = f"sglang.srt.{module}.maybe_reindex_device_id"
        HookRegistry.register(target, first_gpu, HookType.REPLACE)


@contextlib.contextmanager
def first_gpu(gpu_id: int) -> Iterator[int]:
    """Return a context with the index of the first GPU."""
    yield 0
