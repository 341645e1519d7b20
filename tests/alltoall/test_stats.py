# SPDX-License-Identifier: Apache-2.0
"""Statistics of every rank, gathered with the tokens' flags."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.kinds import ANY, CUDA, THREADS, on_ranks
from tests.rounds import Round, combine_options, play, synchronize
from weft.errors import GeometryMismatch, InvalidArgument

EXPERTS = 9
CASE = Round(tokens=(4, 4, 0), top_k=3, experts=EXPERTS, hidden=128)
SIZES: dict[str, Any] = CASE.sizes(16)


def every_round(group: weft.Group, options: dict[str, Any]) -> None:
    for count in (1, 4099):
        more = {"split_phase": True, "stats": count, **options}
        with CASE.open(group, **more) as a2a:
            for seed in range(9):
                # Every third round no rank has a token, in others one rank has none.
                ranks = range(group.size)
                tokens = tuple(0 if seed % 3 == 2 else (5 * r + 7 * seed) % 17 for r in ranks)
                play(a2a, CASE.next(tokens=tokens, seed=seed), poison=False, halves=seed % 2 == 1)
            synchronize(group.device)
            a2a.check()


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("way", ["pull", "fp8"])
def test_numbers_change_every_round(ranks, kind, way):
    ranks(3, kind)(every_round, combine_options(way))


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [1, 8])
def test_numbers_on_few_sms(ranks, num_sms):
    ranks(2, "cuda")(every_round, {"num_sms": num_sms})


@on_ranks(2, [CUDA])
def test_numbers_of_a_replayed_graph(group):
    count, device = 70, group.device
    x = torch.ones((2, 128), dtype=torch.bfloat16, device=device)
    ids = torch.tensor([[0, 4, 8], [-1, 3, 5]], dtype=torch.int32, device=device)
    own = torch.zeros(count, dtype=torch.int32, device=device)
    seen = torch.zeros((group.size, count), dtype=torch.int32, device=device)
    with weft.AllToAll(group, stats=count, **SIZES) as a2a:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            received = a2a.dispatch(x, ids, stats=own)
            assert received.stats is not None
            seen.copy_(received.stats)
            a2a.combine()
        for seed in range(20):
            stats = [CASE.next(seed=seed).stats_of(r, count, device) for r in range(group.size)]
            own.copy_(stats[group.rank])
            graph.replay()
            assert torch.equal(seen, torch.stack(stats))
        a2a.check()


@on_ranks(2)
def test_refusals_name_both_values_and_leave_the_round_as_it_was(group):
    case = CASE.next(tokens=(4,) * group.size)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    good = case.stats_of(group.rank, 7, group.device)

    def refused(a2a: weft.AllToAll, stats: object, *words: str) -> None:
        for call in (a2a.dispatch, a2a.dispatch_send):
            with pytest.raises(InvalidArgument) as caught:
                call(x, ids, weights, stats=stats)  # type: ignore[arg-type]
            assert all(word in str(caught.value) for word in words), caught.value

    with case.open(group, split_phase=True) as a2a:
        refused(a2a, good, "stats is [7]", "stats=0", "leave it out")
        play(a2a, case)
        assert a2a.dispatch(x, ids).stats is None
        a2a.combine()
    with case.open(group, split_phase=True, stats=7) as a2a:
        refused(a2a, None, "stats is None", "stats=7", "int32 [7]")
        refused(a2a, good[:6].clone(), "stats has shape [6]", "[7]")
        for seed in range(2):
            play(a2a, case.next(seed=seed), halves=seed == 1)
        a2a.check()


@on_ranks(2, [THREADS])
def test_ranks_that_disagree_raise_at_creation(group):
    with pytest.raises(InvalidArgument, match="stats is 1048577; it must be an integer in 0.."):
        weft.AllToAll(group, stats=1048577, **SIZES)
    with pytest.raises(GeometryMismatch, match="stats.*5.*6"):
        weft.AllToAll(group, stats=5 + group.rank, **SIZES)


def test_the_load_of_experts():
    ids = torch.tensor([[0, 2], [2, -1], [9, 2]])
    assert weft.reference.expert_load(ids, 4).tolist() == [1, 0, 3, 0]
    assert weft.reference.expert_load(ids.int()[:0], 3).tolist() == [0, 0, 0]
    assert weft.reference.expert_load(ids, 4).dtype == torch.int32
