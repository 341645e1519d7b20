# SPDX-License-Identifier: Apache-2.0
"""Rounds of dispatch and combine whose every byte is known: what all device kinds run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch

import weft
from weft import reference
from weft.errors import UsageError


@dataclass(frozen=True)
class Round:
    """One round of all ranks, made from a seed: any rank can compute what every other one sends."""

    tokens: tuple[int, ...]
    top_k: int = 4
    experts: int = 16
    hidden: int = 64
    dtype: torch.dtype = torch.bfloat16
    router: str = "random"
    seed: int = 0
    weighted: bool = True
    add: bool = False
    ids_dtype: torch.dtype = torch.int32

    def next(self, **changes: object) -> Round:
        return replace(self, **changes)  # type: ignore[arg-type]

    def sizes(self, max_tokens: int) -> dict[str, Any]:
        """What an exchange of these rows is made for."""
        return {
            "max_tokens": max_tokens,
            "top_k": self.top_k,
            "num_experts": self.experts,
            "hidden": self.hidden,
        }

    def of(self, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """(x, ids, weights, add) of one rank."""
        generator = torch.Generator(device=device)
        generator.manual_seed(self.seed * 1009 + rank)
        tokens = self.tokens[rank]
        shape = (tokens, self.hidden)
        x = torch.randn(shape, generator=generator, device=device).to(self.dtype)
        weights = torch.rand((tokens, self.top_k), generator=generator, device=device)
        add = torch.randn(shape, generator=generator, device=device).to(self.dtype)
        return x, self._ids(rank, generator).to(self.ids_dtype), weights, add

    def _ids(self, rank: int, generator: torch.Generator) -> torch.Tensor:
        device, tokens = generator.device, self.tokens[rank]
        scores = torch.rand((tokens, self.experts), generator=generator, device=device)
        if self.router == "perfect":
            # Every token to as many ranks as it can reach, evenly.
            ranks = len(self.tokens)
            per_rank = self.experts // ranks
            k = torch.arange(self.top_k, device=device)[None, :]
            t = torch.arange(tokens, device=device)[:, None]
            return (k + t + rank) % ranks * per_rank + (k // ranks + t) % per_rank
        if self.router == "one-hot":
            # As many experts of the last rank as there are, for every token.
            return (self.experts - 1 - torch.arange(self.top_k, device=device)).repeat(tokens, 1)
        if self.router == "zipf":
            scores = scores / torch.arange(1, self.experts + 1, device=device)
        ids = scores.topk(self.top_k, dim=1).indices if tokens else scores[:, : self.top_k].long()
        if self.router == "holes":
            hole = torch.rand(ids.shape, generator=generator, device=device) < 0.5
            ids = torch.where(hole, -1, ids)
        return ids


def play(a2a: weft.AllToAll, case: Round, *, poison: bool = True, rows: int | None = None) -> None:
    """Run one round; compare every byte that is defined, and every one that must not change."""
    group = a2a.group
    ranks = range(group.size)
    inputs = [case.of(r, group.device) for r in ranks]
    x, ids, weights, add = inputs[group.rank]
    given = weights if case.weighted else None
    settle(group.device)
    group.barrier()
    inbox = a2a._received.x
    if poison:
        inbox.view(torch.uint8).fill_(0xFF)  # NaN in every float type
        a2a.output().fill_(float("nan"))
        settle(group.device)
        group.barrier()
    received = a2a.dispatch(x, ids, given, rows=rows)
    expected = reference.dispatch(
        [[i[0]] for i in inputs],
        [i[1] for i in inputs],
        [i[2] if case.weighted else None for i in inputs],
        a2a.placement,
        rank=group.rank,
        max_tokens=rows or a2a.max_tokens,
    )
    assert torch.equal(received.counts, expected.counts), (received.counts, expected.counts)
    assert torch.equal(received.ids, expected.ids)
    carries = (expected.ids >= 0).any(dim=2)
    assert torch.equal(received.weights[carries], expected.weights[carries])
    assert torch.equal(bits(received.x[carries]), bits(expected.x[carries]))
    if poison:
        untouched = received.x[~carries].contiguous().view(torch.uint8)
        assert bool((untouched == 0xFF).all()), "a slot that carries no token was written"
    y = reference.identity_experts(received, case.dtype)
    a2a.output(rows).copy_(y)
    out = torch.full_like(x, float("nan"))
    result = a2a.combine(out=out, add=add if case.add else None)
    wanted = reference.identity_round_trip(
        x, ids, given, a2a.placement, ranks=group.size, add=add if case.add else None
    )
    assert torch.equal(bits(result), bits(wanted))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, whatever the strides: NaN equals itself and -0 differs from 0."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return plain.copy_(tensor).view(torch.uint8)


def settle(device: torch.device) -> None:
    """Wait for a GPU; CPU ranks have ended what they were asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def drop_refusals(operator: Any) -> None:
    """Ask for what a test's wrong input has left, which closing would raise."""
    with contextlib.suppress(UsageError):
        operator.check()


def combining(way: str) -> dict[str, Any]:
    """The options of an AllToAll whose Shape has this `way`."""
    if way == "fp8":
        return {"combine_dtype": "fp8"}
    return {"combine": "gemm_push" if way == "choices" else way}
