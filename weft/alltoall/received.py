# SPDX-License-Identifier: Apache-2.0
"""Result of a dispatch: views of this rank's inbox."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.keywords import internal


@dataclass(frozen=True, slots=True)
class Received:
    """The tokens that dispatch delivered to this rank, as views of symmetric memory.

    The views are valid until this rank calls combine. The peers' next dispatch may then overwrite
    them, so read them before combine in the stream and copy what you need later.

    Slot `[s, t]` belongs to token t of source rank s (with several hosts, of rank `sources[s]`).
    `rows` is the argument of dispatch, `max_tokens` by default. If all ids of a slot are -1, the
    token was not sent to this rank and its payload holds stale data.

    Attributes:
        payloads: Tensors `[ep_size, rows, *row]` in the dtype of the payload, contiguous if a row
            is a multiple of 16 bytes.
        ids: int32 `[ep_size, rows, top_k]`, local expert ids; -1 if another rank owns the expert.
        weights: float32 `[ep_size, rows, top_k]`, undefined (not 0) where the id is -1.
        counts: int32 `[ep_size]`, tokens of each source. Later slots of a source have ids of -1.
        stats: int32 `[ep_size, stats]`, the `stats` of each rank, or None.
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

    @internal
    def slice_rows(self, rows: int) -> Received:
        """Return views of the same memory with `rows` slots for each source."""
        return Received(
            tuple(slice_rows(plane, rows) for plane in self.payloads),
            slice_rows(self.ids, rows),
            slice_rows(self.weights, rows),
            self.counts,
            self.stats,
        )

    @internal
    def split_by_source_rank(self, hosts: int) -> Received:
        """Return views by source rank, where each local rank forwards the rows of `hosts` ranks."""
        assert self.stats is not None
        rows = self.stats.view(hosts * len(self.stats), -1)  # token count, then statistics
        return Received(
            tuple(split_hosts(plane, hosts) for plane in self.payloads),
            split_hosts(self.ids, hosts),
            split_hosts(self.weights, hosts),
            rows[:, 0],
            rows[:, 1:] if rows.shape[1] > 1 else None,
        )


def split_hosts(view: torch.Tensor, hosts: int) -> torch.Tensor:
    """Return a view of `[ranks, hosts * rows, ...]` as `[ranks * hosts, rows, ...]`."""
    ranks, rows, *row = view.shape
    return view.view(ranks * hosts, rows // hosts, *row)


def slice_rows(view: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a view of the start of `[ep_size, max_tokens, ...]` as `[ep_size, rows, ...]`."""
    ranks = view.shape[0]
    return view.flatten(0, 1)[: ranks * rows].view(ranks, rows, *view.shape[2:])
