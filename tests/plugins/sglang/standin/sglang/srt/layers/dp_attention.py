# SPDX-License-Identifier: Apache-2.0
"""Tokens of all attention groups in this forward pass."""

from __future__ import annotations

from sglang.srt.runtime_context import STATE


def get_dp_global_num_tokens() -> list[int]:
    """One number for each group; padded as the batch is."""
    counts: list[int] = STATE.counts
    return counts


def is_dp_attention_enabled() -> bool:
    return bool(STATE.dp_attention)
