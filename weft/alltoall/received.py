# SPDX-License-Identifier: Apache-2.0
"""What a dispatch brought: views of this rank's inbox."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Received:
    """Hold what dispatch brought to this rank, as views of symmetric memory.

    The views are valid until this rank calls combine. The peers' next dispatch may then overwrite
    them, so read them before combine in the stream and copy what you need later.

    Slot `[s, t]` belongs to token t of source rank s (with several hosts, of rank `sources[s]`).
    `rows` is what the dispatch was called with, `max_tokens` by default. If all ids of a slot are
    -1, the token was not sent here and its payload holds old data.

    Attributes:
        payloads: Tensors `[ep_size, rows, *row]` in the dtype that was sent, contiguous if a row is
            a multiple of 16 bytes.
        ids: int32 `[ep_size, rows, top_k]`, local expert ids; -1 if another rank owns the expert.
        weights: float32 `[ep_size, rows, top_k]`, undefined (not 0) where the id is -1.
        counts: int32 `[ep_size]`, tokens of each source. Slots from there on have ids of -1.
        stats: int32 `[ep_size, stats]`, what each rank passed as `stats`, or None.
    """

    payloads: tuple[torch.Tensor, ...]
    ids: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    stats: torch.Tensor | None = None

    @property
    def x(self) -> torch.Tensor:
        """The first payload."""
        return self.payloads[0]

    def _with_rows(self, rows: int) -> Received:
        """The same memory as a dispatch with so many rows for each source lays it out."""
        return Received(
            tuple(with_rows(plane, rows) for plane in self.payloads),
            with_rows(self.ids, rows),
            with_rows(self.weights, rows),
            self.counts,
            self.stats,
        )

    def _by_host(self, hosts: int) -> Received:
        """What came to the ranks of one host, each of which forwards the rows of `hosts` ranks."""
        assert self.stats is not None
        told = self.stats.view(hosts * len(self.stats), -1)  # a number of tokens, then statistics
        return Received(
            tuple(by_host(plane, hosts) for plane in self.payloads),
            by_host(self.ids, hosts),
            by_host(self.weights, hosts),
            told[:, 0],
            told[:, 1:] if told.shape[1] > 1 else None,
        )


def by_host(view: torch.Tensor, hosts: int) -> torch.Tensor:
    """`[ranks, hosts * rows, ...]` seen as `[ranks * hosts, rows, ...]`."""
    ranks, rows, *row = view.shape
    return view.view(ranks * hosts, rows // hosts, *row)


def with_rows(view: torch.Tensor, rows: int) -> torch.Tensor:
    """`[ep_size, max_tokens, ...]` seen as `[ep_size, rows, ...]`, source after source, no copy."""
    ranks = view.shape[0]
    return view.flatten(0, 1)[: ranks * rows].view(ranks, rows, *view.shape[2:])
