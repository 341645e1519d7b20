"""What a dispatch brought: views of this rank's inbox."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Received:
    """What dispatch brought to this rank: views into symmetric memory, valid until its combine.

    After combine the peers' next dispatch may overwrite this inbox: what reads these views must
    come before combine in the stream, and what is needed later must be copied.

    Slot `[s, t]` belongs to token t of source rank s, always (with several hosts, of rank
    `sources[s]` of the all-to-all); `rows` are the dispatch's, by default
    max_tokens. Where all ids of a slot are -1 the token was not for this rank: its payload is
    what was there before, and must not be read.

    payloads: each `[ep_size, rows, *row]` in the dtype that was sent; contiguous where a row is a
        multiple of 16 bytes.
    ids: int32 `[ep_size, rows, top_k]`, LOCAL expert ids; -1 where another rank has the expert.
    weights: float32 `[ep_size, rows, top_k]`, meaningless (not 0) where the id is -1.
    counts: int32 `[ep_size]`, tokens that each source brought; rows at and above it have ids -1.
    stats: int32 `[ep_size, stats]`, what each rank passed as `stats`; None without statistics.
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
