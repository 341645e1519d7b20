"""The collective baseline: same interface, same rows, sums equal up to the order of additions."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.rounds import Round
from weft.errors import BadExpertId, InvalidArgument, OutOfOrder, TokenOverflow

CASES = [
    Round(tokens=(5, 0, 8), add=True),
    Round(tokens=(0, 0, 0)),
    Round(tokens=(8, 8, 8), router="holes", dtype=torch.float32, ids_dtype=torch.int64),
    Round(tokens=(1, 2, 3), experts=7, weighted=False, dtype=torch.float16),
]


def against_the_reference(group: weft.Group) -> None:
    for case in CASES:
        a2a = weft.CollectiveAllToAll(
            group,
            max_tokens=8,
            top_k=case.top_k,
            num_experts=case.experts,
            hidden=case.hidden,
            dtype=case.dtype,
        )
        inputs = [case.of(r, group.device) for r in range(group.size)]
        x, ids, weights, add = inputs[group.rank]
        given = [i[2] if case.weighted else None for i in inputs]
        for _ in range(2):
            received = a2a.dispatch(x, ids, given[group.rank])
            expected = weft.reference.dispatch(
                [[i[0]] for i in inputs],
                [i[1] for i in inputs],
                given,
                a2a.placement,
                rank=group.rank,
                max_tokens=8,
            )
            assert torch.equal(received.counts, expected.counts)
            assert torch.equal(received.ids, expected.ids)
            carried = (expected.ids >= 0).any(dim=2)
            assert torch.equal(received.x[carried], expected.x[carried])
            y = weft.reference.identity_experts(received, case.dtype)
            out = a2a.combine(y, add=add if case.add else None)
            wanted = weft.reference.identity_round_trip(
                x,
                ids,
                given[group.rank],
                a2a.placement,
                ranks=group.size,
                add=add if case.add else None,
            )
            torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)
        a2a.check()
        a2a.close()


def test_collectives_meet_the_reference(ranks):
    ranks(3, "cpu")(against_the_reference)


def negative_zeros(group: weft.Group) -> None:
    """Each rank sums nothing but -0.0: a sum that begins from 0 is 0.0, with and without `add`."""
    a2a = weft.CollectiveAllToAll(group, max_tokens=4, top_k=2, num_experts=4, hidden=16)
    x = torch.full((4, 16), -0.0, dtype=torch.bfloat16)
    ids = torch.tensor([[0, 2]]).expand(4, 2).contiguous()
    for add in (None, x):
        received = a2a.dispatch(x, ids)
        out = a2a.combine(torch.full_like(received.x, -0.0), add=add)
        assert not out.signbit().any()
    a2a.close()


def test_sums_begin_from_zero(ranks):
    ranks(2, "cpu")(negative_zeros)


def refusals(group: weft.Group) -> None:
    a2a = weft.CollectiveAllToAll(group, max_tokens=4, top_k=2, num_experts=4, hidden=16)
    x = torch.zeros((2, 16), dtype=torch.bfloat16)
    ids = torch.tensor([[0, 4], [1, -1]])
    with pytest.raises(OutOfOrder):
        a2a.combine()
    with pytest.raises(InvalidArgument):
        a2a.dispatch(x.float(), ids)
    with pytest.raises(TokenOverflow):
        a2a.dispatch(torch.zeros((5, 16), dtype=torch.bfloat16), torch.zeros((5, 2)).int())
    a2a.dispatch(x, ids)
    with pytest.raises(OutOfOrder):
        a2a.dispatch(x, ids)
    a2a.combine()
    with pytest.raises(BadExpertId, match="1 ids"):
        a2a.check()
    a2a.check()


def test_collectives_refuse_what_the_one_sided_way_refuses(ranks):
    ranks(2, "cpu")(refusals)
