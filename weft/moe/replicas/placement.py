# SPDX-License-Identifier: Apache-2.0
"""EPLB (expert-parallel load balancing): placement of expert replicas."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.arguments import (
    check_float,
    check_instance,
    check_int,
    check_ints,
    raise_invalid,
    set_fields,
)
from weft.errors import InvalidArgument
from weft.fields import max_value
from weft.shape import MAX_RANKS, Shape

MAX_EXPERTS = max_value(Shape, "experts")


MIN_SWAP_GAIN = 1e-4  # relative to a rank's load; smaller gains are not worth the search


class ReplicaTable(NamedTuple):
    """Tensors that map logical experts to physical ones.

    Attributes:
        counts: int32 `[num_experts]`, number of replicas of each expert.
        physical: int32 `[num_experts, max_replicas]`, their physical ids, ascending; -1 beyond
            counts.
    """

    counts: torch.Tensor
    physical: torch.Tensor


@dataclass(frozen=True, slots=True)
class Replicas:
    """A placement: the logical expert of each physical expert.

    Attributes:
        logical: Logical expert of each physical one. Each of 0..num_experts - 1 occurs at least
            once.
        ranks: Number of ranks, which hold equally many physical experts: expert p is on rank
            `p // (len(logical) / ranks)`, as in `Placement.blocks(len(logical), ranks)`.

    Raises:
        InvalidArgument: the placement is invalid.
    """

    logical: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        logical = check_ints("logical", self.logical, 0, MAX_EXPERTS - 1)
        ranks = check_int("ranks", self.ranks, 1, MAX_RANKS)
        if not logical or len(logical) % ranks:
            raise InvalidArgument(
                f"logical has {len(logical)} entries for {ranks} ranks; pass a multiple of ranks"
            )
        if absent := sorted(set(range(max(logical) + 1)).difference(logical)):
            raise InvalidArgument(
                f"logical leaves out expert {absent[0]} of 0..{max(logical)}; each must occur"
            )
        set_fields(self, logical=logical, ranks=ranks)

    @property
    def num_experts(self) -> int:
        """Number of logical experts."""
        return max(self.logical) + 1

    def logical_experts(self, rank: int) -> tuple[int, ...]:
        """Return the logical expert of each of a rank's physical experts, in order.

        Raises:
            InvalidArgument: there is no such rank.
        """
        rank, per_rank = check_int("rank", rank, 0, self.ranks - 1), self._per_rank
        return self.logical[rank * per_rank : (rank + 1) * per_rank]

    def imbalance(self, loads: Sequence[float] | torch.Tensor) -> float:
        """Return the largest load of a rank divided by the mean, if replicas share loads equally.

        Args:
            loads: `[num_experts]`, as in `balance`.

        Returns:
            1.0 for a perfect balance, or if all loads are 0.
        """
        loads = _parse_loads(loads)
        if len(loads) != self.num_experts:
            raise InvalidArgument(
                f"loads has {len(loads)} entries; these are replicas of {self.num_experts} experts"
            )
        counts = [len(physical) for physical in self.physical_on()]
        by_rank = [
            math.fsum(loads[expert] / counts[expert] for expert in self.logical_experts(rank))
            for rank in range(self.ranks)
        ]
        mean = math.fsum(by_rank) / self.ranks
        return max(by_rank) / mean if mean else 1.0

    def physical_on(self, living: int | None = None) -> list[list[int]]:
        """Return the replicas of each logical expert on the living ranks, ascending.

        Args:
            living: Mask with bit r for rank r. Default: all ranks.

        Raises:
            InvalidArgument: the mask is invalid.
        """
        all_ranks = (1 << self.ranks) - 1
        living = all_ranks if living is None else check_int("living", living, 1, all_ranks)
        physical: list[list[int]] = [[] for _ in range(self.num_experts)]
        for p, expert in enumerate(self.logical):
            if living >> p // self._per_rank & 1:
                physical[expert].append(p)
        return physical

    def table(self, device: torch.device, *, living: int | None = None) -> ReplicaTable:
        """Return the map from logical to physical experts as tensors.

        Args:
            device: Device of the tensors.
            living: As in `physical_on`. An expert without a living replica has one entry of -1, so
                that its ids are dropped.
        """
        check_instance("device", device, torch.device)
        physical = [replicas or [-1] for replicas in self.physical_on(living)]
        counts = [len(replicas) for replicas in physical]
        width = max(counts)
        padded = [replicas + [-1] * (width - len(replicas)) for replicas in physical]
        return ReplicaTable(
            torch.tensor(counts, dtype=torch.int32, device=device),
            torch.tensor(padded, dtype=torch.int32, device=device),
        )

    @property
    def _per_rank(self) -> int:
        """Number of physical experts per rank."""
        return len(self.logical) // self.ranks


def balance(loads: Sequence[float] | torch.Tensor, ranks: int, replicas: int = 0) -> Replicas:
    """Place one layer's experts and their replicas so that ranks have equal loads (EPLB).

    The algorithm has three steps. Equal loads give equal placements on every rank.

    1. Replicas are assigned one by one to the expert with the highest load per replica, which
       minimises the maximum load per replica.
    2. Replicas, the most loaded first, are placed on the least loaded rank that has a free slot and
       no other replica of that expert.
    3. Experts of the most loaded rank are swapped with those of other ranks while that helps.

    DeepSeek's EPLB (github.com/deepseek-ai/EPLB) has the first two steps. It also balances expert
    groups and nodes, which one NVLink domain does not need. Here a rank holds at most one replica
    of an expert, because a second one would not reduce its load. The current placement is not taken
    into account.

    Args:
        loads: `[num_experts]`, load of each expert, such as its number of tokens over all ranks
            (`weft.reference.expert_load`, summed over ranks); finite and not negative.
        ranks: Number of ranks.
        replicas: Number of additional physical experts, at most `num_experts * (ranks - 1)`. The
            sum of num_experts and replicas must be a multiple of ranks.

    Raises:
        InvalidArgument: an argument is invalid.
    """
    loads = _parse_loads(loads)
    ranks = check_int("ranks", ranks, 1, MAX_RANKS)
    replicas = check_int("replicas", replicas, 0, MAX_EXPERTS)
    physical = len(loads) + replicas
    if replicas > len(loads) * (ranks - 1):
        raise InvalidArgument(
            f"replicas is {replicas} for {len(loads)} experts on {ranks} ranks; with "
            f"{len(loads) * (ranks - 1)} each rank has every expert"
        )
    if physical % ranks:
        raise InvalidArgument(
            f"replicas is {replicas}: {physical} physical experts for {ranks} ranks, which hold "
            f"equally many; use {replicas + -physical % ranks}"
        )
    counts = _count_replicas(loads, ranks, replicas)
    load_per_replica = [load / count for load, count in zip(loads, counts, strict=True)]
    by_rank = _pack(load_per_replica, counts, ranks)
    _swap(load_per_replica, by_rank)
    return Replicas(tuple(expert for experts in by_rank for expert in sorted(experts)), ranks)


def _parse_loads(loads: Sequence[float] | torch.Tensor) -> list[float]:
    """Return the loads as floats. Raises InvalidArgument that names the first invalid one."""
    expected = "a sequence of finite numbers, 0 or more: [num_experts] of one layer"
    values: Iterable[object]
    if isinstance(loads, torch.Tensor):
        if loads.dim() != 1 or loads.is_meta or loads.is_complex() or loads.dtype == torch.bool:
            raise_invalid("loads", loads, expected)
        values = loads.tolist()
    elif isinstance(loads, str | bytes | dict) or not isinstance(loads, Iterable):
        raise_invalid("loads", loads, expected)
    else:
        values = loads
    numbers = [check_float(f"loads[{i}]", value, minimum=0.0) for i, value in enumerate(values)]
    if not 1 <= len(numbers) <= MAX_EXPERTS:
        raise InvalidArgument(f"loads has {len(numbers)} entries; it must have 1..{MAX_EXPERTS}")
    if not math.isfinite(sum(numbers)):
        raise InvalidArgument(f"loads add up to {sum(numbers)}; divide them by the largest")
    return numbers


def _count_replicas(loads: list[float], ranks: int, replicas: int) -> list[int]:
    """Return the number of replicas of each expert that minimises the maximum load per replica."""
    counts = [1] * len(loads)
    # Ties go to the expert with the fewest replicas, so that zero loads are spread, too.
    heap = [(-load, 1, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(replicas):
        *_, expert = heapq.heappop(heap)
        counts[expert] += 1
        if counts[expert] < ranks:
            heapq.heappush(heap, (-loads[expert] / counts[expert], counts[expert], expert))
    return counts


def _pack(load_per_replica: list[float], counts: list[int], ranks: int) -> list[set[int]]:
    """Assign experts to ranks, equally many to each, by longest processing time first."""
    per_rank = sum(counts) // ranks
    by_rank: list[set[int]] = [set() for _ in range(ranks)]
    loads = [0.0] * ranks

    def move(expert: int, source: int | None, target: int) -> None:
        if source is not None:
            by_rank[source].remove(expert)
            loads[source] -= load_per_replica[expert]
        by_rank[target].add(expert)
        loads[target] += load_per_replica[expert]

    for expert in sorted(range(len(load_per_replica)), key=lambda e: (-load_per_replica[e], e)):
        for _ in range(counts[expert]):
            free = [rank for rank in range(ranks) if len(by_rank[rank]) < per_rank]
            candidates = [rank for rank in free if expert not in by_rank[rank]]
            if not candidates:
                # Every rank with a free slot has this expert. A full rank without it holds more
                # experts than a rank that is not full, so one of them can move there.
                _, other, source, target = min(
                    (
                        max(
                            loads[s] - load_per_replica[o] + load_per_replica[expert],
                            loads[t] + load_per_replica[o],
                        ),
                        o,
                        s,
                        t,
                    )
                    for s in range(ranks)
                    if expert not in by_rank[s]
                    for t in free
                    for o in by_rank[s] - by_rank[t]
                )
                move(other, source, target)
                candidates = [source]
            move(expert, None, min(candidates, key=lambda rank: (loads[rank], rank)))
    return by_rank


def _swap(load_per_replica: list[float], by_rank: list[set[int]]) -> None:
    """Swap experts of the most loaded rank with less loaded ones while the maximum decreases."""
    while True:
        loads = [math.fsum(load_per_replica[expert] for expert in experts) for experts in by_rank]
        most_loaded = max(range(len(by_rank)), key=lambda rank: (loads[rank], -rank))
        max_gain, best_swap = MIN_SWAP_GAIN * loads[most_loaded], None
        for rank, experts in enumerate(by_rank):
            gap = loads[most_loaded] - loads[rank]
            replacements = sorted(experts - by_rank[most_loaded])
            for expert in sorted(by_rank[most_loaded] - experts):
                for replacement in replacements:
                    difference = load_per_replica[expert] - load_per_replica[replacement]
                    # The larger of both ranks' loads decreases by this much.
                    gain = min(difference, gap - difference)
                    if gain > max_gain:
                        max_gain, best_swap = gain, (rank, {expert, replacement})
        if best_swap is None:
            return
        rank, swapped = best_swap
        by_rank[most_loaded] ^= swapped
        by_rank[rank] ^= swapped
