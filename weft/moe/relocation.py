"""Experts that change their places: which move, and the bytes of their weights over a heap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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


def relocate(
    group: Group, tensors: Sequence[torch.Tensor], old: Replicas, new: Replicas
) -> list[Move]:
    """Fill this rank's `tensors`, each `[local_experts, ...]`, with the experts of `new`.

    A piece of every expert that moves is copied out by its rank before any rank copies one in, so
    any permutation is served with STAGING_BYTES of symmetric memory. Collective, and it waits for
    the device and for all ranks. A rank that fails on its way leaves weights that are neither.
    """
    found = moves(old, new)
    if not found:
        return found
    rank, each = group.rank, len(old.logical) // old.ranks
    # The experts that each rank copies out, in the order of their slots in its staging memory.
    sources = [sorted({m.source for m in found if m.source // each == r}) for r in range(old.ranks)]
    slots = max(map(len, sources))
    rows = [tensor.reshape(each, -1).view(torch.uint8) for tensor in tensors]
    widest = max(row.shape[1] for row in rows)
    piece = max(16, min(widest, STAGING_BYTES // slots) // 16 * 16)
    with Heap.create(group, slots * piece) as heap:
        staging = [heap.tensor((slots, piece), torch.uint8, rank=r) for r in range(old.ranks)]
        for row in rows:
            for begin in range(0, row.shape[1], piece):
                part = row[:, begin : begin + piece]
                width = part.shape[1]
                for slot, source in enumerate(sources[rank]):
                    staging[rank][slot, :width].copy_(part[source % each])
                _meet(group)
                for source, target in found:
                    if target // each == rank:
                        owner = source // each
                        slot = sources[owner].index(source)
                        part[target % each].copy_(staging[owner][slot, :width])
                _meet(group)
    return found


def _meet(group: Group) -> None:
    """All ranks' copies have been made."""
    finish(group.device)
    group.barrier()
