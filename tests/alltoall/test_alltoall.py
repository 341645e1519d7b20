# SPDX-License-Identifier: Apache-2.0
"""Rounds whose every byte is known, on every kind of rank."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.rounds import Round, play

KINDS = ["threads", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = {
    "uneven tokens": Round(tokens=(5, 0, 16, 3)),
    "all full": Round(tokens=(16, 16, 16, 16), router="perfect", add=True),
    "nobody has tokens": Round(tokens=(0, 0, 0, 0)),
    "everything to the last rank": Round(tokens=(16, 7, 16, 1), router="one-hot"),
    "holes": Round(tokens=(9, 16, 2, 11), router="holes", add=True),
    "top 1": Round(tokens=(4, 5, 6, 7), top_k=1),
    "top 9 of 18, uneven experts": Round(tokens=(4, 5, 6, 7), top_k=9, experts=18),
    "top 32 of 61": Round(tokens=(4, 5, 6, 7), top_k=32, experts=61),
    "fewer experts than ranks": Round(tokens=(3, 3, 3, 3), top_k=2, experts=3),
    "fp16": Round(tokens=(5, 8, 2, 1), dtype=torch.float16),
    "fp32, wide ids": Round(tokens=(5, 8, 2, 1), dtype=torch.float32, ids_dtype=torch.int64),
    "no weights": Round(tokens=(5, 8, 2, 1), weighted=False),
    "one vector a row": Round(tokens=(5, 8, 2, 1), hidden=8),
    "a long row": Round(tokens=(5, 8, 2, 1), hidden=7168, top_k=8, experts=256),
}


def make(group: weft.Group, case: Round, **options: object) -> weft.AllToAll:
    return weft.AllToAll(
        group,
        **case.sizes(16),
        dtype=case.dtype,
        **options,  # type: ignore[arg-type]
    )


def play_twice(group: weft.Group, case: Round) -> None:
    with make(group, case) as a2a:
        play(a2a, case)
        play(a2a, case.next(seed=1, tokens=case.tokens[::-1]))
        a2a.check()


def play_all(group: weft.Group, names: list[str]) -> None:
    for name in names:
        play_twice(group, CASES[name])


@pytest.mark.parametrize("kind", ["cpu", *KINDS])
def test_every_byte_of_every_case(ranks, kind):
    ranks(4, kind)(play_all, list(CASES))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_other_group_sizes(ranks, kind, count):
    ranks(count, kind)(play_twice, Round(tokens=(5, 16, 3)[:count], experts=7))


def shrink_and_grow(group: weft.Group) -> None:
    """Rows of an earlier, larger round must not show in a smaller one."""
    case = Round(tokens=(16, 16, 16, 16)[: group.size])
    with make(group, case) as a2a:
        for seed, size in enumerate((16, 3, 0, 1, 16, 2, 15, 0, 0, 7)):
            tokens = tuple(max(0, size - r) for r in range(group.size))
            play(a2a, case.next(seed=seed, tokens=tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_change_from_round_to_round(ranks, kind):
    ranks(3, kind)(shrink_and_grow)


def scattered_experts(group: weft.Group) -> tuple[int, ...]:
    case = Round(tokens=(9, 4, 16, 0), experts=11)
    owners = torch.tensor([2, 0, 0, 3, 2, 2, 3, 0, 2, 3, 3])  # rank 1 holds none
    with make(group, case, expert_map=owners) as a2a:
        for seed in range(3):
            play(a2a, case.next(seed=seed))
        return a2a.local_experts


@pytest.mark.parametrize("kind", KINDS)
def test_an_explicit_expert_map(ranks, kind):
    owned = ranks(4, kind)(scattered_experts)
    assert owned == [(1, 2, 7), (), (0, 4, 5, 8), (3, 6, 9, 10)]


def many_payloads(group: weft.Group) -> None:
    rows = [
        weft.Payload((64,), torch.float8_e4m3fn),
        weft.Payload((5,), torch.float32),
        weft.Payload((7,), torch.uint8),
        weft.Payload((3, 2), torch.int16),
        weft.Payload((2,), torch.int64),
        weft.Payload((1,), torch.bool),
        weft.Payload((24,), torch.bfloat16),
        weft.Payload((1,), torch.float64),
    ]
    sent = [
        [
            torch.randint(
                0,
                2,
                (6, p.row_bytes),
                generator=torch.Generator().manual_seed(s),
                dtype=torch.uint8,
            )
            .view(p.dtype)
            .view(6, *p.shape)
            for p in rows
        ]
        for s in range(group.size)
    ]
    ids = torch.tensor([[0, 3], [1, 2], [-1, 3], [2, -1], [-1, -1], [3, 1]])
    a2a = weft.AllToAll(
        group, max_tokens=8, top_k=2, num_experts=4, hidden=16, dtype=torch.float32, payloads=rows
    )
    with a2a:
        device = group.device
        got = a2a.dispatch([t.to(device) for t in sent[group.rank]], ids.to(device))
        for plane, payload in enumerate(rows):
            assert got.payloads[plane].shape == (group.size, 8, *payload.shape)
            assert got.payloads[plane].dtype == payload.dtype
            for source in range(group.size):
                for token in range(6):
                    if (got.ids[source, token] >= 0).any():
                        mine = got.payloads[plane][source, token].cpu().contiguous()
                        theirs = sent[source][plane][token]
                        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        a2a.output().fill_(1.0)
        out = a2a.combine()
        reached = (torch.div(ids, 2, rounding_mode="floor").clamp(min=-1)).tolist()
        wanted = [float(len({r for r in row if r >= 0})) for row in reached]
        assert out[:, 0].tolist() == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_eight_opaque_payloads_of_odd_sizes(ranks, kind):
    ranks(2, kind)(many_payloads)


def device_count(group: weft.Group) -> None:
    case = Round(tokens=(16, 16))
    with make(group, case) as a2a:
        for count in (16, 5, 0, 9):
            x, ids, weights, add = case.of(group.rank, group.device)
            n = torch.tensor([count], dtype=torch.int32, device=group.device)
            received = a2a.dispatch(x, ids, weights, num_tokens=n)
            assert received.counts.tolist() == [count] * group.size
            assert (received.ids[:, count:] == -1).all()
            a2a.output().copy_(weft.reference.identity_experts(received, case.dtype))
            out = a2a.combine(add=add)
            wanted = weft.reference.identity_round_trip(
                x, ids, weights, a2a.placement, ranks=group.size, add=add
            )
            assert torch.equal(out[:count], wanted[:count])
            assert torch.equal(out[count:], add[count:])


@pytest.mark.parametrize("kind", KINDS)
def test_the_device_says_how_many_tokens_count(ranks, kind):
    ranks(2, kind)(device_count)


def staged_output(group: weft.Group) -> None:
    case = Round(tokens=(7, 12))
    with make(group, case) as a2a:
        x, ids, weights, _ = case.of(group.rank, group.device)
        y = weft.reference.identity_experts(a2a.dispatch(x, ids, weights), case.dtype)
        out = a2a.combine(y)
        wanted = weft.reference.identity_round_trip(
            x, ids, weights, a2a.placement, ranks=group.size
        )
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_may_return_a_tensor_of_their_own(ranks, kind):
    ranks(2, kind)(staged_output)


NANS = {torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF, torch.float32: 0x7FFFFFFF}


def every_number(group: weft.Group, dtype: torch.dtype) -> None:
    """All bit patterns of the half types, and as many of fp32, plus each other."""
    words = torch.int32 if dtype == torch.float32 else torch.int16
    generator = torch.Generator().manual_seed(3)
    span = 2**31 if words == torch.int32 else 2**15
    some = torch.randint(-span, span, (8, 8192), generator=generator).to(words)
    if words == torch.int16:
        some = torch.arange(-span, span, dtype=words).view(8, 8192)
    y = some.to(group.device).view(dtype)
    add = some.flatten()[torch.randperm(some.numel(), generator=generator)].view(8, 8192)
    add = add.to(group.device).view(dtype)
    ids = torch.zeros((8, 1), dtype=torch.int32, device=group.device)
    a2a = weft.AllToAll(
        group, max_tokens=8, top_k=1, num_experts=1, hidden=8192, dtype=dtype, timeout=600.0
    )
    with a2a:
        a2a.dispatch(torch.zeros_like(y), ids)
        out = a2a.combine(y[None], add=add)
    total = (0.0 + y.float()) + add.float()  # sums start from +0
    wanted = total.to(dtype).view(words)
    nan = torch.tensor(NANS[dtype], dtype=words, device=group.device)
    assert torch.equal(out.view(words), torch.where(total.isnan(), nan, wanted))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", NANS)
def test_every_number_is_rounded_to_nearest_even_and_nan_is_one_nan(ranks, kind, dtype):
    ranks(1, kind)(every_number, dtype)


def near_the_wrap(group: weft.Group) -> None:
    case = Round(tokens=(3, 5, 2))
    with make(group, case, _first_epoch=(1 << 40) - 4) as a2a:
        for seed in range(9):
            play(a2a, case.next(seed=seed), poison=False)
        assert len(a2a.history()) == 18


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_cross_their_wrap(ranks, kind):
    ranks(3, kind)(near_the_wrap)


def sizes(group: weft.Group) -> tuple[int, int]:
    with weft.AllToAll(group, max_tokens=9, top_k=2, num_experts=4, hidden=24) as a2a:
        said = weft.AllToAll.memory_bytes(
            ranks=group.size, max_tokens=9, top_k=2, num_experts=4, hidden=24
        )
        return said, a2a.heap.size


def test_memory_is_known_before_it_is_allocated(ranks):
    for said, allocated in ranks(2, "threads")(sizes):
        assert said == allocated
