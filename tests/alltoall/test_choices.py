# SPDX-License-Identifier: Apache-2.0
"""combine="gemm_push": addresses of single rows, and what the owner keeps to sum them."""

from __future__ import annotations

import pytest
import torch

from tests.kinds import on_ranks
from tests.rounds import Round, bits, synchronize
from tests.sending import make, results
from weft.errors import InvalidArgument, OutOfOrder
from weft.grouping.operator import ExpertGroups


@on_ranks(2)
def test_addresses(group):
    """Check refusals and addresses with combine="gemm_push"."""
    case = Round(tokens=(4, 9), hidden=256, top_k=3)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    y_shape = (group.size, 16, case.hidden)
    with make(group, case, combine="gemm_push", split_phase=False) as a2a:
        with pytest.raises(InvalidArgument, match="combine='gemm_push'"):
            a2a.output()
        groups = ExpertGroups(a2a)
        assert ExpertGroups.memory_bytes(a2a) == groups.buffers.bytes()
        grouped = groups.gather(a2a.dispatch(x, ids, weights))
        y = results(groups, grouped, 1, a2a.dtype)
        for refused, words in (
            (lambda: groups.scatter(y), "scatter on an all-to-all with"),
            (lambda: groups.send(y), "split_phase=True"),
            (groups.sent, "split_phase=True"),
            (
                lambda: a2a.combine(torch.zeros(y_shape, dtype=a2a.dtype, device=group.device)),
                "stored at its token's owner",
            ),
        ):
            with pytest.raises(InvalidArgument, match=words):
                refused()
        address = grouped.dst_addr
        assert address is not None
        synchronize(group.device)
        assert torch.equal(address != 0, grouped.slot >= 0)
        used = address[address != 0]
        assert used.unique().numel() == used.numel()
        site, rows = a2a.site, a2a.config.shape.returned_rows
        place = used - site.base - a2a.config.offsets.returned
        owner = torch.div(place, site.stride, rounding_mode="floor")
        assert torch.equal(owner, grouped.slot[address != 0].long() // a2a.max_tokens)
        within = (place - owner * site.stride) // (2 * case.hidden)
        assert bool(((within >= 0) & (within < rows)).all())
        a2a.combine()
    with make(group, case, combine="push") as a2a:
        groups = ExpertGroups(a2a)
        grouped = groups.gather(a2a.dispatch(x, ids, weights))
        assert grouped.dst_addr is None
        with pytest.raises(InvalidArgument, match="its rows have no dst_addr"):
            groups.sent()
        groups.send(results(groups, grouped, 1, a2a.dtype))
        a2a.combine_recv()
    with make(group, case, combine="gemm_push") as a2a:
        groups = ExpertGroups(a2a)
        a2a.dispatch(x, ids, weights)
        with pytest.raises(OutOfOrder, match="sent without a gather"):
            groups.sent()


@on_ranks(2)
def test_ids_and_weights_may_change_after_dispatch(group):
    case = Round(tokens=(16, 9), hidden=256)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    count = torch.tensor([3], dtype=torch.int32, device=group.device)
    outs = []
    with make(group, case, combine="gemm_push") as a2a:
        groups = ExpertGroups(a2a)
        for spoils, num_tokens in ((False, None), (True, None), (False, count)):
            own_ids, own_weights = ids.clone(), weights.clone()
            received = a2a.dispatch(x, own_ids, own_weights, num_tokens=num_tokens)
            grouped = groups.gather(received)
            if spoils:
                own_ids.fill_(-1)
                own_weights.fill_(float("nan"))
            groups.send(results(groups, grouped, 3, a2a.dtype))
            outs.append(a2a.combine_recv())
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    # Fewer tokens than before count, and the rest is zero.
    assert bool(outs[2][:3].any())
    assert not bool(outs[2][3:].any())
