# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts: which rank uses which replica, and how experts move."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, EXPERTS, Case
from tests.operators import capture_body
from tests.ranks import on_ranks
from tests.rounds import bits, synchronize
from weft.errors import (
    Aborted,
    CreationFailed,
    GeometryMismatch,
    InvalidArgument,
    OutOfOrder,
    PeerLeft,
    RendezvousFailed,
    WeftError,
)
from weft.heap import Heap
from weft.moe import MoE, Replicas, balance, route
from weft.moe.replicas import relocation

LOADS = [9.0, 1, 1, 7, 1, 1, 2, 3]
OTHER = [1.0, 1, 8, 1, 1, 6, 1, 9]
FIRST, SECOND = (balance(loads, 2, replicas=4) for loads in (LOADS, OTHER))  # on two ranks
SOFTMAX = Case(replace(CONFIGS["softmax"], dtype=torch.float32), tokens=(4, 4))


def open_layer(group: weft.Group, case: Case, replicas: Replicas, **options: Any) -> MoE:
    kwargs = {"max_tokens": 16, "timeout": 600.0, "first_timeout": 600.0, **options}
    return case.open(group, replicas=replicas, **kwargs)


def hold(layer: MoE, case: Case, out: torch.Tensor, seed: int) -> None:
    """Assert that the placement changes a result by no more than the order of sums."""
    expected = case.expected(
        layer, *case.next(seed=seed).inputs_of(layer.exchange.rank, out.device)
    )
    case.check(out, expected, slack=2)


def moved(group: weft.Group, name: str, options: dict[str, Any]) -> list[int]:
    config = replace(CONFIGS[name], dtype=torch.float32)
    case = Case(config, tokens=(16, 5, 11)[: group.size])
    first = balance(LOADS, group.size, replicas=group.size * 3 - EXPERTS % group.size)
    counts = []
    with open_layer(group, case, first, **options) as layer:
        assert layer.local_experts == first.logical_experts(group.rank)
        addresses = [t.data_ptr() for t in layer._weights.tensors]
        turns = [first, balance(OTHER, group.size, len(first.logical) - EXPERTS), first]
        backwards = Replicas(first.logical[::-1], group.size)
        for seed, placement in enumerate([*turns, backwards]):
            counts.append(layer.relocate(placement))
            assert layer.replicas == placement
            assert layer.local_experts == placement.logical_experts(group.rank)
            x, logits = case.next(seed=seed).inputs_of(group.rank, group.device)
            hold(layer, case, layer(x, logits), seed)
            ids, weights = route(config.routing, logits, correction=case.correction(group.device))
            again = layer(x, topk_ids=ids.long(), topk_weights=weights)
            hold(layer, case, again, seed)
        for slot, expert in enumerate(layer.local_experts):
            right = case.expert(expert)
            assert torch.equal(bits(layer._weights.gate_up[slot].cpu()), bits(right.gate_up))
            assert torch.equal(bits(layer._weights.down[slot].cpu()), bits(right.down))
        assert addresses == [t.data_ptr() for t in layer._weights.tensors]
        synchronize(group.device)
        layer.check()
    return counts


class SmallHeap(Heap):
    @classmethod
    def create(cls, group: weft.Group, size: int) -> Heap:
        assert size <= relocation.STAGING_BYTES
        return Heap.create(group, size)


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("cpu", "softmax", {}),
        ("threads", "gpt-oss", {"mode": "low_latency", "gemm": "torch"}),
        ("threads", "deepseek", {"mode": "throughput", "gemm": "torch", "overlap": "none"}),
        pytest.param("cuda", "softmax", {}, marks=pytest.mark.gpu),
        pytest.param("cuda", "gpt-oss", {"mode": "low_latency"}, marks=pytest.mark.gpu),
    ],
)
def test_layers_with_replicas(ranks, kind, name, options, monkeypatch):
    monkeypatch.setattr(relocation, "STAGING_BYTES", 4096)  # pieces, as of large experts
    monkeypatch.setattr(relocation, "Heap", SmallHeap)
    counts = ranks(2, kind)(moved, name, options)
    assert counts[0] == counts[1]
    assert counts[0][0] == 0
    assert all(counts[0][1:])


@pytest.mark.parametrize("late", [False, True])
@on_ranks(2, "cpu")
def test_failed_relocations_leave_no_usable_layer(group, late):
    """If one rank fails or stops in a move, no rank computes with mixed weights."""
    case, first, second = SOFTMAX, FIRST, SECOND
    with open_layer(group, case, first) as layer:
        x, logits = case.inputs_of(group.rank, group.device)
        layer(x, logits)

        def stumble(_: torch.device) -> None:
            if group.rank == 1 and late:
                time.sleep(0.6)
            elif group.rank == 1:
                raise MemoryError("no memory for a copy")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(relocation, "synchronize_stream", stumble)
            patch.setattr(group, "timeout", 0.3)
            with pytest.raises((CreationFailed, RendezvousFailed)):
                layer.relocate(second)
        if not late:
            with pytest.raises(WeftError, match="failed while relocating experts"):
                layer.relocate(first)
        for call in (lambda: layer(x, logits), layer.check):
            with pytest.raises((Aborted, PeerLeft), match="failed while relocating experts"):
                call()


@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
@on_ranks(2, "threads")
def test_no_expert_moves_within_a_round(group, mode):
    """Between dispatch and combine, or during another thread's call, a move is refused."""
    case, first, second = SOFTMAX.next(tokens=(4, 3)), FIRST, SECOND
    with open_layer(group, case, first, mode=mode, overlap="none", gemm="torch") as layer:
        x, logits = case.inputs_of(group.rank, group.device)
        expected, exchange = layer(x, logits), layer.exchange
        ids, weights = layer.route(logits)
        rows: Any = exchange.dispatch(x, ids, weights)
        with pytest.raises(OutOfOrder, match="during a round"):
            layer.relocate(second)
        y = layer.experts(rows)
        if isinstance(exchange, weft.AllToAll):
            out = exchange.combine()
        else:
            out = exchange.combine(y, ids, weights, rows.handle)
        assert torch.equal(bits(out), bits(expected))
        refused: list[BaseException] = []

        def shared(x: torch.Tensor) -> torch.Tensor:
            def move() -> None:
                try:
                    layer.relocate(second)
                except BaseException as error:
                    refused.append(error)

            thread = threading.Thread(target=move)
            thread.start()
            thread.join()
            return torch.zeros_like(x)

        layer._shared = shared
        assert torch.equal(bits(layer(x, logits)), bits(expected))
        assert {type(error) for error in refused} == {OutOfOrder}
        assert layer.replicas == first
        layer._shared = None
        layer.relocate(second)
        hold(layer, case, layer(x, logits), 0)


@on_ranks(2)
def test_weights_of_the_caller(group):
    """Callers that move weights themselves; refusals; ranks that differ."""
    case, first, second = SOFTMAX, FIRST, SECOND
    with open_layer(group, case, first) as layer:
        own = second.logical_experts(group.rank)
        layer.relocate(second, weights=case.weights(own, group.device))
        x, logits = case.inputs_of(group.rank, group.device)
        hold(layer, case, layer(x, logits), 0)
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            (second, {"weights": case.weights(own[1:], group.device)}, "gate_up"),
            (balance(LOADS, 2, 2), {}, "10 physical ones; this layer was"),
            (balance(LOADS, 4, 4), {}, "replicas of 4 ranks"),
            (first.logical, {}, "replicas is"),
        ]
        for placement, kwargs, words in wrong:
            with pytest.raises(InvalidArgument, match=words):
                layer.relocate(placement, **kwargs)
        with pytest.raises(GeometryMismatch, match="placement of experts"):
            layer.relocate(first if group.rank else second)
        assert layer.replicas == second
        hold(layer, case, layer(x, logits), 0)
        sibling = layer.sibling(layer._weights, replicas=second)
        hold(sibling, case, sibling(x, logits), 0)
    plain = {"replicas": first, "expert_map": [0] * 8}
    with pytest.raises(InvalidArgument, match="expert_map and replicas"):
        open_layer(group, case, max_tokens=4, **plain)  # type: ignore[arg-type]
    with case.open(group) as layer, pytest.raises(InvalidArgument, match="built without"):
        layer.relocate(first)


@on_ranks(2)
def test_graphs_work_after_a_relocation(group):
    case, first, second = Case(CONFIGS["softmax"], tokens=(16, 9)), FIRST, SECOND
    with open_layer(group, case, first) as layer:
        x, logits = case.inputs_of(group.rank, group.device)
        out = torch.empty_like(x)

        def call() -> None:
            layer(x, logits, out=out)

        replay = capture_body(group, call)
        for placement in (first, second, first):
            layer.relocate(placement)
            out.fill_(float("nan"))
            replay()
            synchronize(group.device)
            hold(layer, case, out, 0)
        layer.check()


@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
@on_ranks(2)
def test_rounds(group, mode):
    """Run batches beyond max_tokens in a number of rounds that is equal on all ranks."""
    case = Case(CONFIGS["deepseek"], tokens=(37, 0))
    x, logits = case.inputs_of(group.rank, group.device)
    options: dict[str, Any] = {"timeout": 600.0, "first_timeout": 600.0, "mode": mode}
    with case.open(group, max_tokens=37, **options) as layer:
        whole = layer(x, logits)
    with case.open(group, max_tokens=16, **options) as layer:
        parts = layer(x, logits, rows=37)
        assert torch.equal(bits(parts), bits(whole))
        out = torch.full_like(x, float("nan"))
        some = torch.tensor([20], dtype=torch.int32, device=group.device)
        layer(x, logits, rows=48, num_tokens=some, out=out)
        assert torch.equal(bits(out[:20]), bits(whole[:20]))
        many = x if group.rank == 0 else x.new_zeros(37, 128)
        ids = logits.int()
        wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
            ((many, logits), {"rows": 36}, "rows is 36, but this rank has 37"),
            ((x,), {}, "pass logits, or topk_ids with topk_weights"),
            ((x, logits), {"topk_ids": ids}, "logits are a tensor .* topk_ids a tensor"),
            ((x,), {"topk_ids": ids, "topk_weights": logits}, r"must be \[\d+, 3\]"),
        ]
        for args, inputs, words in wrong:
            with pytest.raises(InvalidArgument, match=words):
                layer(*args, **{"rows": 37, **inputs})
