# SPDX-License-Identifier: Apache-2.0
"""The drop-ins' masks: those of the group, which change when it recovers from a death."""

import re
from collections.abc import Callable

import pytest
import torch

import weft
from tests.baseline import die
from tests.compat import calls
from tests.compat.calls import HIDDEN, PLACEMENT, RANKS, identity, make, returned, routing
from tests.compat.test_low_latency import EXPERTS, dispatched, inputs
from tests.ranks import on_ranks
from tests.recovery import Survivors, run_until_broken
from tests.rounds import bits, drop_dead_ids
from weft import reference
from weft.compat.deep_ep import Buffer
from weft.errors import BadExpertId, InvalidArgument


def mask(*ranks: int) -> torch.Tensor:
    return torch.tensor([sum(1 << r for r in ranks)], dtype=torch.uint64)


def lose(survivors: Survivors, dies: int, one_round: Callable[[], object]) -> None:
    survivors.barrier()
    if survivors.group.rank == dies:
        die()
    run_until_broken(one_round)
    survivors.lose(dies)


@on_ranks(RANKS, "cpu", dies=[1])
def test_flashinfer(group: weft.Group) -> None:
    survivors = Survivors(group)
    with make(group, enable_rank_mask=True) as a2a:

        def one_round(seed: int) -> None:
            living = survivors.ranks
            ids, weights = routing(seed, group.rank, 4)
            x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()
            sent = a2a.dispatch(ids, [x, ids, weights], 4, active_rank_mask=mask(*living))
            y = identity(sent, calls.experts_of(group.rank))
            got = a2a.combine(y, 4, active_rank_mask=mask(*living))
            kept = drop_dead_ids(ids, PLACEMENT.ranks, living)
            expected = reference.identity_round_trip(x, kept, weights, PLACEMENT, ranks=RANKS)
            assert torch.equal(bits(got), bits(expected))

        for seed in range(2):
            one_round(seed)
        # A round that the death breaks between dispatch and combine.
        lose(survivors, 1, lambda: one_round(7))
        ids, weights = routing(0, group.rank, 4)
        x = torch.ones(4, HIDDEN).bfloat16()
        for wrong, words in (((0, 1, 2), r"ranks \[1\] are dead"), ((group.rank,), "every living")):
            with pytest.raises(InvalidArgument, match=f"active_rank_mask is 0x.*{words}"):
                a2a.dispatch(ids, [x], 4, active_rank_mask=mask(*wrong))
        for seed in range(4):
            one_round(seed)
        with pytest.raises(BadExpertId, match="an expert of rank 1, which has exited"):
            a2a.check()
        survivors.barrier()


@on_ranks(4, "cpu", dies=[2])
def test_deep_ep(group: weft.Group) -> None:
    survivors = Survivors(group)
    buffer = Buffer(group, low_latency_mode=True, enable_shrink=True)
    status = torch.full((group.size,), 7, dtype=torch.int32)

    def one_round(seed: int) -> None:
        x = inputs(group, seed)[0]
        rows, ids, weights, handle = dispatched(buffer, seed)
        got, _, _ = buffer.low_latency_combine(rows.clone(), ids, weights, handle)
        owners = weft.Placement.blocks(EXPERTS, group.size).ranks
        kept = drop_dead_ids(ids, owners, survivors.ranks)
        expected = returned((x, kept, weights), EXPERTS, group.size, None)
        assert torch.equal(bits(got), bits(expected))

    one_round(0)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 0, 0, 0]
    buffer.low_latency_clean_mask_buffer()
    with pytest.raises(InvalidArgument, match="mask is True for rank 2, which is alive"):
        buffer.low_latency_update_mask_buffer(2, True)
    lose(survivors, 2, lambda: one_round(9))
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0, 0, 1, 0]
    buffer.low_latency_update_mask_buffer(2, True)
    with pytest.raises(InvalidArgument, match=re.escape("mask is False for rank 2, which is")):
        buffer.low_latency_clean_mask_buffer()
    for seed in range(4):
        one_round(seed)
    survivors.barrier()
