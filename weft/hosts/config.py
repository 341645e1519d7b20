# SPDX-License-Identifier: Apache-2.0
"""What crosses between hosts for one operator, and how a host numbers the experts that it holds."""

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
class Span:
    """An operator's part on one of several hosts.

    ranks: of each host (`Group.host_ranks`).   host: this one.
    max_tokens: of one rank in one call.   row_bytes: of each payload as it travels.
    quantize: what the first payload becomes before it travels.   returns_fp8: sums travel as FP8.
    placement: of all experts on all ranks.
    num_results: whose ids and weights are kept.   drops_repeats: of the ids of a row.
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
        """How many there are."""
        return len(self.ranks)

    @property
    def experts(self) -> tuple[int, ...]:
        """Global ids of this host's experts, in the order in which it numbers them."""
        mine = set(self.ranks[self.host])
        return tuple(e for e, rank in enumerate(self.placement.ranks) if rank in mine)

    @property
    def local_ids(self) -> tuple[int, ...]:
        """For each expert its number on this host, -1 on others."""
        numbers = {expert: number for number, expert in enumerate(self.experts)}
        return tuple(numbers.get(expert, -1) for expert in range(len(self.placement.ranks)))

    @property
    def local_placement(self) -> Placement:
        """This host's experts on its ranks; without any, one that no id names."""
        return host_placement(self.placement, self.ranks[self.host])

    def meta_words(self, rows: int) -> int:
        """32-bit words that go with `rows` rows: call, their number, statistics, ids, weights."""
        return CALL_WORDS + 1 + self.stats + 2 * rows * self.top_k

    @property
    def bytes(self) -> int:
        """Bytes of ordinary memory that the exchange of one rank takes."""
        out = sum(self.row_bytes) + 8 * (1 + self.num_results) * self.top_k
        row = self.hosts * (out + 2 * self.hidden * self.dtype.itemsize) + 4 * self.hidden
        return self.max_tokens * row

    def rail_bytes(self, rows: int) -> tuple[int, int]:
        """Bytes that a rank sends to each other host, out and home, in a call with `rows` rows."""
        item = self.dtype.itemsize
        home = self.hidden + self.hidden // 128 * 4 if self.returns_fp8 else self.hidden * item
        return rows * sum(self.row_bytes) + 4 * self.meta_words(rows), rows * home


class HostsConfig:
    """What the config of an operator says where its group has several hosts: its part on one.

    shape: of that part, with the tokens of all hosts.   offsets: of its share.
    placement: of all experts on all ranks.
    """

    __slots__ = ()
    shape: Any
    offsets: Any
    placement: Placement
    max_tokens: int
    span: Span | None

    @property
    def hosts(self) -> int:
        """Hosts that the ranks are on."""
        return 1 if self.span is None else self.span.hosts

    @property
    def host_bytes(self) -> int:
        """Bytes of ordinary memory for the exchange of one rank with other hosts."""
        return 0 if self.span is None else self.span.bytes

    @property
    def local_placement(self) -> Placement:
        """The experts of this host, on its ranks."""
        return self.placement if self.span is None else self.span.local_placement

    @property
    def share_bytes(self) -> int:
        """Bytes of one rank's share."""
        return int(self.offsets.share_bytes)

    @property
    def descriptor(self) -> int:
        """24 bits of the shape's hash."""
        return int(self.shape.descriptor)

    def manifest(self) -> dict[str, JSON]:
        """What the ranks compare at creation, name by name."""
        values = {**values_by_argument(self.shape), "expert_map": list(self.placement.ranks)}
        if self.span is not None:  # not the sizes of one host, which differ from host to host
            values.pop("local", None)
            values |= {
                "ranks": self.shape.ranks * self.hosts,
                "max_tokens": self.max_tokens,
                "num_experts": len(self.placement.ranks),
                "mapped": self.placement.explicit,
            }
        return values


@functools.cache
def host_placement(placement: Placement, ranks: tuple[int, ...]) -> Placement:
    """The experts of some ranks, numbered in ascending order, on places in `ranks`."""
    owners = [ranks.index(rank) for rank in placement.ranks if rank in ranks] or [0]
    placement = Placement.mapped(owners, len(owners), len(ranks))
    blocks = Placement.blocks(len(owners), len(ranks))
    return blocks if placement.ranks == blocks.ranks else placement
