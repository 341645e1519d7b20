"""What one all-to-all carries: its Shape, payloads and expert placement, from its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.errors import InvalidArgument
from weft.memory.wire import JSON
from weft.ops.check import check_alignment, check_tensor, check_tokens
from weft.ops.layout import Layout
from weft.ops.placement import Placement
from weft.ops.received import Payload
from weft.shape import NUMBERS, Shape


@dataclass(frozen=True, slots=True)
class Geometry:
    """All that ranks must agree on before they share memory."""

    shape: Shape
    layout: Layout
    dtype: torch.dtype
    payloads: tuple[Payload, ...]
    placement: Placement

    @classmethod
    def of(
        cls,
        *,
        ranks: int,
        max_tokens: int,
        top_k: int,
        num_experts: int,
        hidden: int,
        dtype: torch.dtype,
        payloads: Sequence[Payload] | None,
        expert_map: Sequence[int] | torch.Tensor | None,
    ) -> Geometry:
        """Raises InvalidArgument naming the argument, its value and what it may be."""
        if dtype not in NUMBERS:
            allowed = ", ".join(str(d) for d in NUMBERS)
            raise InvalidArgument(f"combine rows of {dtype}; choose one of {allowed}")
        rows = tuple(payloads or (Payload((hidden,), dtype),))
        shape = Shape(
            ranks=ranks,
            tokens=max_tokens,
            top_k=top_k,
            experts=num_experts,
            hidden=hidden,
            number=NUMBERS[dtype],
            row_bytes=tuple(p.row_bytes for p in rows),
            mapped=expert_map is not None,
        )
        if top_k > num_experts:
            raise InvalidArgument(f"top_k is {top_k}, but the layer has {num_experts} experts")
        placement = (
            Placement.blocks(num_experts, ranks)
            if expert_map is None
            else Placement.mapped(expert_map, num_experts, ranks)
        )
        return cls(shape, Layout.of(shape), dtype, rows, placement)

    def manifest(self) -> dict[str, JSON]:
        """What the ranks compare at creation, name by name."""
        s = self.shape
        return {
            "max_tokens": s.tokens,
            "top_k": s.top_k,
            "num_experts": s.experts,
            "hidden": s.hidden,
            "dtype": str(self.dtype),
            "payloads": [f"{list(p.shape)} {p.dtype}" for p in self.payloads],
            "expert_map": list(self.placement.ranks),
        }

    def check_dispatch(
        self,
        tensors: Sequence[torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
        device: torch.device,
    ) -> int:
        """Return the number of tokens.

        Raises InvalidArgument and TokenOverflow for what the host can see.
        """
        top_k = self.shape.top_k
        integers = (torch.int32, torch.int64)
        check_tensor("topk_ids", topk_ids, shape=(None, top_k), dtypes=integers, device=device)
        tokens = int(topk_ids.shape[0])
        check_tokens(tokens, self.shape.tokens)
        if len(tensors) != len(self.payloads):
            raise InvalidArgument(
                f"{len(tensors)} payload tensors; this all-to-all was built for "
                f"{len(self.payloads)}: pass one for each declared Payload"
            )
        for plane, (tensor, payload) in enumerate(zip(tensors, self.payloads, strict=True)):
            name = "x" if len(tensors) == 1 else f"x[{plane}]"
            row = (tokens, *payload.shape)
            check_tensor(name, tensor, shape=row, dtypes=(payload.dtype,), device=device)
            check_alignment(name, tensor, payload.row_bytes)
        if topk_weights is not None:
            row, floats = (tokens, top_k), (torch.float32,)
            check_tensor("topk_weights", topk_weights, shape=row, dtypes=floats, device=device)
        if num_tokens is not None:
            count = (torch.int32,)
            check_tensor("num_tokens", num_tokens, shape=(1,), dtypes=count, device=device)
        return tokens
