"""Experts that change their places: which move, and the bytes of their weights over a heap."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Self

import torch

from weft.memory import Group, Heap
from weft.moe.replicas import Replicas
from weft.runtime.stream import finish

STAGING_BYTES = 64 << 20  # symmetric memory of each rank while experts move


class Move(NamedTuple):
    """The weights of one physical expert become those of another, on the same rank or not."""

    source: int
    target: int


def moves(old: Replicas, new: Replicas) -> list[Move]:
    """Where each physical expert that changes gets its weights: on its own rank where one is, else
    from the rank that has least to send so far. Equal on every rank.
    """
    each = len(old.logical) // old.ranks
    held: dict[int, list[int]] = {}
    for p, expert in enumerate(old.logical):
        held.setdefault(expert, []).append(p)
    sends = [0] * old.ranks
    found: list[Move] = []
    for target, expert in enumerate(new.logical):
        if old.logical[target] == expert:
            continue
        here = [p for p in held[expert] if p // each == target // each]
        source = min(here or held[expert], key=lambda p: (sends[p // each], p))
        sends[source // each] += source // each != target // each
        found.append(Move(source, target))
    return found


class Relocation:
    """Fills this rank's `tensors`, each `[local_experts, ...]`, with the experts of `new`.

    A piece of every expert that moves is copied out by its rank before any rank copies one in, so
    any permutation works with STAGING_BYTES of symmetric memory on each rank, which are allocated
    here. Collective. A context manager.
    """

    def __init__(
        self, group: Group, tensors: Sequence[torch.Tensor], old: Replicas, new: Replicas
    ) -> None:
        self._group, self._each, self._moves = group, len(old.logical) // old.ranks, moves(old, new)
        self._rows = [tensor.reshape(self._each, -1).view(torch.uint8) for tensor in tensors]
        # The experts that each rank copies out, in the order of their slots in its staging memory.
        self._sources = [
            sorted({m.source for m in self._moves if m.source // self._each == rank})
            for rank in range(old.ranks)
        ]
        self._heap: Heap | None = None
        if self._moves:
            slots = max(map(len, self._sources))
            widest = max(row.shape[1] for row in self._rows)
            self._piece = max(16, min(widest, STAGING_BYTES // slots) // 16 * 16)
            self._heap = Heap.create(group, slots * self._piece)
            self._staging = [
                self._heap.tensor((slots, self._piece), torch.uint8, rank=rank)
                for rank in range(old.ranks)
            ]

    def run(self) -> None:
        """Move them; waits for the device and for all ranks.

        A failure leaves weights of neither placement. Raises CreationFailed on all ranks.
        """
        for row in self._rows if self._moves else ():
            for begin in range(0, row.shape[1], self._piece):
                part = row[:, begin : begin + self._piece]
                for copy in (self._copy_out, self._copy_in):
                    self._group.together(partial(copy, part), doing="relocating experts")

    def _copy_out(self, part: torch.Tensor) -> None:
        """This rank's piece of every expert that moves, into its staging memory."""
        rank, width = self._group.rank, part.shape[1]
        for slot, source in enumerate(self._sources[rank]):
            self._staging[rank][slot, :width].copy_(part[source % self._each])
        finish(self._group.device)

    def _copy_in(self, part: torch.Tensor) -> None:
        """The piece of every expert that this rank gets, from its source's staging memory."""
        width = part.shape[1]
        for source, target in self._moves:
            if target // self._each == self._group.rank:
                owner = source // self._each
                slot = self._sources[owner].index(source)
                part[target % self._each].copy_(self._staging[owner][slot, :width])
        finish(self._group.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._heap is not None:
            self._heap.close()
