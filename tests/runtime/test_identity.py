# SPDX-License-Identifier: Apache-2.0
"""Ranks with different calls all detect it in that call, and none returns a wrong result."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import weft
from tests.ranks import on_ranks
from weft.errors import GeometryMismatch, GroupError, InvalidArgument
from weft.moe import Expert, ExpertWeights, MoEConfig, Routing
from weft.runtime.identity import FLAG_MASK, MAX_ROUNDS, make_allreduce_record, make_dispatch_record

RANKS, HIDDEN, TOKENS = 3, 64, 4
CONFIG = MoEConfig(hidden=HIDDEN, intermediate=32, routing=Routing(6, 2))
SIZES: dict[str, Any] = {"max_tokens": TOKENS, "top_k": 2, "num_experts": 6, "hidden": HIDDEN}
LIMITS: dict[str, Any] = {"timeout": 20.0, "first_timeout": 60.0}
IDS = torch.tensor([[0, 3], [2, 5]])
Call = tuple[int, int]  # the lease that calls, and its argument
Lease = Callable[[int], torch.Tensor]  # an argument of 2 to 12 -> the result


def checked(op: Any, result: torch.Tensor) -> torch.Tensor:
    """Return a copy of a result, after the operator's check of the call."""
    copy = result.to("cpu", copy=True)
    op.check()
    return copy


def exchange_lease(op: weft.AllToAll, x: torch.Tensor, factor: int) -> Lease:
    def call(rows: int) -> torch.Tensor:
        received = op.dispatch(x, IDS.to(x.device), rows=min(rows, TOKENS))
        y = weft.reference.identity_experts(received, x.dtype) * factor
        return checked(op, op.combine(y))

    return call


def expert_lease(op: weft.LowLatencyAllToAll, x: torch.Tensor, factor: int) -> Lease:
    def call(_: int) -> torch.Tensor:
        ids = IDS.to(x.device)
        weights = torch.ones(2, 2, device=x.device)
        received = op.dispatch(x, ids, weights)
        return checked(op, op.combine(received.x * factor, ids, weights, received.handle))

    return call


def reduce_lease(op: weft.AllReduce, x: torch.Tensor) -> Lease:
    def call(argument: int) -> torch.Tensor:
        result = op.fused(x, weight=torch.ones_like(x[0]), eps=argument * 1e-6)
        assert result.norm is not None
        return checked(op, result.norm)

    return call


def moe_lease(layer: weft.MoE, x: torch.Tensor) -> Lease:
    def call(rows: int) -> torch.Tensor:
        ids = IDS.to(x.device)
        result = layer(x, topk_ids=ids, topk_weights=torch.ones(2, 2, device=x.device), rows=rows)
        return checked(layer, result)

    return call


@contextlib.contextmanager
def open_leases(group: weft.Group, kind: str) -> Iterator[list[Lease]]:
    """Open three leases of one workspace."""
    x = torch.full((2, HIDDEN), 1.0 + group.rank, device=group.device).bfloat16()
    with contextlib.ExitStack() as stack:
        leases: list[Lease] = []
        for number in range(3):
            if kind == "AllToAll":
                op = stack.enter_context(weft.lease(group, weft.AllToAll, **SIZES, **LIMITS))
                leases.append(exchange_lease(op, x, number + 1))
            elif kind == "LowLatencyAllToAll":
                options = SIZES | LIMITS | {"quantize": None}
                low = stack.enter_context(weft.lease(group, weft.LowLatencyAllToAll, **options))
                leases.append(expert_lease(low, x, number + 1))
            elif kind == "AllReduce":
                sizes = {"max_tokens": TOKENS, "hidden": HIDDEN}
                reduce = stack.enter_context(weft.lease(group, weft.AllReduce, **sizes, **LIMITS))
                leases.append(reduce_lease(reduce, x))
            else:

                def weights(local: tuple[int, ...], seed: int = 10 * number) -> ExpertWeights:
                    experts = [Expert.seeded(CONFIG, seed + e) for e in local]
                    return ExpertWeights.stack(CONFIG, experts, group.device)

                options = LIMITS | {"max_tokens": TOKENS, "mode": kind.removeprefix("MoE, ")}
                lease = weft.lease(group, weft.MoE, CONFIG, weights, **options)
                leases.append(moe_lease(stack.enter_context(lease), x))
        yield leases


@contextlib.contextmanager
def open_operators(group: weft.Group) -> Iterator[list[Lease]]:
    """Open three operators, each with its own memory."""
    x = torch.full((2, HIDDEN), 1.0 + group.rank, device=group.device).bfloat16()
    limits: dict[str, Any] = {"timeout": 2.0, "first_timeout": 4.0}
    with contextlib.ExitStack() as stack:
        exchange = stack.enter_context(weft.AllToAll(group, **SIZES, **limits))
        experts = weft.LowLatencyAllToAll(group, **SIZES, **limits, quantize=None)
        stack.enter_context(experts)
        reduce = weft.AllReduce(group, max_tokens=TOKENS, hidden=HIDDEN, **limits)
        stack.enter_context(reduce)
        yield [exchange_lease(exchange, x, 1), expert_lease(experts, x, 2), reduce_lease(reduce, x)]


def draw_program(chance: random.Random, kind: str) -> list[Call]:
    """Draw eight calls, with no two neighbours equal."""
    same = kind in ("LowLatencyAllToAll", "operators")  # the former takes no argument
    program: list[Call] = []
    while len(program) < 8:
        call = chance.randrange(3), 2 if same else chance.randrange(2, 13)
        if kind == "AllToAll":
            call = call[0], min(call[1], TOKENS)
        if not program or call != program[-1]:
            program.append(call)
    return program


def disturb(chance: random.Random, program: list[Call], how: str) -> tuple[int, list[Call]]:
    """Return the first differing call, and the program of the rank that is out of step."""
    at, other = chance.randrange(1, 6), list(program)
    if how == "skip":
        del other[at]
    elif how == "swap":
        other[at : at + 2] = other[at + 1 : at - 1 : -1]
    elif how == "repeat":
        other.insert(at, other[at - 1])
    else:
        lease, argument = other[at]
        other[at] = lease, argument - 1 if argument > 2 else argument + 1
    return at, other


def run_program(
    group: weft.Group, kind: str, program: list[Call], other: list[Call] | None, odd: int
) -> tuple[list[torch.Tensor], str, str]:
    """Return a program's results until it raises, and the error's type and text."""
    results: list[torch.Tensor] = []
    opened = open_operators(group) if kind == "operators" else open_leases(group, kind)
    with opened as leases, contextlib.suppress(GroupError):
        try:
            for lease, argument in other if other is not None and group.rank == odd else program:
                results.append(leases[lease](argument))
        except GroupError as error:
            return results, type(error).__name__, str(error)
    return results, "", ""


@pytest.mark.parametrize("device", ["threads", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("how", ["skip", "swap", "repeat", "change"])
@pytest.mark.parametrize(
    "kind",
    [
        "AllToAll",
        "LowLatencyAllToAll",
        "AllReduce",
        "MoE, throughput",
        "MoE, low_latency",
        "operators",
    ],
)
def test_a_rank_out_of_step_is_detected_by_all_in_that_call(ranks, kind, how, device):
    if kind in ("LowLatencyAllToAll", "operators") and how == "change":
        pytest.skip("no argument that ranks must agree on")
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    program, odd = draw_program(chance, kind), chance.randrange(RANKS)
    at, other = disturb(chance, program, how)
    right = ranks(RANKS, device)(run_program, kind, program, None, odd)
    assert [(len(results), error) for results, error, _ in right] == [(8, "")] * RANKS
    result = ranks(RANKS, device)(run_program, kind, program, other, odd)
    for (results, error, text), (expected, _, _) in zip(result, right, strict=True):
        assert error == GeometryMismatch.__name__, (error, text)
        assert len(results) == at, text
        assert "called with" in text or (kind == "operators" and f"rank {odd}" in text)
        assert all(map(torch.equal, results, expected[:at]))


@on_ranks(2, "threads")
def test_an_error_names_both_values(group: weft.Group) -> None:
    with weft.AllReduce(group, max_tokens=TOKENS, hidden=HIDDEN, **LIMITS) as op:
        x, values = torch.ones(2, HIDDEN).bfloat16(), (1e-5, 1e-6)
        theirs, own = values[1 - group.rank], values[group.rank]
        text = f"rank {1 - group.rank} called with .*eps {theirs}.*eps {own}"
        with pytest.raises(GeometryMismatch, match=text):
            op.fused(x, weight=torch.ones(HIDDEN).bfloat16(), eps=own)


@on_ranks(2, "threads")
def test_rows_have_a_bound(group: weft.Group) -> None:
    def weights(local: tuple[int, ...]) -> ExpertWeights:
        return ExpertWeights.stack(CONFIG, [Expert.seeded(CONFIG, e) for e in local])

    with weft.MoE(group, CONFIG, weights, max_tokens=TOKENS, **LIMITS) as layer:
        with pytest.raises(InvalidArgument, match=rf"rows is .*\.{TOKENS * MAX_ROUNDS}"):
            moe_lease(layer, torch.ones(2, HIDDEN).bfloat16())(TOKENS * MAX_ROUNDS + 1)
        assert torch.isfinite(moe_lease(layer, torch.ones(2, HIDDEN).bfloat16())(2)).all()


def test_hashes_of_calls_differ():
    """With 24 bits, the chance of a collision among 3,000 calls is one in four."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    drawn = {
        (chance.randrange(1 << 24), chance.randrange(1 << 16), chance.randrange(1 << 20))
        for _ in range(3000)
    }
    hashes = [make_dispatch_record(d, layer, rows, 0).hash & FLAG_MASK for d, layer, rows in drawn]
    assert len(set(hashes)) >= len(drawn) - 4
    parts: dict[str, Any] = {"parts": (True, False, True), "coding": 0, "weight_bias": 0.0}
    words = {
        make_allreduce_record(7, 0, 5, "oneshot", eps=i * 1e-7, **parts).hash for i in range(3000)
    }
    assert len(words) == 3000
