# SPDX-License-Identifier: Apache-2.0
"""Rounds of the emulated all-to-all whose every byte is known, in every way that a round can go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import weft
from tests.rounds import Round, bits
from weft.alltoall.config import AllToAllConfig
from weft.shape import Shape

RANKS, TOKENS = 3, 8


@dataclass(frozen=True)
class Case:
    """Rounds of an all-to-all.

    extra: bytes of a token's row in further payloads.   lost: some ids name no expert.
    cut: in every second round the device knows of half of the tokens only.
    """

    round: Round
    options: dict[str, Any] = field(default_factory=dict)
    extra: tuple[int, ...] = ()
    lost: bool = False
    cut: bool = False

    @property
    def sizes(self) -> dict[str, Any]:
        """What the kernels are made for."""
        r = self.round
        payloads = [weft.Payload((r.hidden,), r.dtype)]
        payloads += [weft.Payload((size,), torch.uint8) for size in self.extra]
        sizes = {"max_tokens": TOKENS, "top_k": r.top_k, "num_experts": r.experts}
        return sizes | {"hidden": r.hidden, "dtype": r.dtype, "payloads": payloads} | self.options

    @property
    def shape(self) -> Shape:
        """The same as kernels are told it."""
        return AllToAllConfig.of(ranks=RANKS, **self.sizes).shape

    def open(self, group: weft.Group, **more: Any) -> weft.AllToAll:
        """A new all-to-all, which may wait long."""
        options = {"timeout": 60.0, "first_timeout": 60.0, "split_phase": True, **more}
        return weft.AllToAll(group, **self.sizes, **options)


CASES = {
    # Planes of every width of a store, 24 bytes and less beside a row of 65 vectors.
    "pull": Case(
        Round((5, 8, 0), top_k=3, experts=9, hidden=520, add=True),
        {"stats": 70, "expert_map": [2, 0, 1, 1, 0, 2, 2, 1, 0]},
        (20, 7, 6, 24),
        lost=True,
        cut=True,
    ),
    "push": Case(
        Round((8, 1, 4), top_k=5, experts=10, hidden=136, dtype=torch.float16, router="holes"),
        {"combine": "push", "stats": 3},
        (3,),
        cut=True,
    ),
    "fp8": Case(
        Round((3, 0, 8), top_k=4, experts=9, hidden=640, add=True),
        {"combine_dtype": "fp8", "quantize": "fp8"},
        (12, 5),
    ),
    "mxfp8 of fp32": Case(
        Round((2, 6, 3), experts=6, hidden=384, dtype=torch.float32, ids_dtype=torch.int64),
        {"quantize": "mxfp8"},
        (1,),
        lost=True,
        cut=True,
    ),
}
CHOICES = Case(
    Round((8, 3, 5), top_k=5, experts=9, hidden=264, router="holes", dtype=torch.float16, add=True),
    {"combine": "gemm_push"},
)
# Plain rows, whose slots move from round to round.
MOVING = Case(Round((8, 3, 5), experts=9, hidden=64))


def tokens_of(case: Case, seed: int) -> Round:
    """Each rank brings what another brought before: fewer tokens, or more, or none."""
    r = case.round
    turn = seed % RANKS
    return r.next(seed=seed, tokens=r.tokens[turn:] + r.tokens[:turn])


@dataclass(frozen=True)
class Sent:
    """What one rank hands over."""

    payloads: list[torch.Tensor]
    ids: torch.Tensor
    weights: torch.Tensor
    add: torch.Tensor
    stats: torch.Tensor

    def first(self, count: int) -> Sent:
        """The tokens that count."""
        rest = (self.ids[:count], self.weights[:count], self.add[:count], self.stats)
        return Sent([p[:count] for p in self.payloads], *rest)


def sent_by(case: Case, seed: int, rank: int) -> Sent:
    x, ids, weights, add = tokens_of(case, seed).of(rank, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    rows = [
        torch.randint(0, 256, (len(x), size), generator=generator, dtype=torch.uint8)
        for size in case.extra
    ]
    if case.lost and len(x):
        ids[0, 0], ids[-1, -1] = case.round.experts, -7
    if ids.dtype == torch.int64 and len(x):
        ids[0, 1] = 1 << 40
    # Rows of very different sizes: a scale of another block is far off.
    x = x * torch.logspace(-3, 3, case.round.hidden).to(x.dtype)
    stats = torch.randint(-(2**31), 2**31, (case.options.get("stats", 0),), generator=generator)
    return Sent([x, *rows], ids, weights, add, stats.int())


def arriving(case: Case, sent: Sent) -> list[torch.Tensor]:
    """The payloads as they come: the first one quantised where the case asks for it."""
    kind = case.options.get("quantize")
    if kind is None:
        return sent.payloads
    numbers, scales = weft.reference.quantize(sent.payloads[0], kind)
    # Torch moves no rows of exponents.
    scales = scales.view(torch.uint8) if kind == "mxfp8" else scales
    return [numbers, scales, *sent.payloads[1:]]


def answer(case: Case, received: weft.Received) -> torch.Tensor:
    """Experts that return their token, weighted; NaN where there is none."""
    if "quantize" not in case.options:
        return weft.reference.identity_experts(received, case.round.dtype)
    scales = received.payloads[1]
    scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    x = weft.reference.dequantize(received.payloads[0], scales)
    plain = weft.Received((x,), received.ids, received.weights, received.counts)
    return weft.reference.identity_experts(plain, case.round.dtype)


def one_round(a2a: weft.AllToAll, case: Case, seed: int) -> int:
    """Run one round; compare every byte that is defined, and every one that must not change.

    Returns how many rows came here.
    """
    ranks, group = range(a2a.group.size), a2a.group
    sent = [sent_by(case, seed, rank) for rank in ranks]
    mine = sent[a2a.rank]
    cut = case.cut and seed % 2 == 1
    counted = [s.first(len(s.ids) // 2) if cut else s for s in sent]
    group.barrier()
    for plane in a2a._received.payloads:
        plane.view(torch.uint8).fill_(0xAA)
    group.barrier()
    options: dict[str, Any] = {"stats": mine.stats} if len(mine.stats) else {}
    if cut:
        options["num_tokens"] = torch.tensor([len(counted[a2a.rank].ids)], dtype=torch.int32)
    if seed % 2:
        received = a2a.dispatch(mine.payloads, mine.ids, mine.weights, **options)
    else:
        a2a.dispatch_send(mine.payloads, mine.ids, mine.weights, **options)
        received = a2a.dispatch_recv()
    wanted = [
        weft.reference.dispatch(
            [arriving(case, s) for s in counted],
            [s.ids for s in counted],
            [s.weights for s in counted],
            a2a.placement,
            rank=rank,
            max_tokens=TOKENS,
            stats=[s.stats for s in sent] if options.get("stats") is not None else None,
        )
        for rank in ranks
    ]
    compare(received, wanted[a2a.rank])
    a2a.output().copy_(answer(case, received))
    out = torch.full(mine.add.shape, float("nan"), dtype=mine.add.dtype)
    add = mine.add if case.round.add else None
    if seed % 2:
        a2a.combine(out=out, add=add)
    else:
        a2a.combine_send()
        a2a.combine_recv(out=out, add=add)
    count = len(mine.ids)
    rows = [answer(case, w)[a2a.rank, :count] for w in wanted]
    if case.options.get("combine_dtype") == "fp8":
        kept = [weft.reference.quantize(row.nan_to_num(0.0), "fp8") for row in rows]
        rows = [weft.reference.dequantize(*k) for k in kept]
    carries = [(w.ids[a2a.rank, :count] >= 0).any(dim=1) for w in wanted]
    total = weft.reference.combine(rows, carries, add=add, dtype=case.round.dtype)
    assert torch.equal(bits(out), bits(total))
    return int((wanted[a2a.rank].ids >= 0).any(dim=2).sum())


def compare(received: weft.Received, wanted: weft.Received) -> None:
    """Of slots without a token nothing was written but the ids."""
    assert torch.equal(received.counts, wanted.counts)
    assert torch.equal(received.ids, wanted.ids)
    if wanted.stats is not None:
        assert received.stats is not None
        assert torch.equal(received.stats, wanted.stats)
    carries = (wanted.ids >= 0).any(dim=2)
    assert torch.equal(received.weights[carries], wanted.weights[carries])
    for got, meant in zip(received.payloads, wanted.payloads, strict=True):
        assert torch.equal(bits(got[carries]), bits(meant[carries]))
        assert bool((got[~carries].contiguous().view(torch.uint8) == 0xAA).all())
