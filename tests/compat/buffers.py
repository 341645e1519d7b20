# SPDX-License-Identifier: Apache-2.0
"""What tests of the low-latency drop-ins have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

import weft
from weft.compat.deep_ep import Buffer
from weft.lowlatency import reference as low
from weft.reference import dequantize

P = ParamSpec("P")
T = TypeVar("T")
Body = Callable[Concatenate[weft.Group, Buffer, P], T]


def buffered(**options: Any) -> Callable[[Body[P, T]], Callable[Concatenate[weft.Group, P], T]]:
    """A body that gets a Buffer of these options, which is checked and given back after it."""

    def decorate(body: Body[P, T]) -> Callable[Concatenate[weft.Group, P], T]:
        @functools.wraps(body)
        def run(group: weft.Group, /, *args: P.args, **given: P.kwargs) -> T:
            buffer = Buffer(group, **options)
            found = body(group, buffer, *args, **given)
            buffer.check()
            group.barrier()
            buffer.destroy()
            return found

        return run

    return decorate


def returned(
    given: tuple[torch.Tensor, ...],
    experts: int,
    ranks: int,
    quantize: str | None,
    *,
    scale: str = "fp32_row",
    recipe: str = "deep_ep",
) -> torch.Tensor:
    """What identity experts return of x, ids and weights, by the specification."""
    x, ids, weights = given
    sent, scales = low.sent(x, quantize, 128, scale, recipe)
    rows = sent if scales is None else dequantize(sent, scales).bfloat16()
    every = rows[:, None].expand(-1, ids.shape[1], -1)
    return low.combine(every, ids, weights, weft.Placement.blocks(experts, ranks))
