# SPDX-License-Identifier: Apache-2.0
"""Leases: which layers share a workspace, and when it is freed."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, Case, ordinary_bytes, tolerance_of
from tests.ranks import on_ranks
from tests.rounds import synchronize
from weft.errors import Aborted, InvalidArgument, OutOfOrder
from weft.moe import ExpertWeights, balance

SIZES: dict[str, Any] = {"max_tokens": 4, "top_k": 2, "num_experts": 8, "hidden": 64}


def lease(group: weft.Group, **options: Any) -> weft.Lease[weft.AllToAll]:
    return weft.lease(group, weft.AllToAll, **{**SIZES, **options})


@on_ranks(2, "cpu", "cuda")
def test_operators_of_equal_sizes_are_one(group: weft.Group) -> None:
    # The same sizes, said in another way.
    one, two = lease(group), lease(group, dtype=torch.bfloat16, expert_map=None)
    other = lease(group, hidden=128)
    low = weft.lease(group, weft.LowLatencyAllToAll, **{**SIZES, "hidden": 128})
    sizes = {"num_experts": 8, "hidden": 128, "top_k": 2, "max_tokens": 4}  # in another order
    again = weft.lease(group, weft.LowLatencyAllToAll, **sizes)
    assert one.operator.heap is two.operator.heap
    assert low.operator.heap is again.operator.heap
    assert len({id(each.operator) for each in (one, other, low)}) == 3
    maps = ([1, 0] * 4, torch.tensor([1, 0] * 4), [0, 1] * 4)
    mapped = [lease(group, expert_map=owners) for owners in maps]
    assert mapped[0].operator.heap is mapped[1].operator.heap is not mapped[2].operator.heap
    one.close()
    one.close()  # idempotent: it counts once
    with two as a2a:
        a2a.check()
    with pytest.raises(OutOfOrder, match="closed"):
        a2a.check()
    new = lease(group)
    assert new.operator is not a2a
    new.operator.close()  # without the lease
    newer = lease(group)
    assert newer.operator is not new.operator
    new.close()
    newer.operator.check()
    # What only equals a good value is refused, though an operator of that value exists.
    wrong: list[dict[str, Any]] = [{"max_tokens": 4.0}, {"max_tokens": torch.tensor(4)}]
    wrong += [{"split_phase": 0}, {"payloads": {}}, {"expert_map": torch.tensor(3)}]
    wrong += [{"expert_map": torch.zeros(1, 1, 8).long()}, {"expert_map": [[0], 1]}]
    for options in wrong:
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            lease(group, **options)
    for own in (newer, other, *mapped, low, again):
        own.close()  # type: ignore[attr-defined]


@on_ranks(2, "cpu")
def test_a_dropped_lease_holds_nothing(group: weft.Group) -> None:
    seen = weakref.ref(lease(group).operator)
    gc.collect()
    assert seen() is None
    lease(group).close()


@on_ranks(2, "cpu", "cuda")
def test_layers_share_a_workspace(group: weft.Group) -> None:
    case = Case(replace(CONFIGS["deepseek"], dtype=torch.float32), tokens=(4, 2))
    placements = [balance(loads, 2, 2) for loads in ([1.0] * 8, [9.0, 1, 1, 1, 1, 1, 1, 8])]

    def open_layer(number: int, **options: Any) -> weft.Lease[weft.MoE]:
        def weights(local: tuple[int, ...]) -> ExpertWeights:
            own = [case.expert(expert) for expert in local]
            return ExpertWeights.stack(case.config, own, group.device)

        options |= {"shared": case.shared(group.device), "replicas": placements[number]}
        options |= {"correction": case.correction(group.device), "max_tokens": 4}
        return weft.lease(group, weft.MoE, case.config, weights, **options)

    first, second = open_layer(0), open_layer(1)
    third = open_layer(0, overlap="none")
    assert first.operator is not second.operator
    assert first.operator.exchange is second.operator.exchange
    assert first.operator.exchange is not third.operator.exchange
    assert (first.operator.replicas, second.operator.replicas) == tuple(placements)
    x, logits = case.inputs_of(group.rank, group.device)
    outs = [lease.operator(x, logits) for lease in (first, second, third)]
    atol = 4 * tolerance_of(case.config, outs[0].float())
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=atol)
    torch.testing.assert_close(outs[2], outs[0], rtol=0, atol=atol)
    first.close()
    torch.testing.assert_close(second.operator(x, logits), outs[1], rtol=0, atol=0)
    synchronize(group.device)
    exchange = second.operator.exchange
    second.close()
    with pytest.raises(OutOfOrder, match="closed"):
        exchange.check()
    third.close()


@on_ranks(2, "cpu", "cuda")
def test_memory_bytes_is_exact(group: weft.Group) -> None:
    device = group.device
    for name, options in (
        ("softmax", {"mode": "throughput", "overlap": "none"}),
        ("softmax", {"mode": "throughput", "gemm": "torch", "overlap": "none", "max_rows": 40}),
        ("llama", {"mode": "throughput", "overlap": "none", "quantize": "fp8"}),
        ("deepseek", {"mode": "low_latency", "overlap": "none"}),
        ("gpt-oss", {"mode": "low_latency", "overlap": "none", "quantize": "fp8"}),
    ):
        case = Case(CONFIGS[name], tokens=(5, 7))
        sizes: dict[str, Any] = {"ranks": 2, "max_tokens": 8, "device": device}
        with case.open(group, max_tokens=8, **options) as layer:
            memory = weft.MoE.memory_bytes(case.config, **sizes, **options)
            assert memory.ordinary == ordinary_bytes(layer), (name, options)
            assert memory.shared == layer.exchange.heap.size
            most = weft.MoE.memory_bytes(case.config, **sizes)
            assert most.total >= memory.total or "quantize" in options or "max_rows" in options
    with pytest.raises(InvalidArgument, match="ranks is 0"):
        weft.MoE.memory_bytes(CONFIGS["softmax"], ranks=0, max_tokens=8, device=device)


@on_ranks(2, "cpu", "cuda")
def test_global_ids(group: weft.Group) -> None:
    for owners in (None, [1, 0] * 4):
        with weft.AllToAll(group, **SIZES, expert_map=owners) as a2a:
            ids = torch.tensor([[0, 7], [3, -1]], dtype=torch.int32, device=group.device)
            x = torch.zeros(2, 64, dtype=torch.bfloat16, device=group.device)
            received = a2a.dispatch(x, ids)
            returned = a2a.global_ids(received.ids)
            assert returned.dtype == torch.int32
            own_rows = torch.tensor(a2a.local_experts, device=group.device)
            own = torch.isin(ids, own_rows)
            for source in range(2):
                assert torch.equal(returned[source, :2], torch.where(own, ids, -1))
            a2a.combine()
            with pytest.raises(InvalidArgument, match="local_ids is .*int32 or int64"):
                a2a.global_ids(x)
            for wrong in (-2, len(a2a.local_experts), 2**31 - 1):
                local = torch.tensor([[0, -1], [-1, wrong]], device=group.device)
                if group.device.type == "cpu":
                    with pytest.raises(InvalidArgument, match=f"local_ids contains {wrong}, but"):
                        a2a.global_ids(local)
                else:
                    expected = [[a2a.local_experts[0], -1], [-1, 2**31 - 1]]
                    assert a2a.global_ids(local).tolist() == expected


@on_ranks(2, "cpu", "cuda")
def test_a_broken_workspace_is_released(group: weft.Group) -> None:
    own = [lease(group) for _ in range(2)]
    a2a, memory = own[0].operator, weakref.ref(own[0].operator.heap._owner)
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=group.device)
    ids = torch.tensor([[0, 7]], device=group.device)
    if group.rank:
        a2a.abort()

    def round_of_all() -> None:
        a2a.dispatch(x, ids)
        synchronize(group.device)
        a2a.check()

    with pytest.raises(Aborted):
        round_of_all()
    group.barrier()
    for each in own:
        assert memory() is not None
        each.close()
    gc.collect()
    assert memory() is None
    with lease(group) as new:
        assert new is not a2a
        out = new.combine(weft.reference.identity_experts(new.dispatch(x, ids), torch.bfloat16))
        assert torch.equal(out, 2 * x)
