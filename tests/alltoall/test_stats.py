# SPDX-License-Identifier: Apache-2.0
"""Statistics: numbers of every rank, gathered by the flags that bring the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.rounds import Round, combining, play, settle
from weft.errors import GeometryMismatch, InvalidArgument

KINDS = ["threads", pytest.param("cuda", marks=pytest.mark.gpu)]
EXPERTS = 9
SIZES: dict[str, Any] = {"max_tokens": 16, "top_k": 3, "num_experts": EXPERTS, "hidden": 128}


def numbers(rank: int, round_: int, count: int, device: torch.device) -> torch.Tensor:
    """int32 `[count]` that name their rank and round, and use all 32 bits."""
    spread = torch.arange(count, dtype=torch.int64) * 2654435761 + rank * 40503 + round_ * 97
    return (spread % 2**32 - 2**31).to(torch.int32).to(device)


def one_round(a2a: weft.AllToAll, round_: int, count: int, *, split_phase: bool) -> None:
    group, ranks = a2a.group, range(a2a.group.size)
    # Every third round nobody has a token, in others one rank has none.
    tokens = tuple(0 if round_ % 3 == 2 else (5 * r + 7 * round_) % 17 for r in ranks)
    case = Round(tokens=tokens, top_k=3, experts=EXPERTS, hidden=128, seed=round_)
    inputs = [case.of(r, group.device) for r in ranks]
    told = [numbers(r, round_, count, group.device) for r in ranks]
    x, ids, weights, _ = inputs[group.rank]
    mine = told[group.rank].clone()
    if split_phase:
        a2a.dispatch_send(x, ids, weights, stats=mine)
        mine.zero_()  # it has been read, or will be before this in the stream
        received = a2a.dispatch_recv()
    else:
        received = a2a.dispatch(x, ids, weights, stats=mine)
    wanted = weft.reference.dispatch(
        [[i[0]] for i in inputs],
        [i[1] for i in inputs],
        [i[2] for i in inputs],
        a2a.placement,
        rank=group.rank,
        max_tokens=a2a.max_tokens,
        stats=told,
    )
    assert received.stats is not None
    assert wanted.stats is not None
    assert received.stats.dtype == torch.int32
    assert received.stats.shape == (group.size, count)
    assert torch.equal(received.stats, wanted.stats)
    assert torch.equal(received.counts, wanted.counts)
    assert torch.equal(received.ids, wanted.ids)
    a2a.output().copy_(weft.reference.identity_experts(received, case.dtype))
    if split_phase:
        a2a.combine_send()
        a2a.combine_recv()
    else:
        a2a.combine()


def told_each_round(group: weft.Group, options: dict[str, Any], split_phase: bool) -> None:
    for count in (1, 4099):
        sizes = {**SIZES, "split_phase": split_phase, "timeout": 600.0, **options}
        with weft.AllToAll(group, stats=count, **sizes) as a2a:
            for round_ in range(9):
                one_round(a2a, round_, count, split_phase=split_phase and round_ != 4)
            settle(group.device)
            a2a.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split_phase", [False, True])
@pytest.mark.parametrize("way", ["pull", "fp8"])
def test_numbers_change_every_round(ranks, kind, split_phase, way):
    ranks(3, kind)(told_each_round, combining(way), split_phase)


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [1, 8])
def test_numbers_on_few_sms(ranks, num_sms):
    ranks(2, "cuda")(told_each_round, {"num_sms": num_sms}, False)


def replayed(group: weft.Group) -> None:
    count, device = 70, group.device
    x = torch.ones((2, 128), dtype=torch.bfloat16, device=device)
    ids = torch.tensor([[0, 4, 8], [-1, 3, 5]], dtype=torch.int32, device=device)
    mine = torch.zeros(count, dtype=torch.int32, device=device)
    seen = torch.zeros((group.size, count), dtype=torch.int32, device=device)
    with weft.AllToAll(group, stats=count, timeout=600.0, **SIZES) as a2a:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            received = a2a.dispatch(x, ids, stats=mine)
            assert received.stats is not None
            seen.copy_(received.stats)
            a2a.combine()
        for round_ in range(20):
            mine.copy_(numbers(group.rank, round_, count, device))
            graph.replay()
            told = [numbers(r, round_, count, device) for r in range(group.size)]
            assert torch.equal(seen, torch.stack(told))
        a2a.check()


@pytest.mark.gpu
def test_numbers_of_a_replayed_graph(ranks):
    ranks(2, "cuda")(replayed)


def refusals(group: weft.Group) -> None:
    case = Round(tokens=(4,) * group.size, top_k=3, experts=EXPERTS, hidden=128)
    x, ids, weights, _ = case.of(group.rank, group.device)
    good = numbers(group.rank, 0, 7, group.device)

    def no(a2a: weft.AllToAll, stats: object, *words: str) -> None:
        for call in (a2a.dispatch, a2a.dispatch_send):
            with pytest.raises(InvalidArgument) as caught:
                call(x, ids, weights, stats=stats)  # type: ignore[arg-type]
            assert all(word in str(caught.value) for word in words), caught.value

    with weft.AllToAll(group, split_phase=True, **SIZES) as a2a:
        no(a2a, good, "stats is [7]", "stats=0", "leave it out")
        no(a2a, 3, "stats is 3", "stats=0")
        play(a2a, case)
        received = a2a.dispatch(x, ids)
        assert received.stats is None
        a2a.combine()
    with weft.AllToAll(group, split_phase=True, stats=7, **SIZES) as a2a:
        no(a2a, None, "stats is None", "stats=7", "int32 [7]")
        no(a2a, good[:6].clone(), "stats has shape [6]", "[7]")
        no(a2a, good.view(7, 1), "stats has shape [7, 1]", "[7]")
        no(a2a, good.long(), "stats has dtype torch.int64", "torch.int32")
        no(a2a, good.to("meta"), "stats is on meta", str(group.device))
        no(a2a, good.repeat(2)[::2], "stats has strides (2,)", "contiguous()")
        no(a2a, [1] * 7, "stats is a list", "torch.Tensor")
        for round_ in range(2):  # no refusal has moved the round
            one_round(a2a, round_, 7, split_phase=bool(round_))
        a2a.check()


@pytest.mark.parametrize("kind", KINDS)
def test_refusals_name_both_and_leave_the_round_alone(ranks, kind):
    ranks(2, kind)(refusals)


def different(group: weft.Group) -> str:
    with pytest.raises(InvalidArgument, match="stats is 1048577; it must be an integer in 0.."):
        weft.AllToAll(group, stats=1048577, **SIZES)
    with pytest.raises(GeometryMismatch) as caught:
        weft.AllToAll(group, stats=5 + group.rank, **SIZES)
    return str(caught.value)


def test_ranks_that_disagree_raise_at_creation(ranks):
    text, other = ranks(2, "threads")(different)
    assert text == other
    assert all(word in text for word in ("stats", "5", "6"))


def test_memory_is_told_before():
    sizes: dict[str, Any] = {"ranks": 8, **SIZES}
    bare = weft.AllToAll.memory_bytes(**sizes)
    for count in (1, 4, 5, 256):
        more = weft.AllToAll.memory_bytes(**sizes, stats=count) - bare
        assert more == -(-8 * count * 4 // 128) * 128
    with pytest.raises(InvalidArgument, match="stats is -1"):
        weft.AllToAll.memory_bytes(**sizes, stats=-1)


def test_the_load_of_experts():
    ids = torch.tensor([[0, 2], [2, -1], [9, 2]])
    assert weft.reference.expert_load(ids, 4).tolist() == [1, 0, 3, 0]
    assert weft.reference.expert_load(ids.int()[:0], 3).tolist() == [0, 0, 0]
    assert weft.reference.expert_load(ids, 4).dtype == torch.int32
