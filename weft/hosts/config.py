# SPDX-License-Identifier: Apache-2.0
"""Sizes of an operator's exchange between hosts, and the numbering of a host's experts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from weft.fields import values_by_argument
from weft.group.wire import JSON
from weft.placement import Placement
from weft.runtime.identity import CALL_WORDS


@dataclass(frozen=True, slots=True)
class HostSpan:
    """An operator's part on one of several hosts.

    Attributes:
        ranks: Ranks of each host (`Group.host_ranks`).
        host: Index of this host.
        max_tokens: Maximum number of tokens of one rank in one call.
        top_k: Experts per token.
        hidden: Columns of a sum.
        dtype: Dtype of sums.
        row_bytes: Bytes of a row of each payload between hosts.
        stats: Number of statistics of each rank.
        quantize: Quantisation of the first payload before it leaves its host.
        returns_fp8: Whether sums are sent as FP8.
        placement: Placement of all experts on all ranks.
        num_results: Number of dispatches whose received ids and weights are kept for combine.
        drops_repeats: Whether repeated ids of a row are dropped.
    """

    ranks: tuple[tuple[int, ...], ...]
    host: int
    max_tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    row_bytes: tuple[int, ...]
    stats: int
    quantize: str | None
    returns_fp8: bool
    placement: Placement
    num_results: int = 1
    drops_repeats: bool = False

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.ranks)

    @property
    def experts(self) -> tuple[int, ...]:
        """Global ids of this host's experts, in the order of their local ids."""
        local_ranks = set(self.ranks[self.host])
        return tuple(e for e, rank in enumerate(self.placement.ranks) if rank in local_ranks)

    @property
    def local_ids(self) -> tuple[int, ...]:
        """Local id of each expert on this host; -1 for experts of other hosts."""
        local_ids = {expert: local_id for local_id, expert in enumerate(self.experts)}
        return tuple(local_ids.get(expert, -1) for expert in range(len(self.placement.ranks)))

    @property
    def local_placement(self) -> Placement:
        """Placement of this host's experts on its ranks; see `build_host_placement`."""
        return build_host_placement(self.placement, self.ranks[self.host])

    def count_meta_words(self, rows: int) -> int:
        """Return the number of 32-bit words of metadata for `rows` rows."""
        return CALL_WORDS + 1 + self.stats + 2 * rows * self.top_k

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory of one rank's exchange with other hosts."""
        out = sum(self.row_bytes) + 8 * (1 + self.num_results) * self.top_k
        row = self.hosts * (out + 2 * self.hidden * self.dtype.itemsize) + 4 * self.hidden
        return self.max_tokens * row


class HostsConfig:
    """Base class of the configs of operators that may span several hosts.

    Attributes:
        shape: Sizes of the part on this host, with the tokens of all hosts.
        offsets: Offsets of its share.
        placement: Placement of all experts on all ranks.
        max_tokens: Maximum number of tokens of one rank in one call.
        span: This host's part, if there are several hosts.
    """

    __slots__ = ()
    shape: Any
    offsets: Any
    placement: Placement
    max_tokens: int
    span: HostSpan | None

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return 1 if self.span is None else self.span.hosts

    @property
    def host_bytes(self) -> int:
        """Bytes of local memory of one rank's exchange with other hosts."""
        return 0 if self.span is None else self.span.local_bytes

    @property
    def local_placement(self) -> Placement:
        """Placement of this host's experts on its ranks."""
        return self.placement if self.span is None else self.span.local_placement

    @property
    def share_bytes(self) -> int:
        """Bytes of a rank's share."""
        return int(self.offsets.share_bytes)

    @property
    def descriptor(self) -> int:
        """24 bits of the hash of the shape."""
        return int(self.shape.descriptor)

    def manifest(self) -> dict[str, JSON]:
        """Return the arguments that the ranks compare at creation, by name."""
        values = {**values_by_argument(self.shape), "expert_map": list(self.placement.ranks)}
        if self.span is not None:  # sizes of one host's part may differ between hosts
            values.pop("local", None)
            values |= {
                "ranks": self.shape.ranks * self.hosts,
                "max_tokens": self.max_tokens,
                "num_experts": len(self.placement.ranks),
                "mapped": self.placement.explicit,
            }
        return values


@functools.cache
def build_host_placement(placement: Placement, ranks: tuple[int, ...]) -> Placement:
    """Return the placement of the experts of `ranks`, renumbered in ascending order of their ids.

    The result's ranks are indices in `ranks`. A host without experts gets one that is never used.
    """
    owners = [ranks.index(rank) for rank in placement.ranks if rank in ranks] or [0]
    placement = Placement.mapped(owners, len(owners), len(ranks))
    blocks = Placement.blocks(len(owners), len(ranks))
    return blocks if placement.ranks == blocks.ranks else placement
