# SPDX-License-Identifier: Apache-2.0
"""Every public object in every mode: weft's own (tests/objects.py) and the compat classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import weft
from tests import objects
from tests.objects import (
    EXPERTS,
    HIDDEN,
    MOST,
    TOP_K,
    Made,
    Results,
    clone_all,
    random_rows,
    tokens,
)
from weft.compat import deep_ep, triton_dist
from weft.compat.flashinfer import (
    AllReduceFusionPattern,
    MoeAlltoAll,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
)


def flashinfer_moe(group: weft.Group) -> Made:
    @dataclass(frozen=True)
    class Mapping:
        moe_ep_rank: int
        moe_ep_size: int

    place = Mapping(group.rank, group.size)
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "group": group}
    moe = MoeAlltoAll(place, MOST, TOP_K, EXPERTS, eplb_stats_num_experts=EXPERTS, **sizes)
    x, ids, weights = tokens(group)
    ids = ids.int()

    def call() -> Results:
        planes = moe.dispatch(ids, [x, ids, weights], MOST, EXPERTS, 1)
        seen = clone_all(*planes[1:2])
        y = moe.get_combine_payload_tensor_in_workspace(MOST, HIDDEN, torch.bfloat16)
        y.copy_(planes[0])
        return [*seen, moe.combine(y, MOST, payload_in_workspace=True)]

    return Made(moe, call, moe.close)


def flashinfer_reduce(group: weft.Group) -> Made:
    pattern = AllReduceFusionPattern
    workspace = create_allreduce_fusion_workspace(
        world_size=group.size, rank=group.rank, max_token_num=MOST, hidden_dim=HIDDEN,
        dtype=torch.bfloat16, group=group,
    )  # fmt: skip
    x, weight = random_rows(group, 6, HIDDEN).bfloat16(), random_rows(group, HIDDEN, seed=3).abs()
    weight, residual = torch.ones_like(weight).bfloat16(), torch.ones_like(x)
    scales = random_rows(group, 2, 6, seed=4).abs()
    rows = random_rows(group, 12, HIDDEN, seed=5).bfloat16()

    def call() -> Results:
        norm: dict[str, Any] = {"residual_in": residual, "rms_gamma": weight}
        static = allreduce_fusion(
            x, workspace, pattern.kARResidualRMSNormFP8Quant, scale_factor=0.5, **norm
        )
        added = allreduce_fusion(
            x,
            workspace,
            pattern.kMoEReductionARResidualRMSNorm,
            moe_reduction_device_num_experts=2,
            moe_reduction_scale_input=scales,
            moe_reduction_active_experts_token_input=rows,
            moe_reduction_token_input=x,
            **norm,
        )
        return [static.view(torch.uint8).clone(), added.clone()]

    return Made(workspace, call, workspace.destroy)


def buffer(group: weft.Group, *, hooks: bool, **options: Any) -> Made:
    made, (x, ids, weights) = deep_ep.Buffer(group, low_latency_mode=True), tokens(group)

    def call() -> Results:
        numbers, counts, handle, _, hook = made.low_latency_dispatch(
            x, ids, MOST, EXPERTS, return_recv_hook=hooks, **options
        )
        if hook is not None:
            hook()
        parts = (numbers,) if isinstance(numbers, torch.Tensor) else numbers
        seen = clone_all(parts[0].view(torch.uint8), *parts[1:], counts, *handle[:2])
        y = made.get_next_low_latency_combine_buffer(handle)
        y.copy_(parts[0].to(torch.bfloat16))
        out, _, hook = made.low_latency_combine(y, ids, weights, handle, return_recv_hook=hooks)
        if hook is not None:
            hook()
        return [*seen, out]

    return Made(made, call, made.destroy)


def normal_buffer(group: weft.Group) -> Made:
    made, (x, ids, weights) = deep_ep.Buffer(group), tokens(group)
    numbers, scales = weft.reference.quantize(x, "fp8")

    def call() -> Results:
        per_rank, _, per_expert, in_rank, _ = made.get_dispatch_layout(ids, EXPERTS)
        layout = (per_rank, None, in_rank, per_expert)
        seen: Results = [per_rank, per_expert, in_rank]
        count = 0
        for worst in (0, group.size * MOST):
            rows, *routed, _, handle, _ = made.dispatch(
                x, None, *layout, ids, weights, num_worst_tokens=worst
            )
            assert isinstance(rows, torch.Tensor)
            assert handle is not None
            count = count or len(rows)  # with a bound, the rows after these are unused
            seen += [each[:count] for each in (rows, *routed) if each is not None]
            out, sums, _ = made.combine(rows, handle, routed[1], bias=(x, x))
            seen += clone_all(out, sums)
        quantised, *_ = made.dispatch((numbers, scales), handle)
        seen += [each[:count].view(torch.uint8) for each in quantised]
        made.check()
        return seen

    return Made(made, call, made.destroy)


def triton_layer(group: weft.Group) -> Made:
    made = triton_dist.EPLowLatencyAllToAllLayer(
        MOST, HIDDEN, TOP_K, True, group.rank, EXPERTS, group.size, group.size, group=group
    )
    x, ids, weights = tokens(group)

    def call() -> Results:
        rows, scales, counts, meta = made.dispatch(x, None, ids)
        seen = clone_all(rows.view(torch.uint8), scales, counts, meta.recv_token_source_indices)
        y = rows.to(torch.bfloat16)
        return [*seen, made.combine(y, ids, weights, meta)]

    return Made(made, call, made.finalize)


def modes() -> Iterator[tuple[str, Callable[[weft.Group], Made]]]:
    yield from objects.modes()
    yield "MoeAlltoAll", flashinfer_moe
    yield "allreduce_fusion", flashinfer_reduce
    yield "Buffer", partial(buffer, hooks=False)
    yield "Buffer widened", partial(buffer, hooks=True, round_scale=True)
    yield "Buffer normal", normal_buffer
    yield "EPLowLatencyAllToAllLayer", triton_layer


MODES = dict(modes())
FAMILIES = sorted({name.split()[0] for name in MODES})  # modes of one run
