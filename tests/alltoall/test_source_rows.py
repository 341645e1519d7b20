# SPDX-License-Identifier: Apache-2.0
"""dispatch(rows=n): contiguous slots for each source, as many as the call needs, on every rank."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.rounds import Round, bits, combining, play, settle
from weft.errors import GeometryMismatch, InvalidArgument
from weft.grouping.operator import ExpertGroups

KINDS = ["threads", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS = 12


def make(group: weft.Group, case: Round, way: str, **options: object) -> weft.AllToAll:
    return weft.AllToAll(
        group,
        **case.sizes(TOKENS),
        timeout=600.0,
        **{**combining(way), **options},
    )


def sizes_in_turn(group: weft.Group, way: str) -> None:
    """Every change of rows moves the slots: what the last round left must not be seen."""
    case = Round(tokens=(12, 3, 7), hidden=128)
    with make(group, case, way) as a2a:
        for seed, rows in enumerate((None, 12, 5, 1, 2, 5, 12, 1, 7, None, 3)):
            most = TOKENS if rows is None else rows
            tokens = tuple((most, 0, most // 2)[(r + seed) % 3] for r in range(group.size))
            play(a2a, case.next(tokens=tokens, seed=seed, add=seed % 2 == 0), rows=rows)
        settle(group.device)
        a2a.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["pull", "push"])
def test_rounds_of_any_rows(ranks, kind, way):
    ranks(3, kind)(sizes_in_turn, way)


def fp8_both_ways(group: weft.Group) -> None:
    """Rows that are quantised on the way are those of a round with max_tokens."""
    case = Round(tokens=(5, 1, 3), hidden=256)
    x, ids, weights, _ = case.of(group.rank, group.device)
    outs = []
    with make(group, case, "fp8", quantize="fp8") as a2a:
        for rows in (None, 5, 7, 12, 5):
            received = a2a.dispatch(x, ids, weights, rows=rows)
            values, scales = received.payloads
            y = a2a.output(rows)
            y.copy_(torch.where((received.ids >= 0).any(2, keepdim=True), values.float(), 0.0))
            y *= torch.nan_to_num(scales).clamp(0, 1).repeat_interleave(128, dim=2).to(y.dtype)
            outs.append(a2a.combine())
    assert bool(outs[0].any())
    for other in outs[1:]:
        assert torch.equal(bits(outs[0]), bits(other))


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_rows(ranks, kind):
    ranks(3, kind)(fp8_both_ways)


def views(group: weft.Group) -> None:
    """No copy: views of symmetric memory that `.view(-1, hidden)` takes, cached, and halves."""
    case = Round(tokens=(4, 2), hidden=128)
    x, ids, weights, _ = case.of(group.rank, group.device)
    with make(group, case, "pull", split_phase=True) as a2a:
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
        wanted = weft.reference.identity_round_trip(x, ids, weights, a2a.placement, ranks=2)
        a2a.combine_send(y)
        assert torch.equal(bits(a2a.combine_recv()), bits(wanted))
        a2a.dispatch(x, ids, weights, rows=4)
        with pytest.raises(InvalidArgument, match=r"\[2, 12, 128\]; it must be \[2, 4, 128\]"):
            a2a.combine(torch.zeros(2, 12, 128, dtype=case.dtype, device=group.device))
        a2a.combine(y)
        for rows, why in ((0, "in 1..12"), (13, "in 1..12"), (True, "integer"), (2.0, "integer")):
            with pytest.raises(InvalidArgument, match=f"rows is .*{why}"):
                a2a.dispatch(x[:1], ids[:1], rows=rows)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="rows is 1, but this rank sends 2 tokens"):
            a2a.dispatch(x[:2], ids[:2], rows=1)


@pytest.mark.parametrize("kind", KINDS)
def test_views(ranks, kind):
    ranks(2, kind)(views)


def grouped(group: weft.Group, way: str) -> None:
    """Rows by expert, and the way back, where slots lie closer than max_tokens."""
    case = Round(tokens=(5, 0, 3), hidden=128)
    x, ids, weights, _ = case.of(group.rank, group.device)
    outs = []
    with make(group, case, way, split_phase=True) as a2a:
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
        for other in outs[1:]:
            assert torch.equal(bits(outs[0]), bits(other))
        assert bool(outs[0].any()) == (group.rank != 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["pull", "push", "fp8", "choices"])
def test_grouping(ranks, kind, way):
    ranks(3, kind)(grouped, way)


def different(group: weft.Group, mine: tuple[int | None, int | None]) -> str:
    case = Round(tokens=(4, 2), hidden=128)
    x, ids, weights, _ = case.of(group.rank, group.device)
    with make(group, case, "pull") as a2a:
        try:
            a2a.dispatch(x, ids, weights, rows=mine[group.rank])
            a2a.combine()
            settle(group.device)
            a2a.check()
        except GeometryMismatch as error:
            return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mine", [(4, 5), (None, 6), (8, None)])
def test_ranks_that_differ_are_told_both_numbers(ranks, kind, mine):
    said = "; ".join(ranks(2, kind)(different, mine))
    assert "nothing" not in said
    first, second = (TOKENS if n is None else n for n in mine)
    assert any(
        f"rank {1 - r} called with rows={b}; this rank with rows={a}." in said
        for r, a, b in ((0, first, second), (1, second, first))
    )
