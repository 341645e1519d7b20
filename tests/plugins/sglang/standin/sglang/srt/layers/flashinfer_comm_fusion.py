# SPDX-License-Identifier: Apache-2.0
"""Memory of FlashInfer's fused all-reduces."""

from __future__ import annotations

import torch

from sglang.srt.runtime_context import STATE


def pre_initialize_workspaces(
    max_token_num: int, hidden_dim: int, dtype: torch.dtype, use_oneshot: bool | None = None
) -> None:
    STATE.workspaces += 1
