# SPDX-License-Identifier: Apache-2.0
"""What a forward pass knows of other ranks, and of padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class DPMetadata:
    local_sizes: list[int] | None = None

    def get_chunk_sizes_across_dp_rank(self) -> list[int] | None:
        return self.local_sizes


@dataclass
class ForwardContext:
    dp_metadata: DPMetadata | None = None
    is_padding: torch.Tensor | None = None


_context: ForwardContext | None = None


def get_forward_context() -> ForwardContext:
    assert _context is not None
    return _context


@contextmanager
def forward(sizes: list[int] | None, padding: torch.Tensor | None) -> Iterator[None]:
    """A forward pass of the tests."""
    global _context
    _context = ForwardContext(None if sizes is None else DPMetadata(sizes), padding)
    try:
        yield
    finally:
        _context = None
