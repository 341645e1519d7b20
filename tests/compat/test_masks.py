# SPDX-License-Identifier: Apache-2.0
"""The drop-ins' masks: those of the group, which change when it recovers from a death."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import weft
from tests.baseline import die
from tests.compat.calls import HIDDEN, RANKS, experts_of, identity, make, refused, routing
from tests.compat.test_low_latency import EXPERTS, MOST, inputs, whole
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
            placement = weft.Placement.blocks(7, RANKS)
            y = identity(sent, experts_of(group.rank))
            got = a2a.combine(y, 4, active_rank_mask=mask(*living))
            kept = drop_dead_ids(ids, placement.ranks, living)
            expected = reference.identity_round_trip(x, kept, weights, placement, ranks=RANKS)
            assert torch.equal(bits(got), bits(expected))

        for seed in range(2):
            one_round(seed)
        # A round that the death breaks between dispatch and combine.
        lose(survivors, 1, lambda: one_round(7))
        ids, weights = routing(0, group.rank, 4)
        x = torch.ones(4, HIDDEN).bfloat16()
        for wrong, words in (
            (mask(0, 1, 2), "ranks [1] are dead"),
            (mask(group.rank), "every living rank"),
        ):
            call = lambda wrong=wrong: a2a.dispatch(ids, [x], 4, active_rank_mask=wrong)  # noqa: E731
            refused(InvalidArgument, call, "active_rank_mask is 0x", words)
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
        x, ids, weights = inputs(group, seed)
        numbers, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
        got, _, _ = buffer.low_latency_combine(whole(numbers).clone(), ids, weights, handle)
        owners = weft.Placement.blocks(EXPERTS, group.size).ranks
        kept = drop_dead_ids(ids, owners, survivors.ranks)
        total = torch.zeros_like(x, dtype=torch.float32)
        for k in range(ids.shape[1]):
            part = x.float() * weights[:, k : k + 1]
            total = torch.where(kept[:, k : k + 1] >= 0, total + part, total)
        assert torch.equal(bits(got), bits(total.bfloat16()))

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
