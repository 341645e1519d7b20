"""Which physical expert a rank takes for a logical one."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.runtime_context import STATE


class ExpertLocationDispatchInfo:
    """physical: the expert that this rank takes, by logical expert."""

    def __init__(self, physical: torch.Tensor) -> None:
        self.physical = physical

    @classmethod
    def init_new(cls, layer_id: int) -> Any:
        """Of a layer; None without replicas."""
        if not STATE.redundant:
            return None
        logical = STATE.logical
        physical = torch.arange(logical)
        if STATE.parallel.moe_ep_rank % 2:  # odd ranks take the replica where there is one
            physical[: STATE.redundant] = torch.arange(logical, logical + STATE.redundant)
        return cls(physical)
