# SPDX-License-Identifier: Apache-2.0
"""Rules and logits that a router may meet, and what its kernel must make of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from weft.moe import MODELS, Routed, Routing
from weft.moe.router import route_in_torch

RULES = {name: config.routing for name, config in MODELS.items()} | {
    "odd sizes": Routing(61, 9, renormalise=False, scale=2.5),
    "everyone": Routing(5, 5, score="softmax-chosen", scale=0.5),
    "one expert": Routing(1, 1),
    "the most": Routing(1024, 32, score="softmax", groups=64, top_groups=8),
    "softmax, corrected": Routing(96, 6, correction=True, groups=6, top_groups=3, scale=1.5),
    "best of a group": Routing(40, 4, score="sigmoid", groups=5, top_groups=2, group_best=1),
    "many groups": Routing(120, 7, score="sigmoid", correction=True, groups=40, top_groups=9),
    "groups of one": Routing(
        36, 5, score="sigmoid", groups=36, top_groups=7, group_best=1, renormalise=False
    ),
}
# Few different numbers, so that ties are common. None is another's negative: sigmoid(x) +
# sigmoid(-x) would hang on a last bit.
NUMBERS = [-3.0, -1.5, -0.0, 0.0, 0.25, 0.5, 1.0, 4.0]
ODD = [*NUMBERS, math.nan, -math.nan, -math.inf, math.inf, 100.0, -200.0]
ULPS = 16  # weights: two exponentials of a last bit each, and the order of a sum of up to 1024

Run = Callable[
    [Routing, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    Routed,
]


class Batch(NamedTuple):
    """Logits of one kind. exact: no choice hangs on a last bit, so ids must be equal."""

    kind: str
    logits: torch.Tensor
    correction: torch.Tensor | None
    exact: bool


def batches(routing: Routing, tokens: int, seed: int = 0) -> Iterator[Batch]:
    """Ties everywhere; NaN and infinities; all one number; random ones; narrow types; strides."""
    generator = torch.Generator().manual_seed(seed * 101 + routing.num_experts)
    shape = (tokens, routing.num_experts)

    def among(numbers: list[float], size: tuple[int, ...]) -> torch.Tensor:
        picks = torch.randint(len(numbers), size, generator=generator)
        return torch.tensor(numbers)[picks]

    def bias(numbers: list[float]) -> torch.Tensor | None:
        return among(numbers, shape[1:]) if routing.correction else None

    by_logits = not (routing.correction or routing.groups > 1)
    normal = torch.randn(shape, generator=generator) * 2
    small = torch.randn(shape[1:], generator=generator) * 0.1 if routing.correction else None
    yield Batch("ties", among(NUMBERS, shape), bias([0.0, 0.25, -0.0]), True)
    rare = among(ODD, shape).where(torch.rand(shape, generator=generator) < 0.05, normal)
    yield Batch("some odd", rare, small, by_logits)
    yield Batch("odd", among(ODD, shape), bias([0.0, 0.25, -8.0]), True)
    worst = bias([0.0, -math.inf, -8.0, math.nan])
    yield Batch("odd corrections", among(NUMBERS, shape), worst, True)
    if routing.correction:  # nobody may stand in for experts that nothing speaks for
        for number in (-8.0, -math.inf):
            lowered = torch.full(shape[1:], number)
            yield Batch(f"corrections of {number}", among(NUMBERS, shape), lowered, True)
    for number in (0.0, -math.inf, math.inf, math.nan, -200.0):
        yield Batch(f"all {number}", torch.full(shape, number), bias([0.0]), True)
    yield Batch("random", normal, small, by_logits)
    for dtype in (torch.bfloat16, torch.float16):
        yield Batch(str(dtype), normal.to(dtype), small, by_logits)
    wide = torch.full((tokens, 2 * shape[1]), math.nan)
    wide[:, 1::2] = normal
    yield Batch("strided", wide[:, 1::2], small, by_logits)
    yield Batch("transposed", normal.T.contiguous().T, small, by_logits)


def compare(got: Routed, wanted: Routed, *, exact: bool, what: str) -> None:
    """Ids bit for bit, weights within ULPS; without `exact` a row in 1000 may choose otherwise."""
    assert got.ids.dtype == torch.int32
    assert got.weights.dtype == torch.float32
    same = (got.ids == wanted.ids).all(dim=1)
    allowed = 0 if exact else len(same) // 1000
    assert int((~same).sum()) <= allowed, f"{what}: {got.ids[~same][:2]} {wanted.ids[~same][:2]}"
    bound = ULPS * torch.finfo(torch.float32).eps
    torch.testing.assert_close(
        got.weights[same],
        wanted.weights[same],
        rtol=bound,
        atol=torch.finfo(torch.float32).tiny,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def hold_to_torch(run: Run, routing: Routing, tokens: int, device: str, seed: int = 0) -> None:
    """Every batch on a device against torch's operations there, whole and with padding."""
    for kind, there, bias, exact in batches(routing, tokens, seed):
        # A copy to a device need not keep strides.
        logits = torch.empty_strided(
            there.shape, there.stride(), dtype=there.dtype, device=device
        ).copy_(there)
        correction = None if bias is None else bias.to(device)
        wanted = route_in_torch(routing, logits, correction)
        compare(
            run(routing, logits, correction, None), wanted, exact=exact, what=f"{routing}: {kind}"
        )
    for count in (-1, 0, 1, tokens - 1, tokens, tokens + 5):
        real = torch.tensor([count], dtype=torch.int32, device=device)
        wanted = route_in_torch(routing, logits, correction, real)
        got = run(routing, logits, correction, real)
        compare(got, wanted, exact=exact, what=f"{routing}: {count} real")
        assert bool((got.ids[max(count, 0) :] == -1).all())
        assert bool((got.weights[max(count, 0) :] == 0).all())
