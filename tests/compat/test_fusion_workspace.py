# SPDX-License-Identifier: Apache-2.0
"""Workspaces of flashinfer.comm's all-reduce: sizes, strategies, refusals, whose ranks."""

from __future__ import annotations

from typing import Any

import torch

import weft
from tests.compat.calls import refused
from tests.compat.reduces import (
    BF16,
    HIDDEN,
    RANKS,
    TOKENS,
    Pattern,
    make,
    rows_for,
    same,
)
from weft import reference
from weft.compat.flashinfer import AllReduceFusionWorkspace, allreduce_fusion
from weft.errors import InvalidArgument, OutOfOrder, TokenOverflow


def workspaces(group: weft.Group) -> None:
    rows = rows_for(group.device, TOKENS + 1)
    with make(group) as workspace:
        assert workspace.is_buffer_size_sufficient(RANKS, TOKENS, HIDDEN, BF16)
        assert workspace.is_buffer_size_sufficient(RANKS, 1, HIDDEN, BF16, use_oneshot=True)
        for tokens, hidden, dtype in (
            (2 * TOKENS, HIDDEN // 2, BF16),
            (TOKENS, HIDDEN, torch.float16),
            (1, TOKENS * HIDDEN, BF16),
        ):
            assert workspace.is_buffer_size_sufficient(RANKS, tokens, hidden, dtype)
            wide = torch.ones((tokens, hidden), dtype=dtype, device=group.device)
            for way in (True, None):
                same(allreduce_fusion(wide, workspace, 0, use_oneshot=way), wide * RANKS)
        workspace.check()
        for tp, tokens, hidden, dtype in (
            (RANKS, TOKENS + 1, HIDDEN, BF16),
            (RANKS, 1, TOKENS * HIDDEN + 8, BF16),
            (RANKS, TOKENS, HIDDEN, torch.float32),
            (RANKS + 1, TOKENS, HIDDEN, BF16),
        ):
            assert not workspace.is_buffer_size_sufficient(tp, tokens, hidden, dtype)
        x = rows.xs[group.rank]
        refused(TokenOverflow, lambda: allreduce_fusion(x, workspace, 0), str(TOKENS + 1))
    workspace.destroy()
    refused(OutOfOrder, lambda: allreduce_fusion(x[:1], workspace, 0), "destroyed")
    refused(OutOfOrder, workspace.check, "destroyed")


def test_workspaces(ranks):
    ranks(RANKS, "threads")(workspaces)


def refusals(group: weft.Group) -> None:
    rows = rows_for(group.device, 2)
    x = rows.xs[group.rank]
    normed: dict[str, Any] = {"residual_in": rows.residual, "rms_gamma": rows.weight}
    with make(group) as workspace:

        def call(pattern: int, *words: str, **given: Any) -> None:
            refused(
                InvalidArgument,
                lambda: allreduce_fusion(x, workspace, pattern, **given),
                *words,
            )

        for pattern in (3, 5):
            call(pattern, "NVFP4", Pattern(pattern).name, **normed)
        call(12, "pattern is 12", "0..11")
        call(1, "layout_code is 3", "0..2", layout_code=3, **normed)
        call(1, "residual_in is None", rms_gamma=rows.weight)
        call(1, "rms_gamma is None", residual_in=rows.residual)
        index = {"expanded_idx_to_permuted_idx": torch.zeros((2, 1), dtype=torch.int32)}
        call(7, "quant_out is a tensor", quant_out=x, **normed, **index)
        call(7, "scale_out is a tensor", scale_out=x, **normed, **index)
        call(2, "scale_factor is None", **normed)
        call(8, "block_quant_group_size is 64", block_quant_group_size=64, **normed)
        call(8, "block_quant_group_size is None", **normed)
        call(7, "expanded_idx_to_permuted_idx is None", **normed)
        call(7, "moe_finalize_backend is 'cake'", moe_finalize_backend="cake", **normed)
        made = {
            "moe_reduction_device_num_experts": 3,
            "moe_reduction_scale_input": torch.ones((3, 2)),
            "moe_reduction_active_experts_token_input": torch.ones((6, HIDDEN), dtype=BF16),
            "moe_reduction_token_input": x,
        }
        for name in made:
            call(6, f"{name} is None", Pattern(6).name, **normed, **made | {name: None})
        made["moe_reduction_scale_input"] = torch.ones((2, 2))
        call(6, "scale_input is a tensor [2, 2]", "need 6", **normed, **made)
    for name in ("world_size", "rank", "max_token_num", "hidden_dim", "dtype"):
        refused(InvalidArgument, lambda name=name: make(group, **{name: None}), f"{name} is None")  # type: ignore[misc]
    refused(InvalidArgument, lambda: make(group, backend="mnnvl"), "multicast")
    refused(
        InvalidArgument,
        lambda: make(group, world_size=3),
        "rank 0 of 3" if group.rank == 0 else "rank 1 of 3",
    )
    refused(InvalidArgument, lambda: make(group, rank=2), "rank is 2", "0..1")
    refused(InvalidArgument, lambda: AllReduceFusionWorkspace(1, 3, 8, 64), "tp_rank is 3", "0..0")
    refused(InvalidArgument, lambda: make(group, hidden_dim=12), "hidden")


def test_refusals(ranks):
    ranks(RANKS, "threads")(refusals)


def from_a_process_group(group: weft.Group) -> None:
    """The ranks of a process group, which stays the caller's; and torch's world without one."""
    ranks = group.process_group()
    for given in (ranks, None):
        with make(group, group=given) as workspace:
            rows = rows_for(group.device, 3)
            want = reference.allreduce_fused(rows.xs).out
            same(allreduce_fusion(rows.xs[group.rank], workspace, 0), want)
            assert workspace.group is not group
        assert group.all_gather(1) == [1, 1]


def test_a_process_group_names_the_ranks(ranks):
    ranks(RANKS, "cpu")(from_a_process_group)
