# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks by what they share, and their sums, which go over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sglang.srt.runtime_context import STATE


class GroupCoordinator:
    """Notes in STATE.ways how each of its sums was made."""

    def __init__(self, ranks: list[int], group: dist.ProcessGroup | None) -> None:
        self.ranks, self.world_size = ranks, len(ranks)
        self.cpu_group = self.device_group = group

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return input_
        if self._can_use_flashinfer_allreduce(input_):
            STATE.ways.append("flashinfer")
            return input_.clone()
        method = self._resolve_outplace_all_reduce_method(input_)
        if method is not None:
            return self._all_reduce_out_place(input_, method)
        STATE.ways.append("in place")
        dense = input_.contiguous()
        dist.all_reduce(dense, group=self.device_group)
        return input_.copy_(dense)

    def _can_use_flashinfer_allreduce(self, input_: torch.Tensor) -> bool:
        return STATE.flashinfer

    def _resolve_outplace_all_reduce_method(
        self, input_: torch.Tensor, should_use_pymscclpp_allreduce: bool | None = None
    ) -> str | None:
        return None

    def _all_reduce_out_place(
        self, input_: torch.Tensor, outplace_all_reduce_method: str
    ) -> torch.Tensor:
        STATE.ways.append(outplace_all_reduce_method)
        out = input_.clone()
        dist.all_reduce(out, group=self.device_group)
        return out


def get_tp_group() -> GroupCoordinator:
    return STATE.groups["tp"]


def get_attn_tp_group() -> GroupCoordinator:
    return STATE.groups["attn"]


def get_moe_ep_group() -> GroupCoordinator:
    return STATE.groups["ep"]


def get_moe_tp_group() -> GroupCoordinator:
    return STATE.groups["moe"]
