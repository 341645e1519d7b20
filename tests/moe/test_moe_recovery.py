# SPDX-License-Identifier: Apache-2.0
"""A rank dies: replicas continue the layer, or lost experts are named or dropped."""

import re
from typing import Any

import pytest
import torch

import weft
from tests.baseline import die
from tests.moe.layers import CONFIGS, EXPERTS, Case
from tests.moe.test_relocation import hold, open_layer
from tests.operators import capture_body
from tests.ranks import on_ranks
from tests.recovery import PATIENCE, Survivors, run_until_broken
from tests.rounds import drop_dead_ids, synchronize
from weft.errors import BadExpertId, CreationFailed, ExpertsLost, InvalidArgument, RendezvousFailed
from weft.moe import MoE, Replicas, balance, route
from weft.moe.replicas import relocation

RANKS, ORDER = 4, (2, 0)
CASE = Case(CONFIGS["softmax"], tokens=(16, 5, 11, 7))
WAYS: dict[str, dict[str, Any]] = {
    "throughput": {"mode": "throughput", "gemm": "torch", "overlap": "none"},
    "gemm_push": {"mode": "throughput", "gemm": "grouped", "overlap": "gemm_push"},
    "low latency, gemm_push": {"mode": "low_latency", "gemm": "grouped", "overlap": "gemm_push"},
    "low latency": {"mode": "low_latency", "gemm": "torch", "overlap": "none"},
}
# Each expert is on three ranks, so any two may go.
THRICE = balance([1.0] * EXPERTS, RANKS, replicas=2 * EXPERTS)


def call(layer: MoE, seed: int) -> None:
    x, logits = CASE.next(seed=seed).inputs_of(layer.exchange.rank, layer.exchange.group.device)
    hold(layer, CASE, layer(x, logits), seed)


def lose(survivors: Survivors, layer: MoE, rank: int) -> None:
    survivors.barrier()
    if survivors.group.rank == rank:
        die()
    run_until_broken(lambda: call(layer, 9))
    survivors.lose(rank, sealed=[layer.exchange])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
@on_ranks(RANKS, "cpu", "cuda", dies=ORDER)
def test_replicas_take_over(group: weft.Group, way: str) -> None:
    """On GPUs, the graph that was captured before is replayed."""
    survivors, options = Survivors(group), dict(WAYS[way])
    case = CASE.next(tokens=(16,) * RANKS) if group.device.type == "cuda" else CASE
    if group.device.type == "cuda" and options["gemm"] == "torch":
        options["gemm"] = "auto"  # a graph takes no products that the host divides
    with open_layer(group, case, THRICE, **options) as one:
        other = one.sibling(one._weights, shared=case.shared(group.device))
        outs: list[torch.Tensor] = []
        table = one._placement.table
        assert table is not None
        x, logits = (t.clone() for t in case.inputs_of(group.rank, group.device))

        def calls() -> None:
            ids, weights = route(case.config.routing, logits)
            outs[:] = [one(x, logits), one(x, topk_ids=ids, topk_weights=weights), other(x, logits)]

        replay = capture_body(group, calls)

        def right(seed: int) -> None:
            for own, new in zip(
                (x, logits), case.next(seed=seed).inputs_of(group.rank, x.device), strict=True
            ):
                own.copy_(new)
            replay()
            synchronize(group.device)
            one.check()  # no id named an expert of a rank that is gone
            for out in outs:
                hold(one, case, out, seed)

        right(1)
        for dies in ORDER:
            survivors.barrier()
            if group.rank == dies:
                die()
            run_until_broken(lambda: right(9))
            survivors.lose(dies, sealed=[one.exchange] if group.device.type == "cpu" else ())
            ids = table[:, 1:][torch.arange(table.shape[1] - 1, device=x.device) < table[:, :1]]
            each = len(THRICE.logical) // RANKS
            assert {int(p) // each for p in ids} == set(survivors.ranks)
            for seed in range(4):
                right(seed)
        assert one._placement.table is table
        survivors.barrier()


@pytest.mark.parametrize("missing", ["error", "drop"])
@pytest.mark.parametrize("way", ["throughput", "low latency"])
@on_ranks(RANKS, "cpu", dies=[2])
def test_without_replicas_experts_are_lost(group: weft.Group, missing: str, way: str) -> None:
    device, case, survivors = group.device, CASE, Survivors(group)
    with case.open(group, max_tokens=16, missing=missing, **WAYS[way]) as layer:
        call(layer, 0)
        owners = layer.exchange.placement.ranks
        gone = [e for e, rank in enumerate(owners) if rank == 2]
        if missing == "error":
            gone_ranks = "ranks [2] have exited or were not joined yet"
            text = re.escape(f"{gone_ranks}, and no other rank holds experts {gone}")
            with pytest.raises(ExpertsLost, match=text):
                lose(survivors, layer, 2)
            for again in (lambda: call(layer, 1), layer.check):
                with pytest.raises(ExpertsLost, match=text):
                    again()
            assert not layer.broken
        else:
            lose(survivors, layer, 2)
            for seed in range(4):
                x, logits = case.next(seed=seed).inputs_of(group.rank, device)
                ids, weigh = route(case.config.routing, logits)
                kept = drop_dead_ids(ids, owners, survivors.ranks)
                inputs = layer(x, topk_ids=kept, topk_weights=weigh)
                assert torch.equal(layer(x, logits), inputs)
            with pytest.raises(BadExpertId, match="an expert of rank 2, which has exited"):
                layer.check()
            layer.check()
        survivors.barrier()


@pytest.mark.parametrize("when", ["before", "copied out", "copied in"])
@on_ranks(RANKS, "cpu", dies=[2], timeout=600.0)
def test_a_relocation_that_a_death_interrupts_leaves_no_layer_of_two_placements(group, when):
    """Rank 2 dies while experts move; then weights of the caller repair the layer."""
    turned = Replicas(THRICE.logical[::-1], RANKS)
    with open_layer(group, CASE, THRICE, **WAYS["throughput"]) as layer:
        call(layer, 0)
        steps = {"before": 0, "copied out": 1, "copied in": 2}[when]
        done: list[torch.device] = []

        def end(device: torch.device) -> None:
            done.append(device)
            if len(done) == steps + 1:
                die()

        with pytest.MonkeyPatch.context() as patch:
            if group.rank == 2:
                patch.setattr(relocation, "synchronize_stream", end)
            with pytest.raises((CreationFailed, RendezvousFailed)):
                layer.relocate(turned)
        with pytest.raises(ExpertsLost, match="a relocation failed"):
            group.recover(timeout=PATIENCE)
        for again in (lambda: call(layer, 1), layer.check):
            with pytest.raises(ExpertsLost, match="relocate with weights="):
                again()
        with pytest.raises(InvalidArgument, match="no rank has valid weights"):
            layer.relocate(turned)
        layer.relocate(
            turned, weights=CASE.weights(turned.logical_experts(group.rank), group.device)
        )
        for seed in range(4):
            call(layer, seed)
        layer.relocate(THRICE)  # among the living, who hold all experts
        for seed in range(4):
            call(layer, seed)
        layer.check()
        group.barrier()
