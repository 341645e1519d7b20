# SPDX-License-Identifier: Apache-2.0
"""Memory of a rail: buffers for `max_tokens` rows of each host, and their views for fewer rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.hosts.config import HostSpan
from weft.runtime.identity import CALL_WORDS

CPU_ROWS = 64  # rows that are summed at once on a CPU
MAX_VIEWS = 256  # cached views, by number of rows: one for each batch size of an engine


@dataclass(frozen=True, slots=True)
class ReceivedRows:
    """Rows that a rail received, which this rank dispatches within its host.

    There are `rows` slots for each host, in the order of hosts.

    Attributes:
        planes: uint8 `[hosts * rows, row_bytes]` of each payload.
        ids: int32 `[hosts * rows, top_k]`, expert ids on this host.
        weights: float32 `[hosts * rows, top_k]`.
        stats: int32 `[hosts * (1 + stats)]`: the number of tokens of each host, then its
            statistics.
    """

    planes: tuple[torch.Tensor, ...]
    ids: torch.Tensor
    weights: torch.Tensor
    stats: torch.Tensor


@dataclass(frozen=True, slots=True)
class RailViews:
    """Views of the buffers for one number of rows of each host.

    Attributes:
        planes: `[hosts, bytes]` of each payload.
        messages: The planes and the metadata, as pairs of tensors to send and to receive into.
        calls: int32 `[hosts, CALL_WORDS]`: the call that each host makes.
        counts: int32 `[hosts, 1 + stats]`: the number of tokens of each host, then its statistics.
        ids: int32 `[hosts, rows, top_k]`, global expert ids.
        weights: float32 `[hosts, rows, top_k]`.
        received: Results of `Rail.receive`, by result index.
        sums: `[hosts * rows, hidden]`: this host's sums of every host's rows.
        returned: `[hosts * rows, hidden]`: every host's sums of this rank's rows.
    """

    planes: tuple[torch.Tensor, ...]
    messages: list[tuple[torch.Tensor, torch.Tensor]]
    calls: torch.Tensor
    counts: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    received: tuple[ReceivedRows, ...]
    sums: torch.Tensor
    returned: torch.Tensor


class RailBuffers:
    """The buffers of one rail; `HostSpan.local_bytes` is their size.

    Attributes:
        total: float32 `[rows, hidden]`, the accumulator of `rows` sums at once.
        row_index: int32 `[max_tokens]`, 0, 1, 2, ...
    """

    def __init__(self, span: HostSpan, device: torch.device) -> None:
        self._span = span
        rows = span.hosts * span.max_tokens

        def zeros(*size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._planes = tuple(zeros(rows * size) for size in span.row_bytes)
        self._meta = zeros(span.hosts * span.count_meta_words(span.max_tokens), dtype=torch.int32)
        self._ids = zeros(span.num_results, rows, span.top_k, dtype=torch.int32)
        self._weights = zeros(span.num_results, rows, span.top_k, dtype=torch.float32)
        self._stats = zeros(span.hosts * (1 + span.stats), dtype=torch.int32)
        self._sums = zeros(rows, span.hidden, dtype=span.dtype)
        self._returned = zeros(rows, span.hidden, dtype=span.dtype)
        # On a CPU the accumulator stays in the cache, and no call touches new pages: 512 tokens of
        # 3 hosts took 28 ms without it, 5 ms with it (2-core CI machine, 2026-11-25).
        step = min(span.max_tokens, CPU_ROWS) if device.type == "cpu" else span.max_tokens
        self.total = zeros(step, span.hidden, dtype=torch.float32)
        self.row_index = torch.arange(span.max_tokens, dtype=torch.int32, device=device)
        self._views: dict[int, RailViews] = {}

    def get_views(self, rows: int) -> RailViews:
        """Return the views for `rows` rows of each host."""
        views = self._views.get(rows)
        if views is None:
            if len(self._views) == MAX_VIEWS:
                self._views.clear()
            views = self._views[rows] = self._make_views(rows)
        return views

    def close(self) -> None:
        """Free the memory."""
        self._views.clear()
        del self._planes, self._meta, self._sums, self._returned, self.total

    def _make_views(self, rows: int) -> RailViews:
        span, hosts = self._span, self._span.hosts
        planes = tuple(
            plane[: hosts * rows * size].view(hosts, rows * size)
            for plane, size in zip(self._planes, span.row_bytes, strict=True)
        )
        meta = self._meta[: hosts * span.count_meta_words(rows)].view(hosts, -1)
        sizes = [CALL_WORDS, 1 + span.stats, rows * span.top_k, rows * span.top_k]
        calls, counts, ids, weights = torch.split(meta, sizes, dim=1)
        total = hosts * rows
        payloads = tuple(p.view(total, n) for p, n in zip(planes, span.row_bytes, strict=True))
        received = tuple(
            ReceivedRows(payloads, ids[:total], weights[:total], self._stats)
            for ids, weights in zip(self._ids, self._weights, strict=True)
        )
        return RailViews(
            planes=planes,
            messages=[(part, part) for part in (*planes, view_as_bytes(meta))],
            calls=calls,
            counts=counts,
            ids=ids.view(hosts, rows, span.top_k),
            weights=weights.view(torch.float32).view(hosts, rows, span.top_k),
            received=received,
            sums=self._sums[:total],
            returned=self._returned[:total],
        )


def view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous `[hosts, ...]` as uint8 `[hosts, bytes]`."""
    return tensor.view(len(tensor), -1).view(torch.uint8)
