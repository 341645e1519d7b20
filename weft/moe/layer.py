"""An expert-parallel MoE layer: route -> dispatch -> experts -> combine."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from weft.moe.experts import Experts, SwiGLU
from weft.moe.router import Routing, route, router_logits
from weft.ops.alltoall import AllToAll
from weft.ops.collective import CollectiveAllToAll

Exchange: TypeAlias = AllToAll | CollectiveAllToAll


class MoELayer(nn.Module):
    """`out = shared(x) + sum over k of weights[k] * expert[ids[k]](x)`, experts spread over ranks.

    exchange: moves the tokens; its `local_experts` say which experts belong here.
    gate: the router's weight `[num_experts, hidden]`, equal on all ranks.
    experts: this rank's, in local order.   shared: computed for the own tokens, or None.

    Collective: every rank calls it equally often, a rank without tokens with zero of them.
    """

    def __init__(
        self,
        exchange: Exchange,
        gate: torch.Tensor,
        experts: Experts,
        *,
        top_k: int,
        shared: SwiGLU | None = None,
    ) -> None:
        super().__init__()
        self.exchange = exchange
        self.gate = nn.Parameter(gate, requires_grad=False)
        self.experts = experts
        self.top_k = top_k
        self.shared = shared

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids int32 and weights float32, both `[tokens, top_k]`."""
        return route(Routing(len(self.gate), self.top_k), router_logits(x, self.gate))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[tokens, hidden]` of this rank -> `[tokens, hidden]`."""
        ids, weights = self.route(x)
        received = self.exchange.dispatch(x, ids, weights)
        self.experts(received, self.exchange.output())
        shared = None if self.shared is None else self.shared(x)
        return self.exchange.combine(add=shared)
