# SPDX-License-Identifier: Apache-2.0
"""Placement of experts on ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.arguments import check_instance, check_int, check_ints, raise_invalid
from weft.errors import InvalidArgument
from weft.fields import max_value
from weft.group import Group
from weft.shape import Shape

MAX_EXPERTS = max_value(Shape, "experts")
MAX_EP_SIZE = 4096  # ranks of all hosts together
NO_SUCH_EXPERT = 2**31 - 1  # replaces an invalid id; dispatch rejects it


@dataclass(frozen=True, slots=True)
class Placement:
    """Map from each expert to its rank and local id, in ascending order of global ids.

    Attributes:
        ranks: Rank of each expert.
        local: Local id of each expert on its rank.
        explicit: Whether the caller passed an expert_map.
    """

    ranks: tuple[int, ...]
    local: tuple[int, ...]
    explicit: bool

    @classmethod
    def blocks(cls, num_experts: int, ep_size: int) -> Placement:
        """Place contiguous blocks; the first `num_experts % ep_size` ranks have one more expert.

        Args:
            num_experts: Number of experts over all ranks.
            ep_size: Number of ranks.

        Raises:
            InvalidArgument: a size is not positive.
        """
        num_experts = check_int("num_experts", num_experts, 1, MAX_EXPERTS)
        ep_size = check_int("ep_size", ep_size, 1, MAX_EP_SIZE)
        size, remainder = divmod(num_experts, ep_size)
        owners: list[int] = []
        for rank in range(ep_size):
            owners += [rank] * (size + (rank < remainder))
        return cls._from_owners(owners, explicit=False)

    @classmethod
    def mapped(
        cls, expert_map: Sequence[int] | torch.Tensor, num_experts: int, ep_size: int
    ) -> Placement:
        """Create the placement of an explicit expert map.

        Args:
            expert_map: Rank of each expert.
            num_experts: Number of experts.
            ep_size: Number of ranks.

        Raises:
            InvalidArgument: the map has the wrong length, has values that are not integers, or has
                a rank outside the group.
        """
        num_experts = check_int("num_experts", num_experts, 1, MAX_EXPERTS)
        ep_size = check_int("ep_size", ep_size, 1, MAX_EP_SIZE)
        owners = check_ints("expert_map", expert_map)
        if len(owners) != num_experts:
            raise InvalidArgument(
                f"expert_map has {len(owners)} entries; num_experts is {num_experts}"
            )
        for expert, rank in enumerate(owners):
            if not 0 <= rank < ep_size:
                raise InvalidArgument(
                    f"expert_map[{expert}] is rank {rank}; the group has ranks 0..{ep_size - 1}"
                )
        return cls._from_owners(owners, explicit=True)

    @classmethod
    def _from_owners(cls, owners: Sequence[int], *, explicit: bool) -> Placement:
        counts: dict[int, int] = {}
        local: list[int] = []
        for rank in owners:
            local.append(counts.get(rank, 0))
            counts[rank] = local[-1] + 1
        return cls(ranks=tuple(owners), local=tuple(local), explicit=explicit)

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Return the global ids of a rank's experts in local order.

        Args:
            rank: Rank in the group. A rank without experts gets an empty tuple.

        Raises:
            InvalidArgument: the rank is out of range.
        """
        rank = check_int("rank", rank, 0, MAX_EP_SIZE - 1)
        return tuple(e for e, owner in enumerate(self.ranks) if owner == rank)

    def table(self, device: torch.device) -> torch.Tensor:
        """Return int32 `[num_experts]` of `rank << 16 | local id`, as the kernels read it.

        Args:
            device: Device of the result.
        """
        check_instance("device", device, torch.device)
        packed = [rank << 16 | local for rank, local in zip(self.ranks, self.local, strict=True)]
        return torch.tensor(packed, dtype=torch.int32, device=device)


def build_placement(
    expert_map: Sequence[int] | torch.Tensor | None, num_experts: int, ep_size: int
) -> Placement:
    """Create the placement of expert_map, or of contiguous blocks for None.

    Raises:
        InvalidArgument: as `Placement.mapped`.
    """
    if expert_map is None:
        return Placement.blocks(num_experts, ep_size)
    return Placement.mapped(expert_map, num_experts, ep_size)


class ExpertRankMixin:
    """Mixin of all-to-all operators with the rank, the group's size and the local experts."""

    group: Group
    placement: Placement

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return self.group.rank

    @property
    def ep_size(self) -> int:
        """Number of expert-parallel ranks."""
        return self.group.size

    @functools.cached_property
    def sources(self) -> tuple[int, ...]:
        """Source rank of each slot of a dispatch: `sources[s] == s` on one host.

        With several hosts, slots are ordered by local rank and then by host, because each rank
        forwards the rows of its rail to the ranks of its host.
        """
        return tuple(rank for rail in zip(*self.group.host_ranks, strict=True) for rank in rail)

    @functools.cached_property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts. A local id indexes this tuple."""
        return self.placement.experts_of(self.rank)

    def global_ids(self, local_ids: torch.Tensor) -> torch.Tensor:
        """Map local expert ids to global ones.

        On a GPU the call does not synchronize: an invalid id becomes 2**31 - 1, which every
        dispatch rejects. The call can be captured after a first eager call.

        Args:
            local_ids: int32 or int64 of any shape, such as `Received.ids`. -1 stays -1.

        Returns:
            int32 of the same shape.

        Raises:
            InvalidArgument: on a CPU, an id is not a local id of this rank.
        """
        check_instance("local_ids", local_ids, torch.Tensor)
        if local_ids.dtype not in (torch.int32, torch.int64):
            raise_invalid("local_ids", local_ids, "int32 or int64")
        count = self.num_local_experts
        valid = (local_ids >= -1) & (local_ids < count)
        if local_ids.device.type == "cpu" and not valid.all():
            raise InvalidArgument(
                f"local_ids contains {int(local_ids[~valid][0])}, but rank {self.rank} has local "
                f"experts 0..{count - 1}, and -1 means none: pass `ids` of the result of dispatch"
            )
        global_ids = self._by_local_id[torch.where(valid, local_ids, -1).long()]
        return torch.where(valid, global_ids, NO_SUCH_EXPERT)

    @functools.cached_property
    def _by_local_id(self) -> torch.Tensor:
        """Global id of each local id, int32 `[local_experts + 1]`; the last entry is for -1."""
        ids = (*self.local_experts, -1)
        return torch.tensor(ids, dtype=torch.int32, device=self.group.device)

    @property
    def num_local_experts(self) -> int:
        """Number of experts on this rank."""
        return len(self.local_experts)
