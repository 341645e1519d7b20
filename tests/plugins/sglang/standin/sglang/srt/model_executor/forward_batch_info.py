# SPDX-License-Identifier: Apache-2.0
"""What a forward pass knows of its batch."""

from __future__ import annotations

from sglang.srt.runtime_context import get_parallel


def enable_num_token_non_padded() -> bool:
    return bool(get_parallel().moe_ep_size > 1)
