# SPDX-License-Identifier: Apache-2.0
"""Which physical expert a rank takes for a logical one."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.eplb import expert_location
from sglang.srt.runtime_context import STATE


class ExpertLocationDispatchInfo:
    """physical: the expert that this rank takes, by logical expert."""

    def __init__(self, physical: torch.Tensor) -> None:
        self.physical = physical

    @classmethod
    def init_new(cls, layer_id: int) -> Any:
        """Of a layer; None without replicas."""
        if expert_location._kept:
            places = expert_location.get_global_expert_location_metadata()
            if places.logical_to_rank_dispatch_physical_map is not None:
                return cls(places.logical_to_rank_dispatch_physical_map[layer_id])
            every, valid = places.logical_to_all_physical_map, torch.randint(0, 65536, (8,))
            valid %= places.logical_to_all_physical_map_num_valid[layer_id]
            return cls(every[layer_id].gather(1, valid[:, None])[:, 0])
        if not STATE.redundant:
            return None
        logical = STATE.logical
        physical = torch.arange(logical)
        if STATE.parallel.moe_ep_rank % 2:  # odd ranks take the replica where there is one
            physical[: STATE.redundant] = torch.arange(logical, logical + STATE.redundant)
        return cls(physical)
