# SPDX-License-Identifier: Apache-2.0
"""Sizes, inputs, experts and objects of the compat classes."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, TypeVar

import pytest
import torch

import weft
from weft import reference
from weft.compat.deep_ep import Buffer, EventOverlap
from weft.compat.flashinfer import MoeAlltoAll
from weft.compat.triton_dist import EPLowLatencyAllToAllLayer
from weft.lowlatency import reference as low
from weft.reference import dequantize

RANKS, MAX, TOP_K, EXPERTS, HIDDEN = 3, 8, 2, 7, 128  # rank 0 holds three experts, 1 and 2 two
PLACEMENT = weft.Placement.blocks(EXPERTS, RANKS)


@dataclass(frozen=True)
class Mapping:
    """The part of a mapping that weft reads."""

    moe_ep_rank: int
    moe_ep_size: int


class Backend:
    """A communication backend over a group's control messages."""

    def __init__(self, group: weft.Group) -> None:
        self.group = group

    def Get_rank(self) -> int:
        return self.group.rank

    def Get_size(self) -> int:
        return self.group.size

    def allgather(self, data: Any) -> list[Any]:
        return self.group.all_gather(data)


def make(group: weft.Group, **changes: Any) -> MoeAlltoAll:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "group": group, **changes}
    return MoeAlltoAll(Mapping(group.rank, group.size), MAX, TOP_K, EXPERTS, **sizes)


def routing(seed: int, rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, weights): distinct experts, a quarter of them replaced by -1."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    scores = torch.rand((tokens, EXPERTS), generator=generator)
    ids = scores.topk(TOP_K, dim=1).indices.int()
    ids[torch.rand(ids.shape, generator=generator) < 0.25] = -1
    return ids, torch.rand((tokens, TOP_K), generator=generator)


def experts_of(rank: int) -> torch.Tensor:
    return torch.tensor(PLACEMENT.experts_of(rank))


def values(x: torch.Tensor) -> torch.Tensor:
    """Return payload rows as experts read them, in bfloat16; two NVFP4 numbers are in a byte."""
    if x.dtype == torch.uint8:
        x = torch.stack([x & 15, x >> 4], dim=-1).flatten(-2)
    return x.bfloat16()


def identity(received: list[torch.Tensor], local: torch.Tensor) -> torch.Tensor:
    """Run a rank's `local` experts, which copy their token, as an engine does."""
    x, *_, ids, weights = received
    ids = torch.where(torch.isin(ids, local), ids, -1)
    seen: Any = SimpleNamespace(x=values(x), ids=ids, weights=weights)
    return reference.identity_experts(seen, torch.bfloat16)


def refused(error: type[Exception], call: Callable[[], object], *words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


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

        first, _, *rest = inspect.signature(body).parameters.values()
        run.__signature__ = inspect.Signature([first, *rest])  # type: ignore[attr-defined]
        return run

    return decorate


def settle(event: EventOverlap, hook: Any) -> None:
    hook() if hook is not None else event.current_stream_wait()


def layer_of(group: weft.Group, **changes: object) -> EPLowLatencyAllToAllLayer:
    options: dict[str, Any] = {
        **{"max_m": 16, "hidden": 256, "topk": 4, "online_quant_fp8": True, "rank": group.rank},
        **{"num_experts": 8, "local_world_size": group.size, "world_size": group.size},
        "group": group,
    }
    return EPLowLatencyAllToAllLayer(**{**options, **changes})


def returned(
    inputs: tuple[torch.Tensor, ...], experts: int, ranks: int, quantize: str | None, **how: str
) -> torch.Tensor:
    """Return the combine result of identity experts for x, ids and weights."""
    x, ids, weights = inputs
    how = {"scale": "fp32_row", "recipe": "deep_ep", **how}
    sent, scales = low.compute_delivered_rows(x, quantize, 128, **how)
    rows = sent if scales is None else dequantize(sent, scales).bfloat16()
    every = rows[:, None].expand(-1, ids.shape[1], -1)
    placement = weft.Placement.blocks(experts, ranks)
    return low.combine(every, ids, weights, placement, reduce="receiver")
