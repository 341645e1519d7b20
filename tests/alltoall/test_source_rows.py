# SPDX-License-Identifier: Apache-2.0
"""dispatch(rows=n): contiguous slots for each source, as many as the call needs."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.kinds import on_ranks
from tests.rounds import Round, bits, combine_options, synchronize
from weft.errors import GeometryMismatch, InvalidArgument
from weft.grouping.operator import ExpertGroups

TOKENS = 12


@on_ranks(2)
def test_results_are_views_of_symmetric_memory(group):
    case = Round(tokens=(4, 2), hidden=128)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    with case.open(group, TOKENS, split_phase=True) as a2a:
        a2a.dispatch_send(x, ids, weights, rows=4)
        received, output = a2a.dispatch_recv(), a2a.output(4)
        assert received.x.shape == (2, 4, 128)
        assert received.ids.shape == received.weights.shape == (2, 4, 4)
        for view in (received.x, output):
            assert view.is_contiguous()
            assert view.view(-1, 128).data_ptr() == view.data_ptr()
        assert received.ids.view(-1, 4).data_ptr() == received.ids.data_ptr()
        assert output.data_ptr() == a2a.output().data_ptr()
        y = weft.reference.identity_experts(received, case.dtype)
        expected = weft.reference.identity_round_trip(x, ids, weights, a2a.placement, ranks=2)
        a2a.combine_send(y)
        assert torch.equal(bits(a2a.combine_recv()), bits(expected))
        a2a.dispatch(x, ids, weights, rows=4)
        with pytest.raises(InvalidArgument, match=r"\[2, 12, 128\]; it must be \[2, 4, 128\]"):
            a2a.combine(torch.zeros(2, 12, 128, dtype=case.dtype, device=group.device))
        a2a.combine(y)
        with pytest.raises(InvalidArgument, match="rows is 1, but this rank sends 2 tokens"):
            a2a.dispatch(x[:2], ids[:2], rows=1)


@pytest.mark.parametrize("way", ["pull", "push", "fp8", "choices"])
@on_ranks(3)
def test_grouping(group, way):
    """Group rows and return them with fewer slots than max_tokens per source."""
    case = Round(tokens=(5, 0, 3), hidden=128, options=combine_options(way))
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    outs = []
    with case.open(group, TOKENS, split_phase=True) as a2a:
        groups = ExpertGroups(a2a)
        for rows in (None, 5, 6, 12):
            got = groups.gather(a2a.dispatch(x, ids, weights, rows=rows))
            owners = got.slot[got.slot >= 0] // a2a.max_tokens
            assert bool((owners != 1).all())
            y = torch.where(got.slot[:, None] >= 0, got.x, 0).to(case.dtype)
            if way == "pull":
                groups.scatter(y)
                outs.append(a2a.combine())
            else:
                groups.send(y)
                outs.append(a2a.combine_recv())
        assert all(torch.equal(bits(outs[0]), bits(other)) for other in outs[1:])
        assert bool(outs[0].any()) == (group.rank != 1)


@pytest.mark.parametrize("rows", [(4, 5), (None, 6), (8, None)])
@on_ranks(2)
def test_ranks_that_differ_raise_with_both_numbers(group, rows):
    case = Round(tokens=(4, 2), hidden=128)
    text = "nothing was raised"
    with case.open(group, TOKENS) as a2a:
        try:
            a2a.dispatch(*case.inputs_of(group.rank, group.device)[:3], rows=rows[group.rank])
            a2a.combine()
            synchronize(group.device)
            a2a.check()
        except GeometryMismatch as error:
            text = str(error)
    texts = group.all_gather(text)
    assert "nothing was raised" not in texts
    first, second = (TOKENS if n is None else n for n in rows)
    assert any(
        f"rank {1 - r} called with rows={b}; this rank with rows={a}." in "; ".join(texts)
        for r, a, b in ((0, first, second), (1, second, first))
    )
