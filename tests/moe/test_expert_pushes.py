"""The layer by expert whose second product stores every row at its token's owner."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from tests.moe.layers import Case
from tests.moe.test_expert_major import BY_EXPERT, DEEP, WIRES, fp8_rounds
from tests.moe.test_layer import both_overlaps, rounds, settle
from tests.rounds import bits
from weft.errors import InvalidArgument, OutOfOrder
from weft.gemm import plans
from weft.moe import ExpertWeights, grouped_experts
from weft.moe.config import pushes_in_place
from weft.moe.low_latency import YIELDS_FROM, Blocks
from weft.moe.torch_experts import RowsByExpert

PUSHED = (
    "fp8 out",
    "a map",
    "a rank without experts",
)  # those that rows stored at their owners have


@pytest.mark.parametrize("wire", PUSHED)
def test_rows_that_the_product_stores_at_owners(ranks, wire):
    options = {**WIRES[wire][0], "gemm": "grouped"}
    if "quantize" in options:
        options = {"fp8": True}
    case = Case(DEEP, tokens=(6, 3, 0))
    play = fp8_rounds if "fp8" in options else rounds
    options = {name: value for name, value in options.items() if name != "fp8"}
    ranks(3, "threads")(play, case, {**BY_EXPERT, **options, "overlap": "gemm_push"})


@pytest.mark.parametrize("more", [{"gemm": "grouped"}, {"fp8": True}])
def test_rows_stored_at_owners_have_the_same_bits(ranks, more):
    case, every = Case(DEEP, tokens=(9, 0, 4)), ("none", "shared_expert", "gemm_push")
    ranks(3, "threads")(both_overlaps, case, {**BY_EXPERT, **more}, every)


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
        assert isinstance(layer._workspace._experts, grouped_experts.GroupedExperts)
        with pytest.raises(InvalidArgument, match="nothing keeps them"):
            layer._workspace._experts.down(layer._weights)
        assert layer._workspace._experts.buffers[-1].numel() == 0
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
        layout, heap = exchange.config.layout, exchange._rounds.premises.heap
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
    monkeypatch.setattr(plans, "is_hopper", lambda _: hopper)
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
        up = work._experts.up

        def watched(
            weights: ExpertWeights, rows: RowsByExpert, *, tokens: int, early: bool = True
        ) -> None:
            seen.append(early)
            up(weights, rows, tokens=tokens, early=early)

        work._experts.up = watched  # type: ignore[method-assign]
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
    rows = Blocks((nothing, nothing), nothing, nothing, None, None)
    mlp.up(ExpertWeights.stack(DEEP, []).to_fp8(), rows, tokens=4, early=early)
    assert [given["programmatic_launch"] for given in asked] == [early]
