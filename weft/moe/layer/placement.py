# SPDX-License-Identifier: Apache-2.0
"""Placement of a layer's experts: replicas, experts lost in a recovery, and relocation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from weft.arguments import check_instance
from weft.errors import ExpertsLost, InvalidArgument
from weft.group.group import format_reason
from weft.moe.experts.weights import ExpertWeights
from weft.moe.layer.workspace import LayerWorkspace
from weft.moe.replicas.placement import Replicas
from weft.moe.replicas.relocation import Relocation
from weft.runtime.stream import synchronize_device, synchronize_stream


class LayerPlacement:
    """The placement of one layer's experts.

    Attributes:
        replicas: Current placement of a layer with replicas, or None.
        table: int32 `[num_experts, 1 + width]` that maps ids to physical experts, or None. Captured
            graphs hold its address, so it is changed in place.
        lost_experts: Experts that no living rank holds.
        relocation_failed: Whether the weights may belong to different placements.
    """

    def __init__(self, workspace: LayerWorkspace[Any], replicas: Replicas | None) -> None:
        self._workspace, self._exchange = workspace, workspace.exchange
        self.replicas = replicas
        self.table: torch.Tensor | None = None
        self.lost_experts: list[int] = []
        self.relocation_failed = False

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts, in the order of its weights."""
        if self.replicas is not None:
            return self.replicas.logical_experts(self._exchange.rank)
        return self._exchange.local_experts

    def create_table(self) -> None:
        """Allocate and fill the table of a layer with replicas."""
        if self.replicas is None:
            return
        device, experts = self._workspace.group.device, self.replicas.num_experts
        # Wide enough for every placement of this size.
        width = 1 + len(self.replicas.logical) - experts + 1
        self.table = torch.zeros((experts, width), dtype=torch.int32, device=device)
        self._fill_table(self.replicas)
        synchronize_stream(device)

    def restore(self) -> None:
        """Route ids to living ranks after a recovery."""
        if self.replicas is not None:
            self._fill_table(self.replicas)
        else:
            owners, living = enumerate(self._exchange.placement.ranks), self._exchange.living_mask
            self.lost_experts = [e for e, rank in owners if not living >> rank & 1]

    def check_usable(self) -> None:
        """Raise ExpertsLost if experts are missing or their weights match no placement."""
        if self.relocation_failed and not self._exchange.broken:
            raise ExpertsLost(
                "a relocation failed, so the weights match no placement: call "
                "relocate with weights=, from a checkpoint, on all ranks"
            )
        if self.lost_experts and self._workspace.options.missing == "error":
            living = self._exchange.living_mask
            dead = [r for r in range(self._exchange.ep_size) if not living >> r & 1]
            raise ExpertsLost(
                f"ranks {dead} have exited or were not joined yet, and no other rank holds experts "
                f"{self.lost_experts}: relocate them from a checkpoint (weights=), give experts "
                "replicas on other ranks, or build the layer with missing='drop', which drops "
                "their ids"
            )

    def check_sizes(self, replicas: Replicas) -> None:
        """Raise InvalidArgument if the placement's sizes are not those of the layer."""
        check_instance("replicas", replicas, Replicas, "weft.moe.balance returns one")
        original = self._workspace.options.replicas
        if original is None:
            raise InvalidArgument("this layer was built without replicas: pass replicas= to MoE")
        sizes = (replicas.ranks, replicas.num_experts, len(replicas.logical))
        expected = (original.ranks, original.num_experts, len(original.logical))
        if sizes != expected:
            raise InvalidArgument(
                "replicas of {} ranks, {} experts and {} physical ones".format(*sizes)
                + "; this layer was built for {}, {} and {}".format(*expected)
            )

    def relocate(
        self,
        replicas: Replicas,
        layer_weights: ExpertWeights,
        weights: ExpertWeights | None,
        check_open: Callable[[], None],
    ) -> int:
        """Move the layer's weights to another placement, see `MoE.relocate`. Collective."""
        workspace, group, old = self._workspace, self._workspace.group, self.replicas
        with ExitStack() as stack:

            def check_and_lock() -> None:
                check_open()
                self.check_sizes(replicas)
                self._check_available(replicas, with_weights=weights is not None)
                if weights is not None:
                    fp8, local = workspace.options.fp8, len(replicas.logical_experts(group.rank))
                    weights.check(workspace.config, local, group.device, fp8=fp8)
                    expected, dtype = layer_weights.gate_up.dtype, weights.gate_up.dtype
                    if dtype != expected:
                        raise InvalidArgument(
                            f"weights are {dtype}, those of the layer {expected}: relocation "
                            "copies without conversion"
                        )
                stack.enter_context(workspace.exclude_calls("relocate"))

            group.run_collective(check_and_lock, action="relocating experts")
            assert old is not None
            # To move weights between ranks, all must have the same current placement.
            current = list(old.logical) if weights is None else None
            placement = {"logical": list(replicas.logical), "current": current}
            group.agree(placement, label="the placement of experts")
            synchronize_device(group.device)
            relocation = None
            if weights is None:
                tensors = layer_weights.tensors
                relocation = Relocation(group, tensors, old, replicas, self._exchange.living_mask)
                stack.enter_context(relocation)
            self.relocation_failed = True
            try:
                if relocation is not None:
                    relocation.run()
                elif weights is not None:
                    for target, source in zip(layer_weights.tensors, weights.tensors, strict=True):
                        target.copy_(source)
                self.replicas = replicas
                self._fill_table(replicas)
                synchronize_stream(group.device)
                group.barrier()  # from here on, peers may send by the new table
                self.relocation_failed = False
            except BaseException as error:
                self._exchange.leave(f"failed while relocating experts: {format_reason(error)}")
                raise
        return sum(a != b for a, b in zip(old.logical, replicas.logical, strict=True))

    def _fill_table(self, replicas: Replicas) -> None:
        assert self.table is not None
        living = self._exchange.living_mask
        self.lost_experts = [
            e for e, physical in enumerate(replicas.physical_on(living)) if not physical
        ]
        counts, physical = replicas.table(self.table.device, living=living)
        self.table[:, 0] = counts
        self.table[:, 1 : 1 + physical.shape[1]] = physical

    def _check_available(self, replicas: Replicas, *, with_weights: bool) -> None:
        """Raise InvalidArgument if living ranks cannot hold the placement or lack its weights."""
        assert self.replicas is not None
        if self.relocation_failed and not with_weights and not self._exchange.broken:
            raise InvalidArgument(
                "a relocation failed, so no rank has valid weights: pass weights="
            )
        living = self._exchange.living_mask
        current, target = self.replicas.physical_on(living), replicas.physical_on(living)
        unplaced = [e for e, physical in enumerate(target) if not physical]
        if unplaced and self._workspace.options.missing == "error":
            raise InvalidArgument(
                f"replicas place experts {unplaced} only on ranks that have exited; place them on "
                f"ranks {[r for r in range(replicas.ranks) if living >> r & 1]}"
            )
        unavailable = [e for e, physical in enumerate(target) if physical and not current[e]]
        if unavailable and not with_weights:
            raise InvalidArgument(
                f"no living rank has weights of experts {unavailable}: pass weights=, from a "
                "checkpoint"
            )
