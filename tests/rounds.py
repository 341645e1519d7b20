# SPDX-License-Identifier: Apache-2.0
"""Rounds of dispatch and combine whose every byte is known, for all device kinds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import weft
from weft import reference
from weft.errors import UsageError


@dataclass(frozen=True)
class Round:
    """One round of all ranks, computed from a seed: each rank can compute every other's rows.

    extra: bytes of a token's row in each further payload.   lost: some ids name no expert.
    options: of the AllToAll, as far as they decide what arrives.
    """

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
    extra: tuple[int, ...] = ()
    lost: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def next(self, **changes: object) -> Round:
        return replace(self, **changes)  # type: ignore[arg-type]

    def turned(self, seed: int) -> Round:
        turn = seed % len(self.tokens)
        return self.next(seed=seed, tokens=self.tokens[turn:] + self.tokens[:turn])

    def living(self, ranks: Iterable[int]) -> Round:
        return self.next(tokens=tuple(n if r in ranks else 0 for r, n in enumerate(self.tokens)))

    def sizes(self, max_tokens: int) -> dict[str, Any]:
        return {
            "max_tokens": max_tokens,
            "top_k": self.top_k,
            "num_experts": self.experts,
            "hidden": self.hidden,
        }

    def open(self, group: weft.Group, max_tokens: int = 16, **more: Any) -> weft.AllToAll:
        payloads = [weft.Payload((self.hidden,), self.dtype)]
        payloads += [weft.Payload((size,), torch.uint8) for size in self.extra]
        kwargs: dict[str, Any] = {"dtype": self.dtype, "payloads": payloads, **self.options, **more}
        return weft.AllToAll(group, **self.sizes(max_tokens), **kwargs)

    def inputs_of(self, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return (x, ids, weights, add) of one rank."""
        generator = torch.Generator(device=device)
        generator.manual_seed(self.seed * 1009 + rank)
        tokens = self.tokens[rank]
        shape = (tokens, self.hidden)
        x = torch.randn(shape, generator=generator, device=device)
        if "quantize" in self.options:  # the scale of another block is far off
            x = x * torch.logspace(-3, 3, self.hidden, device=device)
        weights = torch.rand((tokens, self.top_k), generator=generator, device=device)
        add = torch.randn(shape, generator=generator, device=device).to(self.dtype)
        ids = self._ids(rank, generator).to(self.ids_dtype)
        if self.lost and tokens:
            ids[0, 0], ids[-1, -1] = self.experts, -7
            if ids.dtype == torch.int64:
                ids[0, 1] = 1 << 40
        return x.to(self.dtype), ids, weights, add

    def rows_of(self, rank: int, device: torch.device) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 64 + rank)
        sizes = [(self.tokens[rank], size) for size in self.extra]
        rows = [torch.randint(0, 256, s, generator=generator, dtype=torch.uint8) for s in sizes]
        return [row.to(device) for row in rows]

    def stats_of(self, rank: int, count: int, device: torch.device) -> torch.Tensor:
        """Return int32 `[count]` of one rank, using all 32 bits."""
        generator = torch.Generator().manual_seed(self.seed * 64 + rank)
        return torch.randint(-(2**31), 2**31, (count,), generator=generator).int().to(device)

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


def play(
    a2a: weft.AllToAll,
    case: Round,
    *,
    poison: bool = True,
    rows: int | None = None,
    halves: bool = False,
    counts: Sequence[int | None] | None = None,
    living: Sequence[int] | None = None,
) -> int:
    """Run one round; compare every defined byte, and check that all others are unchanged.

    halves: call each phase in two halves.   living: the ranks that take part; default all.
    counts: of each rank, how many tokens count, which the device knows alone; None for all.

    Returns how many rows arrived here.
    """
    group, device, shape = a2a.group, a2a.group.device, a2a.config.shape
    ranks, rank, max_tokens = range(group.size), group.rank, rows or a2a.max_tokens
    case = case if living is None else case.living(living)
    inputs = [case.inputs_of(r, device) for r in ranks]
    x, ids, weights, add = inputs[rank]
    used = [
        n if c is None else min(max(c, 0), n)
        for n, c in zip(case.tokens, counts or [None] * group.size, strict=True)
    ]
    options: dict[str, Any] = {"rows": rows}
    if counts is not None and counts[rank] is not None:
        options["num_tokens"] = torch.tensor([counts[rank]], dtype=torch.int32, device=device)
    numbers, span = a2a.config.stats, a2a.config.span
    stats = [case.stats_of(r, numbers, device) for r in ranks] if numbers else None
    if stats is not None:
        options["stats"] = stats[rank].clone()
    synchronize(device)
    if poison:
        group.barrier()
        for plane in a2a.latest_received.payloads:
            plane.view(torch.uint8).fill_(MARK)
        if shape.combine != "gemm_push":
            a2a.output().fill_(float("nan"))
        synchronize(device)
        group.barrier()
    passed = weights if case.weighted else None
    payloads = [x, *case.rows_of(rank, device)]
    if halves:
        a2a.dispatch_send(payloads, ids, passed, **options)
        if stats is not None:
            options["stats"].zero_()  # it has been read, or is before this in the stream
        received = a2a.dispatch_recv()
    else:
        received = a2a.dispatch(payloads, ids, passed, **options)
    kind = None if shape.quant == "none" else shape.quant
    kind = kind if span is None else span.quantize  # rows are quantised before they cross hosts
    sent = [_arriving([inputs[r][0], *case.rows_of(r, device)], kind, used[r]) for r in ranks]
    routed = [_dropped(i[1][:n], a2a, living) for i, n in zip(inputs, used, strict=True)]
    expected = reference.dispatch(
        sent,
        routed,
        [i[2][:n] if case.weighted else None for i, n in zip(inputs, used, strict=True)],
        a2a.placement,
        rank=rank,
        max_tokens=max_tokens,
        stats=stats,
    )
    order = list(a2a.sources)
    assert torch.equal(received.counts, expected.counts[order]), (received.counts, expected.counts)
    assert torch.equal(received.ids, expected.ids[order])
    if stats is not None:
        assert received.stats is not None
        assert expected.stats is not None
        assert torch.equal(received.stats, expected.stats[order])
    carries = (received.ids >= 0).any(dim=2)
    assert torch.equal(received.weights[carries], expected.weights[order][carries])
    for got, plane in zip(received.payloads, expected.payloads, strict=True):
        assert torch.equal(bits(got[carries]), bits(plane[order][carries]))
        if poison:
            untouched = got[~carries].contiguous().view(torch.uint8)
            assert bool((untouched == MARK).all()), "a slot that carries no token was written"
    y = expert_answers(received, kind, case.dtype)
    out = torch.full_like(x, float("nan"))
    more = add if case.add else None
    own = (y,) if case.seed % 2 else ()  # experts return a tensor of theirs, or write in place
    if not own:
        a2a.output(rows).copy_(y)
    if halves:
        a2a.combine_send(*own)
        a2a.combine_recv(out=out, add=more)
    else:
        assert a2a.combine(*own, out=out, add=more) is out
    x = x if kind is None else reference.dequantize(*reference.quantize(x, kind)).to(x.dtype)
    none = torch.full_like(ids[used[rank] :], -1)
    wanted = reference.identity_round_trip(
        x,
        torch.cat((routed[rank], none)),
        passed,
        a2a.placement,
        ranks=group.size,
        hosts=group.host_ranks,
        add=more,
        combine_dtype="fp8" if shape.combine == "push_fp8" else None,
    )
    assert torch.equal(bits(out), bits(wanted))
    return int(carries.sum())


MARK = 0xFF  # NaN in every float type, where no rank may write


def _arriving(rows: list[torch.Tensor], kind: str | None, count: int) -> list[torch.Tensor]:
    """Return the payloads as delivered: the first one quantised if the exchange quantises."""
    if kind is not None:
        rows = [*reference.quantize(rows[0], kind), *rows[1:]]
    # Torch moves no rows of exponents.
    return [(r.view(torch.uint8) if r.dtype == torch.float8_e8m0fnu else r)[:count] for r in rows]


def _dropped(ids: torch.Tensor, a2a: weft.AllToAll, living: Sequence[int] | None) -> torch.Tensor:
    return ids if living is None else drop_dead_ids(ids, a2a.placement.ranks, living)


def drop_dead_ids(ids: torch.Tensor, owners: Iterable[int], living: Iterable[int]) -> torch.Tensor:
    """Return ids with -1 for experts of ranks that are gone. owners: the rank of each expert."""
    kept = torch.tensor([rank in set(living) for rank in owners], device=ids.device)
    known = (ids >= 0) & (ids < len(kept))
    gone = known & ~kept[torch.where(known, ids, 0).long()]
    return torch.where(gone, -1, ids)


def expert_answers(received: weft.Received, kind: str | None, dtype: torch.dtype) -> torch.Tensor:
    if kind is not None:
        numbers, scales = received.payloads[:2]
        scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
        x = reference.dequantize(numbers, scales).to(dtype)
        received = weft.Received((x,), received.ids, received.weights, received.counts)
    return reference.identity_experts(received, dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, for any strides: NaN equals itself, and -0 differs from 0."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return plain.copy_(tensor).view(torch.uint8)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def drop_refusals(operator: Any) -> None:
    """Raise and drop the errors of a test's invalid input, which `close` would raise."""
    with contextlib.suppress(UsageError):
        operator.check()


def combine_options(way: str) -> dict[str, Any]:
    if way == "fp8":
        return {"combine_dtype": "fp8"}
    return {"combine": "gemm_push" if way == "choices" else way}
