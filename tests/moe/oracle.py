# SPDX-License-Identifier: Apache-2.0
"""Routing as plain loops over Python numbers, independent of weft.moe.routing."""

from __future__ import annotations

import math

import torch

from weft.moe.routing.router import Routing


def sort_best_first(values: list[float]) -> list[int]:
    """Return indices by value, NaN before all numbers, equal values in their order."""
    return sorted(
        range(len(values)),
        key=lambda i: (0, 0.0, i) if math.isnan(values[i]) else (1, -values[i], i),
    )


def in_float32(a: float, b: float) -> float:
    return float(torch.tensor(a) + torch.tensor(b))


def choose(routing: Routing, choice: list[float]) -> list[int]:
    """Return one token's experts, best first."""
    size = routing.num_experts // routing.groups
    goodness = []
    for group in range(routing.groups):
        members = choice[group * size : (group + 1) * size]
        first, *rest = (members[i] for i in sort_best_first(members)[: routing.group_best])
        goodness.append(in_float32(first, rest[0]) if rest else first)
    allowed = set(sort_best_first(goodness)[: routing.top_groups])
    limited = [v if e // size in allowed else -math.inf for e, v in enumerate(choice)]
    return sort_best_first(limited)[: routing.top_k]


def weigh(routing: Routing, logits: list[float], chosen: list[int]) -> list[float]:
    """Return one token's weights in double precision; logits are finite."""
    if routing.score == "sigmoid":
        raw = [1 / (1 + math.exp(-logits[e])) for e in chosen]
    elif routing.score == "sqrtsoftplus":
        raw = [math.sqrt(math.log1p(math.exp(logits[e]))) for e in chosen]
    else:
        among = chosen if routing.score == "softmax-chosen" else range(len(logits))
        top = max(logits[e] for e in among)
        whole = sum(math.exp(logits[e] - top) for e in among)
        raw = [math.exp(logits[e] - top) / whole for e in chosen]
    if routing.renormalise and routing.score != "softmax-chosen":
        total = sum(raw) + 1e-20
        raw = [r / total for r in raw]
    return [r * routing.scale for r in raw]
