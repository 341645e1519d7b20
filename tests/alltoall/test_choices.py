# SPDX-License-Identifier: Apache-2.0
"""Expert rows that return one by one: their addresses, and what the owner keeps to sum them by."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.rounds import Round, bits, settle
from tests.sending import make, results
from weft.errors import InvalidArgument, OutOfOrder
from weft.grouping.operator import ExpertGroups

KINDS = ["threads", pytest.param("cuda", marks=pytest.mark.gpu)]


def own_addresses(group: weft.Group) -> None:
    """What is refused where choices return one by one, and what an address is."""
    case = Round(tokens=(4, 9), hidden=256, top_k=3)
    x, ids, weights, add = case.of(group.rank, group.device)
    y_shape = (group.size, 16, case.hidden)
    with make(group, case, combine="gemm_push", split_phase=False) as a2a:
        with pytest.raises(InvalidArgument, match="combine='gemm_push'"):
            a2a.output()
        groups = ExpertGroups(a2a)
        assert ExpertGroups.memory_bytes(a2a) == groups._buffers.bytes()
        grouped = groups.gather(a2a.dispatch(x, ids, weights))
        y = results(groups, grouped, 1, a2a.dtype)
        with pytest.raises(InvalidArgument, match="scatter on an all-to-all with"):
            groups.scatter(y)
        for refused in (lambda: groups.send(y), groups.sent):
            with pytest.raises(InvalidArgument, match="split_phase=True"):
                refused()
        with pytest.raises(InvalidArgument, match="stored at its token's owner"):
            a2a.combine(torch.zeros(y_shape, dtype=a2a.dtype, device=group.device))
        address = grouped.dst_addr
        assert address is not None
        settle(group.device)
        assert torch.equal(address != 0, grouped.slot >= 0)
        used = address[address != 0]
        assert used.unique().numel() == used.numel()
        at, rows = a2a._site, a2a.config.shape.returned_rows
        place = used - at.base - a2a.config.offsets.returned
        owner = torch.div(place, at.stride, rounding_mode="floor")
        assert torch.equal(owner, grouped.slot[address != 0].long() // a2a.max_tokens)
        within = (place - owner * at.stride) // (2 * case.hidden)
        assert bool(((within >= 0) & (within < rows)).all())
        a2a.combine()
    with make(group, case, combine="push") as a2a:
        groups = ExpertGroups(a2a)
        grouped = groups.gather(a2a.dispatch(x, ids, weights))
        assert grouped.dst_addr is None
        with pytest.raises(InvalidArgument, match="its rows have no addresses"):
            groups.sent()
        groups.send(results(groups, grouped, 1, a2a.dtype))
        a2a.combine_recv()
    with make(group, case, combine="gemm_push") as a2a:
        groups = ExpertGroups(a2a)
        a2a.dispatch(x, ids, weights)
        with pytest.raises(OutOfOrder, match="sent without a gather"):
            groups.sent()


@pytest.mark.parametrize("kind", KINDS)
def test_addresses(ranks, kind):
    ranks(2, kind)(own_addresses)


def changed(group: weft.Group) -> None:
    """The caller's ids and weights may change once dispatch has read them."""
    case = Round(tokens=(16, 9), hidden=256)
    x, ids, weights, _ = case.of(group.rank, group.device)
    outs = []
    with make(group, case, combine="gemm_push") as a2a:
        groups = ExpertGroups(a2a)
        for spoils in (False, True):
            mine, scale = ids.clone(), weights.clone()
            grouped = groups.gather(a2a.dispatch(x, mine, scale))
            if spoils:
                mine.fill_(-1)
                scale.fill_(float("nan"))
            groups.send(results(groups, grouped, 3, a2a.dtype))
            outs.append(a2a.combine_recv())
        # Fewer tokens than before: the device's own count says so, and the rest is zero.
        count = torch.tensor([3], dtype=torch.int32, device=group.device)
        grouped = groups.gather(a2a.dispatch(x, ids, weights, num_tokens=count))
        groups.send(results(groups, grouped, 3, a2a.dtype))
        few = a2a.combine_recv()
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    assert bool(few[:3].any())
    assert not bool(few[3:].any())


@pytest.mark.parametrize("kind", KINDS)
def test_choices_are_kept_from_dispatch(ranks, kind):
    ranks(2, kind)(changed)
