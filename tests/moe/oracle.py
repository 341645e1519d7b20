"""Routing by plain loops over Python numbers: slow, and nothing in common with weft.moe.router."""

from __future__ import annotations

import math

import torch

from weft.moe.router import Routing


def sort_best_first(values: list[float]) -> list[int]:
    """Places by value, NaN as the worst, equal ones in their order."""
    clean = [-math.inf if math.isnan(v) else v for v in values]
    return sorted(range(len(clean)), key=lambda i: (-clean[i], i))


def in_float32(a: float, b: float) -> float:
    return float(torch.tensor(a) + torch.tensor(b))


def choose(routing: Routing, choice: list[float]) -> list[int]:
    """One token's experts, best first."""
    size = routing.num_experts // routing.groups
    clean = [-math.inf if math.isnan(v) else v for v in choice]
    goodness = []
    for group in range(routing.groups):
        members = sorted(clean[group * size : (group + 1) * size], reverse=True)
        first, *rest = members[: routing.group_best]
        goodness.append(in_float32(first, rest[0]) if rest else first)
    allowed = set(sort_best_first(goodness)[: routing.top_groups])
    ranking = [e for e in sort_best_first(choice) if e // size in allowed]
    return ranking[: routing.top_k]


def weigh(routing: Routing, logits: list[float], chosen: list[int]) -> list[float]:
    """One token's weights in double precision; logits are finite."""
    if routing.score == "sigmoid":
        raw = [1 / (1 + math.exp(-logits[e])) for e in chosen]
    else:
        among = chosen if routing.score == "softmax-chosen" else range(len(logits))
        top = max(logits[e] for e in among)
        whole = sum(math.exp(logits[e] - top) for e in among)
        raw = [math.exp(logits[e] - top) / whole for e in chosen]
    if routing.renormalise and routing.score != "softmax-chosen":
        total = sum(raw) + 1e-20
        raw = [r / total for r in raw]
    return [r * routing.scale for r in raw]
