# SPDX-License-Identifier: Apache-2.0
"""EPLB, expert-parallel load balancing: which experts get replicas, where, and how they move."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import torch

from weft.arguments import adopt, instance, integer, integers, real, refuse
from weft.errors import InvalidArgument
from weft.fields import largest
from weft.group import Group
from weft.heap import Heap
from weft.runtime.stream import synchronize_stream
from weft.shape import MAX_RANKS, Shape

EXPERTS = largest(Shape, "experts")
STAGING_BYTES = 64 << 20  # symmetric memory of each rank while experts move
MIN_GAIN_OF_SWAP = 1e-4  # of a rank's load: below it, swaps take longer than they are good for


class ReplicaTable(NamedTuple):
    """Tensors that map logical experts to physical ones.

    Attributes:
        counts: int32 `[num_experts]`, how many replicas each expert has.
        physical: int32 `[num_experts, max_replicas]`, which they are, rising; -1 beyond counts.
    """

    counts: torch.Tensor
    physical: torch.Tensor


@dataclass(frozen=True, slots=True)
class Replicas:
    """A placement: the logical expert of each physical expert.

    Attributes:
        logical: The logical expert of each physical one; each of 0..num_experts - 1 is there at
            least once.
        ranks: Each has equally many: physical expert p on rank `p // (len(logical) / ranks)`, as in
            `Placement.blocks(len(logical), ranks)`.

    Raises:
        InvalidArgument: the placement is invalid.
    """

    logical: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        """Refuse what is no placement."""
        logical = integers("logical", self.logical, 0, EXPERTS - 1)
        ranks = integer("ranks", self.ranks, 1, MAX_RANKS)
        if not logical or len(logical) % ranks:
            raise InvalidArgument(
                f"logical has {len(logical)} entries for {ranks} ranks; each rank has equally many"
            )
        if absent := sorted(set(range(max(logical) + 1)).difference(logical)):
            raise InvalidArgument(
                f"logical leaves out expert {absent[0]} of 0..{max(logical)}; each has a place"
            )
        adopt(self, logical=logical, ranks=ranks)

    @property
    def num_experts(self) -> int:
        """Number of logical experts."""
        return max(self.logical) + 1

    def physical_of(self, expert: int) -> tuple[int, ...]:
        """Return the physical experts of a logical one, ascending.

        Raises:
            InvalidArgument: the argument is invalid.
        """
        expert = integer("expert", expert, 0, self.num_experts - 1)
        return tuple(p for p, held in enumerate(self.logical) if held == expert)

    def local(self, rank: int) -> tuple[int, ...]:
        """Return the logical expert of each of a rank's physical experts, in order.

        Raises:
            InvalidArgument: there is no such rank.
        """
        rank, each = integer("rank", rank, 0, self.ranks - 1), self._each
        return self.logical[rank * each : (rank + 1) * each]

    def imbalance(self, loads: Sequence[float] | torch.Tensor) -> float:
        """Return the largest load of a rank divided by the mean; replicas share a load equally.

        Args:
            loads: `[num_experts]`, as in `balance`. 1.0 is perfect; so is no load at all.
        """
        known = _loads(loads)
        if len(known) != self.num_experts:
            raise InvalidArgument(
                f"loads has {len(known)} entries; these are replicas of {self.num_experts} experts"
            )
        count = [len(found) for found in self.on()]
        by_rank = [
            math.fsum(known[expert] / count[expert] for expert in self.local(rank))
            for rank in range(self.ranks)
        ]
        mean = math.fsum(by_rank) / self.ranks
        return max(by_rank) / mean if mean else 1.0

    def on(self, living: int | None = None) -> list[list[int]]:
        """Return the replicas of each logical expert on some ranks, ascending.

        Args:
            living: Mask with bit r for rank r. Default: all ranks.

        Raises:
            InvalidArgument: the mask is invalid.
        """
        every, each = (1 << self.ranks) - 1, self._each
        living = every if living is None else integer("living", living, 1, every)
        physical: list[list[int]] = [[] for _ in range(self.num_experts)]
        for p, expert in enumerate(self.logical):
            if living >> p // each & 1:
                physical[expert].append(p)
        return physical

    def table(self, device: torch.device, *, living: int | None = None) -> ReplicaTable:
        """Return the number of replicas of each expert, and which, as tensors.

        Args:
            device: Device of the tensors.
            living: As in `on`. An expert without a replica there gets -1, so that its ids are
                dropped.
        """
        instance("device", device, torch.device)
        physical = [found or [-1] for found in self.on(living)]
        count = [len(found) for found in physical]
        most = max(count)
        padded = [found + [-1] * (most - len(found)) for found in physical]
        return ReplicaTable(
            torch.tensor(count, dtype=torch.int32, device=device),
            torch.tensor(padded, dtype=torch.int32, device=device),
        )

    @property
    def _each(self) -> int:
        """Physical experts of a rank."""
        return len(self.logical) // self.ranks


def balance(loads: Sequence[float] | torch.Tensor, ranks: int, replicas: int = 0) -> Replicas:
    """Place one layer's experts and their replicas so that ranks are equally loaded (EPLB).

    Replicas go one by one to the expert with the most load per replica, which minimises the largest
    such load. Then the replicas, the most loaded first, go to the least loaded rank with a free
    place that has none of that expert, and swaps between the most loaded rank and another end the
    search. Equal loads give equal placements on every rank.

    DeepSeek's EPLB (github.com/deepseek-ai/EPLB) has the first two steps. It goes by groups and
    nodes too, which one NVLink domain has no use for; here an expert has one replica on a rank at
    most, since a second one would take no load off the rank, and the last step is ours. The current
    placement does not count.

    Args:
        loads: `[num_experts]`, how much each expert has to do, such as its tokens on all ranks
            together (`weft.reference.expert_load`, summed over ranks); finite and 0 or more.
        ranks: Number of ranks.
        replicas: Physical experts beyond one for each logical one, at most `num_experts * (ranks -
            1)`; with the experts a multiple of ranks.

    Raises:
        InvalidArgument: an argument is invalid.
    """
    known = _loads(loads)
    ranks = integer("ranks", ranks, 1, MAX_RANKS)
    replicas = integer("replicas", replicas, 0, EXPERTS)
    physical = len(known) + replicas
    if replicas > len(known) * (ranks - 1):
        raise InvalidArgument(
            f"replicas is {replicas} for {len(known)} experts on {ranks} ranks; with "
            f"{len(known) * (ranks - 1)} each rank has every expert"
        )
    if physical % ranks:
        raise InvalidArgument(
            f"replicas is {replicas}: {physical} physical experts for {ranks} ranks, which hold "
            f"equally many; use {replicas + -physical % ranks}"
        )
    count = _replicate(known, ranks, replicas)
    share = [load / n for load, n in zip(known, count, strict=True)]
    held = _pack(share, count, ranks)
    _swap(share, held)
    return Replicas(tuple(expert for rank in held for expert in sorted(rank)), ranks)


def _loads(loads: Sequence[float] | torch.Tensor) -> list[float]:
    """Loads as numbers. Raises InvalidArgument naming the first that is none."""
    wanted = "a sequence of finite numbers, 0 or more: [num_experts] of one layer"
    values: Iterable[object]
    if isinstance(loads, torch.Tensor):
        if loads.dim() != 1 or loads.is_meta or loads.is_complex() or loads.dtype == torch.bool:
            refuse("loads", loads, wanted)
        values = loads.tolist()
    elif isinstance(loads, str | bytes | dict) or not isinstance(loads, Iterable):
        refuse("loads", loads, wanted)
    else:
        values = loads
    known = [real(f"loads[{i}]", value, least=0.0) for i, value in enumerate(values)]
    if not 1 <= len(known) <= EXPERTS:
        raise InvalidArgument(f"loads has {len(known)} entries; it must have 1..{EXPERTS}")
    if not math.isfinite(sum(known)):
        raise InvalidArgument(f"loads add up to {sum(known)}; divide them by the largest")
    return known


def _replicate(loads: list[float], ranks: int, replicas: int) -> list[int]:
    """How many replicas each expert has: one, and those that bring its load per replica down."""
    count = [1] * len(loads)
    # Among equal loads the one with the fewest replicas is next, so that zeros are spread too.
    waiting = [(-load, 1, expert) for expert, load in enumerate(loads)]
    heapq.heapify(waiting)
    for _ in range(replicas):
        *_, expert = heapq.heappop(waiting)
        count[expert] += 1
        if count[expert] < ranks:
            heapq.heappush(waiting, (-loads[expert] / count[expert], count[expert], expert))
    return count


def _pack(share: list[float], count: list[int], ranks: int) -> list[set[int]]:
    """The experts of each rank: longest processing time first, equally many on each rank."""
    each = sum(count) // ranks
    held: list[set[int]] = [set() for _ in range(ranks)]
    loads = [0.0] * ranks

    def move(expert: int, away: int | None, to: int) -> None:
        if away is not None:
            held[away].remove(expert)
            loads[away] -= share[expert]
        held[to].add(expert)
        loads[to] += share[expert]

    for expert in sorted(range(len(share)), key=lambda e: (-share[e], e)):
        for _ in range(count[expert]):
            free = [rank for rank in range(ranks) if len(held[rank]) < each]
            without = [rank for rank in free if expert not in held[rank]]
            if not without:
                # Every rank with a free place has this expert. A full rank without it holds more
                # experts than a rank that is not full, so one of them can make room there.
                _, other, source, target = min(
                    (max(loads[s] - share[o] + share[expert], loads[t] + share[o]), o, s, t)
                    for s in range(ranks)
                    if expert not in held[s]
                    for t in free
                    for o in held[s] - held[t]
                )
                move(other, source, target)
                without = [source]
            move(expert, None, min(without, key=lambda rank: (loads[rank], rank)))
    return held


def _swap(share: list[float], held: list[set[int]]) -> None:
    """Swap an expert of the most loaded rank for a lighter one elsewhere while that helps both."""
    while True:
        loads = [math.fsum(share[expert] for expert in rank) for rank in held]
        top = max(range(len(held)), key=lambda rank: (loads[rank], -rank))
        best, found = MIN_GAIN_OF_SWAP * loads[top], None
        for rank, experts in enumerate(held):
            gap = loads[top] - loads[rank]
            lighter = sorted(experts - held[top])
            for out in sorted(held[top] - experts):
                for back in lighter:
                    less = share[out] - share[back]
                    # The larger of both ranks' loads falls by so much.
                    if min(less, gap - less) > best:
                        best, found = min(less, gap - less), (rank, out, back)
        if found is None:
            return
        rank, out, back = found
        held[top] ^= {out, back}
        held[rank] ^= {out, back}


class Move(NamedTuple):
    """The weights of one physical expert become those of another, on the same rank or not."""

    source: int
    target: int


def moves(old: Replicas, new: Replicas, living: int | None = None) -> list[Move]:
    """Where each physical expert that changes gets its weights: on its own rank where one is, else
    from the rank that has least to send so far. Equal on every rank.

    living: the ranks that give and get, as in `Replicas.on`; default all. Each holds what it gets.
    """
    each = len(old.logical) // old.ranks
    living = (1 << old.ranks) - 1 if living is None else living
    held = old.on(living)
    sends = [0] * old.ranks
    found: list[Move] = []
    for target, expert in enumerate(new.logical):
        if old.logical[target] == expert or not living >> target // each & 1:
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
        self,
        group: Group,
        tensors: Sequence[torch.Tensor],
        old: Replicas,
        new: Replicas,
        living: int,
    ) -> None:
        self._group, self._each = group, len(old.logical) // old.ranks
        self._moves = moves(old, new, living)
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
            self._staging = {
                rank: self._heap.tensor((slots, self._piece), torch.uint8, rank=rank)
                for rank in group.living
            }

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
        synchronize_stream(self._group.device)

    def _copy_in(self, part: torch.Tensor) -> None:
        """The piece of every expert that this rank gets, from its source's staging memory."""
        width = part.shape[1]
        for source, target in self._moves:
            if target // self._each == self._group.rank:
                owner = source // self._each
                slot = self._sources[owner].index(source)
                part[target % self._each].copy_(self._staging[owner][slot, :width])
        synchronize_stream(self._group.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._heap is not None:
            self._heap.close()
