# SPDX-License-Identifier: Apache-2.0
"""mode="low_latency": rounds by hand, rows pushed by the down projection, sizes, and options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, EXPERTS, HIDDEN, Case
from tests.moe.test_layer import settle
from tests.rounds import bits
from weft.errors import InvalidArgument, OutOfOrder
from weft.gemm import config as gemm_config
from weft.moe import ExpertWeights, grouped_experts
from weft.moe.config import choose_gemm, pushes_in_place
from weft.moe.low_latency import YIELDS_FROM
from weft.moe.torch_experts import RowsByExpert

BY_EXPERT = {"mode": "low_latency"}
DEEP = replace(CONFIGS["deepseek"], hidden=256, intermediate=128, shared=128)


def by_hand(group: weft.Group) -> None:
    """A round by hand has the bits of a call; a call in the middle of it is refused."""
    case = Case(DEEP, tokens=(5, 7))
    with case.open(group, **BY_EXPERT, overlap="none") as layer:
        exchange, shared = layer.exchange, case.shared(group.device)
        assert isinstance(exchange, weft.LowLatencyAllToAll)
        assert shared is not None
        x, logits = case.of(group.rank, group.device)
        wanted, (ids, weights) = layer(x, logits), layer.route(logits)
        rows = exchange.dispatch(x, ids)
        with pytest.raises(OutOfOrder, match="within a round of layer.exchange"):
            layer(x, logits)
        layer.check()  # the refusal has told nobody to leave
        y = layer.experts(rows)
        assert y is not None
        out = exchange.combine(y, ids, weights, rows.handle, add=shared(x))
        assert torch.equal(bits(out), bits(wanted))
        assert torch.equal(bits(layer(x, logits)), bits(wanted))
        settle(group)


def test_rounds_by_hand(ranks):
    ranks(2, "threads")(by_hand)


def options_reach(group: weft.Group) -> None:
    case = Case(CONFIGS["softmax"], tokens=(4, 4))
    options: dict[str, Any] = {"combine_dtype": "fp8", "quantize": "fp8", "profile": True}
    owners = [1, 0, 1, 1, 0, 0, 1, 1]
    with case.open(group, **BY_EXPERT, **options, expert_map=owners) as layer:
        exchange = layer.exchange
        assert isinstance(exchange, weft.LowLatencyAllToAll)
        shape = exchange.config.shape
        assert (shape.combine_fp8, shape.group, shape.reduce) == (True, 128, "receiver")
        assert exchange._tracks.numel() > 0
        assert exchange.placement.ranks == tuple(owners)
        assert layer.local_experts == tuple(e for e in range(8) if owners[e] == group.rank)
    with case.open(group, **BY_EXPERT) as layer:
        exchange = layer.exchange
        assert isinstance(exchange, weft.LowLatencyAllToAll)
        shape = exchange.config.shape
        assert (shape.combine_fp8, shape.group, shape.reduce) == (False, 0, "receiver")
        assert len(exchange._slots) == 1
        assert exchange.memory == weft.LowLatencyAllToAll.memory_bytes(
            ranks=2,
            max_tokens=4,
            hidden=HIDDEN,
            top_k=3,
            num_experts=EXPERTS,
            quantize=None,
            slots=1,
        )


def test_options_reach_the_exchange(ranks):
    ranks(2, "threads")(options_reach)


def test_ways_that_a_device_has():
    cpu, gpu, half = torch.device("cpu"), torch.device("cuda", 0), replace(DEEP, dtype=torch.half)
    wide = replace(DEEP, dtype=torch.float32)

    def choose(device: torch.device, config: weft.MoEConfig = DEEP, **given: Any) -> str:
        options = {"fp8": False, "quantize": None, **given}
        return choose_gemm("auto", device, config, **options)

    assert (choose(cpu), choose(cpu, fp8=True, quantize="fp8")) == ("torch", "grouped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.gemm.triton_launch.installed", lambda: None)
        patch.setattr("weft.moe.config.installed", lambda: None)
        assert (choose(gpu), choose(gpu, half)) == ("grouped", "grouped")
        assert (choose(gpu, wide), choose(gpu, quantize="fp8")) == ("torch", "torch")
        assert choose(gpu, fp8=True, quantize="fp8") == "grouped"

    def missing() -> None:
        raise InvalidArgument("no Triton here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.gemm.triton_launch.installed", missing)
        patch.setattr("weft.moe.config.installed", missing)
        assert choose(gpu) == "torch"
        with pytest.raises(InvalidArgument, match="no Triton"):
            choose(gpu, fp8=True, quantize="fp8")


def pushed_by_hand(group: weft.Group) -> None:
    """Experts of a broken group store nothing; those of a whole one what a call has."""
    case = Case(DEEP, tokens=(5, 7))
    with case.open(group, **BY_EXPERT, overlap="gemm_push", gemm="grouped") as layer:
        x, logits = case.of(group.rank, group.device)
        wanted, (ids, weights) = layer(x, logits), layer.route(logits)
        exchange, shared = layer.exchange, case.shared(group.device)
        assert isinstance(exchange, weft.LowLatencyAllToAll)
        assert shared is not None
        rows = exchange.dispatch(x, ids)
        with pytest.raises(OutOfOrder, match="within a round of layer.exchange"):
            layer(x, logits)
        assert layer.experts(rows) is None
        assert isinstance(layer._workspace.experts, grouped_experts.GroupedExperts)
        with pytest.raises(InvalidArgument, match="nothing keeps them"):
            layer._workspace.experts.down(layer._weights)
        assert layer._workspace.experts.buffers[-1].numel() == 0
        with pytest.raises(InvalidArgument, match="rows are stored at their owners"):
            exchange.combine(torch.empty(rows.x.shape).to(x), ids, weights, rows.handle)
        out = exchange.combine(None, ids, weights, rows.handle, add=shared(x))
        assert torch.equal(bits(out), bits(wanted))
        settle(group)
        rows = exchange.dispatch(x, ids)
        group.barrier()
        assert rows.abort_flag is not None
        rows.abort_flag.fill_(1)
        layer.experts(rows)
        group.barrier()
        layout, heap = exchange.config.offsets, exchange.heap
        size = layout.share_bytes - layout.back
        assert bool((heap.tensor((size,), torch.uint8, offset=layout.back) == 0xFF).all())
        group.barrier()


def test_rows_pushed_by_hand(ranks):
    ranks(2, "threads")(pushed_by_hand)


@pytest.mark.parametrize(
    ("hopper", "config", "fp8", "able"),
    [
        (True, DEEP, True, True),
        (True, DEEP, False, True),
        (False, DEEP, True, False),
        (True, replace(DEEP, dtype=torch.float32), True, False),  # it stores two bytes a number
        (True, replace(DEEP, hidden=384), True, False),  # columns of FP8 come in pairs of blocks
        (True, replace(DEEP, biased=True), True, False),
    ],
)
def test_which_gemms_store_rows_with_flag_in_data(monkeypatch, hopper, config, fp8, able):
    monkeypatch.setattr(gemm_config, "is_hopper", lambda _: hopper)
    for experts in (1, 8):
        gpu = torch.device("cuda", 0)
        assert pushes_in_place(config, experts, fp8=fp8, device=gpu) == able
        assert pushes_in_place(config, experts, fp8=fp8, device=torch.device("cpu"))


def who_is_first(group: weft.Group, tokens: int, beside: bool) -> list[bool]:
    """Whether the first product of a call may begin early."""
    seen = []
    case = Case(DEEP, tokens=(tokens,) * group.size)
    with case.open(group, **BY_EXPERT, overlap="gemm_push", gemm="grouped") as layer:
        work = layer._workspace
        up = work.experts.up

        def watched(
            weights: ExpertWeights, rows: RowsByExpert, *, tokens: int, early: bool = True
        ) -> None:
            seen.append(early)
            up(weights, rows, tokens=tokens, early=early)

        work.experts.up = watched  # type: ignore[method-assign]
        work.side_stream._busy = beside  # as on a GPU, where it has a stream of its own
        layer(*case.of(group.rank, group.device))
        settle(group)
    return seen


@pytest.mark.parametrize(
    ("tokens", "beside", "early"),
    [(YIELDS_FROM - 1, True, True), (YIELDS_FROM, True, False), (YIELDS_FROM, False, True)],
)
def test_with_many_tokens_the_shared_expert_goes_first(ranks, tokens, beside, early):
    assert ranks(2, "threads")(who_is_first, tokens, beside) == [[early]] * 2


@pytest.mark.parametrize("early", [False, True])
def test_a_product_that_is_not_early_is_launched_behind(monkeypatch, early):
    asked = []
    monkeypatch.setattr(grouped_experts, "grouped_gemm", lambda *_, **given: asked.append(given))
    device, nothing = torch.device("cpu"), torch.zeros(1)
    mlp = grouped_experts.GroupedExperts(
        DEEP, (8, 4), 8, fp8=True, ranks=2, max_tokens=4, programmatic=True, device=device
    )
    rows = RowsByExpert((nothing, nothing), nothing, nothing)
    mlp.up(ExpertWeights.stack(DEEP, []).to_fp8(), rows, tokens=4, early=early)
    assert [given["programmatic_launch"] for given in asked] == [early]
