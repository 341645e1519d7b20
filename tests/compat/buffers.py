# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of the low-latency drop-ins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import pytest
import torch

import weft
from weft.compat.deep_ep import Buffer
from weft.compat.triton_dist import EPLowLatencyAllToAllLayer
from weft.lowlatency import reference as low
from weft.reference import dequantize

KINDS = ["threads", pytest.param("cuda", marks=pytest.mark.gpu)]
P = ParamSpec("P")
T = TypeVar("T")
Body = Callable[Concatenate[weft.Group, Buffer, P], T]


def buffered(**options: Any) -> Callable[[Body[P, T]], Callable[Concatenate[weft.Group, P], T]]:
    """Run a body with a Buffer of these options, which is checked and destroyed afterwards."""

    def decorate(body: Body[P, T]) -> Callable[Concatenate[weft.Group, P], T]:
        @functools.wraps(body)
        def run(group: weft.Group, /, *args: P.args, **kwargs: P.kwargs) -> T:
            buffer = Buffer(group, **options)
            result = body(group, buffer, *args, **kwargs)
            buffer.check()
            group.barrier()
            buffer.destroy()
            return result

        return run

    return decorate


def layer_of(group: weft.Group, **changes: object) -> EPLowLatencyAllToAllLayer:
    """Return a triton_dist layer on this group."""
    options: dict[str, Any] = {
        **{"max_m": 16, "hidden": 256, "topk": 4, "online_quant_fp8": True, "rank": group.rank},
        **{"num_experts": 8, "local_world_size": group.size, "world_size": group.size},
        "group": group,
    }
    return EPLowLatencyAllToAllLayer(**{**options, **changes})


def returned(
    given: tuple[torch.Tensor, ...],
    experts: int,
    ranks: int,
    quantize: str | None,
    *,
    scale: str = "fp32_row",
    recipe: str = "deep_ep",
) -> torch.Tensor:
    """Return the combine result of identity experts for x, ids and weights."""
    x, ids, weights = given
    sent, scales = low.compute_delivered_rows(x, quantize, 128, scale, recipe)
    rows = sent if scales is None else dequantize(sent, scales).bfloat16()
    every = rows[:, None].expand(-1, ids.shape[1], -1)
    placement = weft.Placement.blocks(experts, ranks)
    return low.combine(every, ids, weights, placement, reduce="receiver")
