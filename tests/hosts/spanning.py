# SPDX-License-Identifier: Apache-2.0
"""Groups of several hosts: here ranks of one machine that WEFT_HOST tells apart."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import weft
from tests.ranks import Test, on_ranks
from tests.rounds import Round, bits
from weft import reference
from weft.errors import RendezvousFailed
from weft.hosts.rail import Pending, Slots

# `make test` plays a few rounds of each kind; the rest runs when what it reads has changed.
campaign = pytest.mark.slow


def on_hosts(
    group: weft.Group, hosts: int | list[int], body: Callable[..., Any], *args: Any
) -> Any:
    """Run `body(spanning, *args)` on ranks that weft.launch started, as ranks of several hosts.

    hosts: their number, of as many ranks each, or the host of each rank.
    """
    of_rank = [r * hosts // group.size for r in range(group.size)] if type(hosts) is int else hosts
    assert isinstance(of_rank, list)
    os.environ["WEFT_HOST"] = f"host-{of_rank[group.rank]}"
    with weft.Group.from_torch(
        group.process_group(), device=group.device, timeout=600.0
    ) as spanning:
        assert spanning.hosts == len(set(of_rank))
        result = body(spanning, *args)
        # Rank 0 serves the store in which others look for the cause of a failure.
        with contextlib.suppress(RendezvousFailed):
            group.barrier(timeout=60.0)
        return result


def across(
    hosts: int | list[int] | str, count: int | str = 4, **options: Any
) -> Callable[[Test], Test]:
    """`on_ranks` for CPU ranks of several hosts, whose group spans these.

    hosts: as of `on_hosts`, or the name of the parameter that has it.
    """

    def decorate(body: Test) -> Test:
        @functools.wraps(body)
        def spread(group: weft.Group, **given: Any) -> None:
            of_rank = given[hosts] if isinstance(hosts, str) else hosts
            on_hosts(group, of_rank, functools.partial(body, **given))

        return on_ranks(count, "cpu", **options)(spread)

    return decorate


@contextlib.contextmanager
def lying(
    a2a: weft.AllToAll | weft.LowLatencyAllToAll, tell: Callable[[Slots, int], None]
) -> Iterator[None]:
    """Let `tell(slots, own)` change what this rank sends to others over its rail in a dispatch."""
    rail, own = a2a._rail, a2a.group.host
    assert rail is not None
    start = rail._start

    def started(pairs: Any) -> Pending:
        slots = next(each for each in rail._views.values() if each.out is pairs)
        before = slots.counts[own].clone(), slots.ids[own].clone()
        tell(slots, own)
        rail._finish(start(pairs))
        slots.counts[own], slots.ids[own] = before
        return Pending([], [])

    rail._start = started  # type: ignore[method-assign]
    try:
        yield
    finally:
        rail._start = start  # type: ignore[method-assign]


def play(
    a2a: weft.AllToAll,
    case: Round,
    *,
    quantize: str | None = None,
    combine_dtype: str | None = None,
    rows: int | None = None,
    halves: bool = False,
    num_tokens: list[int] | None = None,
    stats: list[torch.Tensor] | None = None,
) -> None:
    """Play one round and compare what arrives and the sums byte by byte."""
    group, device = a2a.group, a2a.group.device
    inputs = [case.of(r, device) for r in range(group.size)]
    x, ids, weights, add = inputs[group.rank]
    scale, more = (weights if case.weighted else None), (add if case.add else None)
    sent = num_tokens or list(case.tokens)
    count = None
    if num_tokens is not None:
        count = torch.tensor([num_tokens[group.rank]], dtype=torch.int32, device=device)
    own = None if stats is None else stats[group.rank]
    options = {"num_tokens": count, "stats": own, "rows": rows}
    if halves:
        a2a.dispatch_send(x, ids, scale, **options)  # type: ignore[arg-type]
        received = a2a.dispatch_recv()
    else:
        received = a2a.dispatch(x, ids, scale, **options)  # type: ignore[arg-type]
    payloads = [reference.quantize(i[0], quantize) if quantize else (i[0],) for i in inputs]
    expected = reference.dispatch(
        [
            [plane[:n].view(torch.uint8) for plane in planes]
            for planes, n in zip(payloads, sent, strict=True)
        ],
        [i[1][:n] for i, n in zip(inputs, sent, strict=True)],
        [i[2][:n] if case.weighted else None for i, n in zip(inputs, sent, strict=True)],
        a2a.placement,
        rank=group.rank,
        max_tokens=rows or a2a.max_tokens,
        stats=stats,
    )
    order = list(a2a.sources)
    assert received.counts.tolist() == expected.counts[order].tolist()
    assert torch.equal(received.ids, expected.ids[order])
    if stats is not None:
        assert received.stats is not None
        assert expected.stats is not None
        assert torch.equal(received.stats, expected.stats[order])
    carries = (received.ids >= 0).any(dim=2)
    assert torch.equal(received.weights[carries], expected.weights[order][carries])
    for got, want in zip(received.payloads, expected.payloads, strict=True):
        assert torch.equal(bits(got[carries]), bits(want[order][carries]))
    if quantize:
        x = reference.dequantize(*payloads[group.rank]).to(case.dtype)
        planes = zip(expected.payloads, payloads[0], strict=True)
        q, scales = (got.view(sent.dtype) for got, sent in planes)
        wide = reference.dequantize(q, scales).to(case.dtype)[order]
        received = weft.Received((wide,), received.ids, received.weights, received.counts)
    y = reference.identity_experts(received, case.dtype)
    if halves:
        a2a.combine_send(y)
        out = a2a.combine_recv(add=more)
    else:
        out = a2a.combine(y, add=more)
    counts = torch.arange(len(ids), device=device)[:, None] < sent[group.rank]
    ids = torch.where(counts, ids, -1)
    wanted = reference.identity_round_trip(
        x,
        ids,
        scale,
        a2a.placement,
        ranks=group.size,
        hosts=group.host_ranks,
        add=more,
        combine_dtype=combine_dtype,
    )
    assert torch.equal(bits(out), bits(wanted))
