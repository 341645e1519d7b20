# SPDX-License-Identifier: Apache-2.0
"""Relocation of expert weights from one placement of replicas to another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Self

import torch

from weft.group import Group
from weft.heap import Heap
from weft.moe.replicas.placement import Replicas
from weft.runtime.stream import synchronize_stream

STAGING_BYTES = 64 << 20  # symmetric memory per rank during a relocation


class Move(NamedTuple):
    """A copy of weights between two physical experts, on one rank or across ranks."""

    source: int
    target: int


def plan_moves(old: Replicas, new: Replicas, living: int | None = None) -> list[Move]:
    """Return a move for each physical expert that changes. Equal on every rank.

    The source is on the same rank if possible, else on the rank with the fewest sends so far.

    Args:
        living: Mask of the ranks that send and receive, as in `Replicas.physical_on`. Default:
            all ranks. Every expert that they receive must have a replica on one of them.
    """
    per_rank = len(old.logical) // old.ranks
    living = (1 << old.ranks) - 1 if living is None else living
    replicas = old.physical_on(living)
    sends = [0] * old.ranks
    result: list[Move] = []
    for target, expert in enumerate(new.logical):
        target_rank = target // per_rank
        if old.logical[target] == expert or not living >> target_rank & 1:
            continue
        local = [p for p in replicas[expert] if p // per_rank == target_rank]
        source = min(local or replicas[expert], key=lambda p: (sends[p // per_rank], p))
        sends[source // per_rank] += source // per_rank != target_rank
        result.append(Move(source, target))
    return result


class Relocation:
    """Move weights between ranks from one placement to another. Collective; a context manager.

    Weights move in chunks: each rank copies out a chunk of every moving expert before any rank
    copies one in. Any permutation therefore works with STAGING_BYTES of symmetric memory per rank,
    which the constructor allocates.

    Args:
        tensors: This rank's weights, each `[local_experts, ...]`, overwritten in place.
        old: Current placement of the weights.
        new: Target placement.
        living: Mask of the living ranks.
    """

    def __init__(
        self,
        group: Group,
        tensors: Sequence[torch.Tensor],
        old: Replicas,
        new: Replicas,
        living: int,
    ) -> None:
        self._group, self._per_rank = group, len(old.logical) // old.ranks
        self._moves = plan_moves(old, new, living)
        self._rows = [tensor.reshape(self._per_rank, -1).view(torch.uint8) for tensor in tensors]
        # The experts that each rank copies out, in the order of its staging memory.
        self._sources = [
            sorted({m.source for m in self._moves if m.source // self._per_rank == rank})
            for rank in range(old.ranks)
        ]
        self._heap: Heap | None = None
        if self._moves:
            experts = max(map(len, self._sources))
            row_bytes = max(row.shape[1] for row in self._rows)
            self._chunk_bytes = max(16, min(row_bytes, STAGING_BYTES // experts) // 16 * 16)
            self._heap = Heap.create(group, experts * self._chunk_bytes)
            self._staging = {
                rank: self._heap.tensor((experts, self._chunk_bytes), torch.uint8, rank=rank)
                for rank in group.living
            }

    def run(self) -> None:
        """Move the weights; waits for the device and for all ranks.

        After a failure the weights belong to neither placement.

        Raises:
            CreationFailed: a rank failed. Every rank raises it.
        """
        for row in self._rows if self._moves else ():
            for start in range(0, row.shape[1], self._chunk_bytes):
                chunk = row[:, start : start + self._chunk_bytes]
                for copy in (self._copy_out, self._copy_in):
                    self._group.run_collective(partial(copy, chunk), action="relocating experts")

    def _copy_out(self, chunk: torch.Tensor) -> None:
        """Copy the chunks of all experts that this rank sends to its staging memory."""
        rank, width = self._group.rank, chunk.shape[1]
        for index, source in enumerate(self._sources[rank]):
            self._staging[rank][index, :width].copy_(chunk[source % self._per_rank])
        synchronize_stream(self._group.device)

    def _copy_in(self, chunk: torch.Tensor) -> None:
        """Copy the chunks of all experts that this rank receives from their owners' memory."""
        width = chunk.shape[1]
        for source, target in self._moves:
            if target // self._per_rank == self._group.rank:
                owner = source // self._per_rank
                index = self._sources[owner].index(source)
                chunk[target % self._per_rank].copy_(self._staging[owner][index, :width])
        synchronize_stream(self._group.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._heap is not None:
            self._heap.close()
