# SPDX-License-Identifier: Apache-2.0
"""Where each expert's replicas are; 0.5.23 alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class ExpertLocationMetadata:
    """`[layers, physical]` and `[layers, logical, ...]`, -1 where there is no more replica."""

    physical_to_logical_map_cpu: torch.Tensor
    logical_to_all_physical_map: torch.Tensor
    logical_to_all_physical_map_cpu: torch.Tensor
    logical_to_all_physical_map_num_valid: torch.Tensor
    logical_to_rank_dispatch_physical_map: torch.Tensor | None
    ep_size: int

    @property
    def num_local_physical_experts(self) -> int:
        return self.physical_to_logical_map_cpu.shape[1] // self.ep_size

    @property
    def num_logical_experts(self) -> int:
        return self.logical_to_all_physical_map.shape[1]


_kept: list[ExpertLocationMetadata] = []


def place(physical_to_logical: torch.Tensor, ranks: int, logical: int, static: bool) -> None:
    """Publish a placement, with the first replica of each expert alone in its tables."""
    layers, physical = physical_to_logical.shape
    every = torch.full((layers, logical, physical), -1)
    for layer in range(layers):
        for expert in range(logical):
            every[layer, expert, 0] = physical_to_logical[layer].tolist().index(expert)
    single = every[..., 0].clone() if static else None
    _kept[:] = [
        ExpertLocationMetadata(
            physical_to_logical, every, every.clone(), (every >= 0).sum(-1), single, ranks
        )
    ]


def get_global_expert_location_metadata() -> ExpertLocationMetadata:
    return _kept[0]
