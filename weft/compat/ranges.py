# SPDX-License-Identifier: Apache-2.0
"""Conversion of an expert's row ranges and sources to the format of other projects."""

from __future__ import annotations

import torch

from weft.lowlatency.results import ExpertRows


def pack_ranges(rows: ExpertRows) -> torch.Tensor:
    """Return int64 `[local_experts, ep_size]`: first row << 32 | number of rows."""
    first, count = rows.ranges.unbind(-1)
    return first.long() << 32 | count.long()


def compute_token_indices(rows: ExpertRows, max_tokens: int) -> torch.Tensor:
    """Return int32 `[local_experts, R]`: each row's token at its source."""
    return rows.source % max_tokens
