# SPDX-License-Identifier: Apache-2.0
"""What a layer asks before it leaves its sum to the next norm."""

from __future__ import annotations

from sglang.srt.runtime_context import STATE

FUSE_ALLREDUCE_MAX_BATCH_SIZE = 16  # 2048 in SGLang


def apply_flashinfer_allreduce_fusion(batch_size: int) -> bool:
    return STATE.flashinfer and 0 < batch_size <= FUSE_ALLREDUCE_MAX_BATCH_SIZE
