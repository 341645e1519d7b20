# SPDX-License-Identifier: Apache-2.0
"""Baseline of the all-to-all that uses collectives of torch.distributed.

Dispatch is an all-gather, and combine a reduce-scatter. Every rank receives every token, so the
collectives transfer ep_size / destinations times the bytes of a one-sided exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.alltoall.config import Payload
from weft.alltoall.received import Received
from weft.group import Group
from weft.group.torch_groups import all_gather
from weft.placement import Placement

# torch 2.13 renamed reduce_scatter_tensor and deprecated the old name.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveAllToAll:
    """All-to-all by all-gather and reduce-scatter; every rank must pass max_tokens tokens."""

    def __init__(
        self,
        group: Group,
        *,
        max_tokens: int,
        top_k: int,
        num_experts: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        payloads: Sequence[Payload] | None = None,
    ) -> None:
        self._process_group, self._rank = group.process_group(), group.rank
        self._payloads = payloads or [Payload((hidden,), dtype)]
        ranks, device = group.size, group.device
        self._slots = (ranks, max_tokens)
        placement = Placement.blocks(num_experts, ranks)
        # The last entry is for id -1, which no rank owns.
        self._owner = torch.tensor((*placement.ranks, -1), device=device)
        self._local = torch.tensor((*placement.local, -1), dtype=torch.int32, device=device)
        self._planes = [
            torch.empty((ranks * max_tokens, p.row_bytes), dtype=torch.uint8, device=device)
            for p in self._payloads
        ]
        size = (ranks * max_tokens, top_k)
        self._ids = torch.empty(size, dtype=torch.int64, device=device)
        self._weights = torch.empty(size, dtype=torch.float32, device=device)
        self._counts = torch.full((ranks,), max_tokens, dtype=torch.int32, device=device)
        self._output = torch.zeros((*self._slots, hidden), dtype=dtype, device=device)
        self._reduced = torch.empty((max_tokens, hidden), dtype=torch.float32, device=device)

    def dispatch(
        self, x: Sequence[torch.Tensor], topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Received:
        """Gather the tokens of all ranks; same interface as `weft.AllToAll.dispatch`."""
        for plane, tensor, payload in zip(self._planes, x, self._payloads, strict=True):
            rows = tensor.reshape(len(tensor), math.prod(payload.shape)).view(torch.uint8)
            all_gather(plane, rows.contiguous(), group=self._process_group)
        all_gather(self._ids, topk_ids.long(), group=self._process_group)
        all_gather(self._weights, topk_weights, group=self._process_group)
        is_local = self._owner[self._ids] == self._rank
        ids = torch.where(is_local, self._local[self._ids], -1).view(*self._slots, -1)
        planes = tuple(
            plane.view(p.dtype).view(*self._slots, *p.shape)
            for plane, p in zip(self._planes, self._payloads, strict=True)
        )
        self._has_expert = (ids >= 0).any(dim=2, keepdim=True)
        return Received(planes, ids, self._weights.view(ids.shape), self._counts)

    def output(self) -> torch.Tensor:
        """Return the buffer for the rows that experts return."""
        return self._output

    def combine(self) -> torch.Tensor:
        """Return the sum of each token's rows, added in the order of the collective."""
        rows = torch.where(self._has_expert, self._output.float(), 0.0)
        reduce_scatter(self._reduced, rows.flatten(0, 1), group=self._process_group)
        return self._reduced.to(self._output.dtype)
