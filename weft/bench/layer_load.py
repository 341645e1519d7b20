"""How a layer's tokens choose, and what that puts on experts, memory and links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weft.bench.layer_weights import expert_bytes, shared_bytes
from weft.bench.moe import row_bytes
from weft.bench.routing import busiest, gumbel, parse_routing, places_of, token_rows
from weft.errors import InvalidArgument
from weft.moe import Routing
from weft.moe.router import route_in_torch
from weft.placement import Placement

if TYPE_CHECKING:
    from weft.bench.layer import LayerCase

SPREAD = 4.0  # logits of experts that `perfect` wants or not: this far above and below 0


def check_perfect(routing: Routing) -> None:
    """Raises InvalidArgument where no even choice can be laid out."""
    parts = routing.top_groups if routing.groups > 1 else 1
    size = routing.num_experts // (routing.groups if routing.groups > 1 else 1)
    if routing.top_k % parts or size % (routing.top_k // parts):
        raise InvalidArgument(
            f"routing perfect: top {routing.top_k} of {routing.num_experts} experts cannot be "
            f"dealt evenly to {parts} group(s) of {size}; use uniform"
        )


def make_logits(case: LayerCase, tokens: int, rank: int) -> torch.Tensor:
    """float32 `[tokens, num_experts]` on the CPU: what a rank's router sees.

    uniform: normal, so that every expert is as likely.   zipf: log of the popularity 1 / place^s
    plus Gumbel noise, so that the top k are drawn by it without replacement; places are drawn once.
    perfect: those of `even_choice` lie SPREAD above 0, the others below.
    """
    routing, (kind, exponent) = case.config.routing, parse_routing(case.routing)
    generator = torch.Generator().manual_seed((case.seed * 131 + tokens) * 64 + rank)
    shape = (tokens, routing.num_experts)
    if kind == "zipf":
        places = places_of(routing.num_experts, case.seed)
        return -exponent * places.log() + gumbel(shape, generator)
    normal = torch.randn(shape, generator=generator)
    if kind == "uniform":
        return normal
    chosen = even_choice(routing, torch.arange(tokens) + rank * tokens)
    return (normal * 0.1 - SPREAD).scatter_add_(1, chosen, torch.full(chosen.shape, 2 * SPREAD))


def even_choice(routing: Routing, token: torch.Tensor) -> torch.Tensor:
    """int64 `[tokens, top_k]`: experts that load all experts alike, spread over all ranks.

    Token t takes groups t, t + 1, ... (modulo their number) and in each the experts o, o + step and
    so on, with o advancing once all groups had their turn. Without groups all are one group.
    """
    groups = routing.groups if routing.groups > 1 else 1
    parts = routing.top_groups if groups > 1 else 1
    size, each = routing.num_experts // groups, routing.top_k // parts
    step = size // each
    group = (token[:, None] + torch.arange(parts)) % groups
    inside = (token // groups % step)[:, None] + torch.arange(each) * step
    return (group[:, :, None] * size + inside[:, None, :]).flatten(1)


def make_correction(case: LayerCase) -> torch.Tensor | None:
    """float32 `[num_experts]` on the CPU, where the routing has one: small, equal on all ranks."""
    routing = case.config.routing
    if not routing.correction:
        return None
    generator = torch.Generator().manual_seed(case.seed + 17)
    return torch.randn(routing.num_experts, generator=generator) * 0.01


@dataclass(frozen=True, slots=True)
class Load:
    """One size's work.

    most, mean: rows of the fullest expert, and of all on average.   hit: experts that have rows.
    hbm_bytes: least bytes that the busiest rank moves through its memory: the weights of its
        experts that have rows and of the shared one, each row that arrives read once and answered
        once, its own tokens read and written once.
    wire_bytes: bytes off or onto the busiest rank, out and back, one row for each token and rank.
    """

    most: int
    mean: float
    hit: int
    hbm_bytes: int
    wire_bytes: int

    @property
    def imbalance(self) -> float:
        """Rows of the fullest expert over the mean."""
        return self.most / self.mean


def load_of(case: LayerCase, tokens: int) -> Load:
    """Route every rank's logits on the CPU and count."""
    config, correction = case.config, make_correction(case)
    ids = [
        route_in_torch(config.routing, make_logits(case, tokens, rank), correction).ids
        for rank in range(case.ranks)
    ]
    return count(case, ids)


def count(case: LayerCase, ids: list[torch.Tensor]) -> Load:
    """The load of given ids; `ids[r]` is rank r's `[tokens, top_k]`."""
    config, ranks = case.config, case.ranks
    experts, hidden, itemsize = config.routing.num_experts, config.hidden, config.dtype.itemsize
    rows = torch.bincount(torch.cat(ids).flatten().long(), minlength=experts)
    owner = torch.tensor(Placement.blocks(experts, ranks).ranks)
    hit = torch.bincount(owner, weights=(rows > 0).double(), minlength=ranks).long()
    arrivals = token_rows(ids, experts).sum(dim=0)
    sent = row_bytes(hidden, itemsize, case.wire)
    answered = hidden * itemsize
    own = torch.tensor([len(each) for each in ids]) * 2 * answered
    memory = hit * expert_bytes(config, case.dtype) + arrivals * (sent + answered) + own
    wire = busiest(token_rows(ids, experts))
    back = row_bytes(hidden, itemsize, "fp8" if case.fp8_back else None)
    return Load(
        most=int(rows.max()),
        mean=float(rows.double().mean()),
        hit=int((rows > 0).sum()),
        hbm_bytes=int(memory.max()) + shared_bytes(config, case.dtype),
        wire_bytes=wire * (sent + back),
    )
