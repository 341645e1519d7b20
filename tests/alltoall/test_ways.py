# SPDX-License-Identifier: Apache-2.0
"""Rows pushed to their owners, FP8 on the wire in both directions, and phases in two halves."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.alltoall.test_alltoall import make
from tests.rounds import Round, bits, combining
from weft.errors import InvalidArgument, OutOfOrder

KINDS = ["threads", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = [
    Round(tokens=(5, 0, 16), hidden=256, add=True),
    Round(tokens=(16, 16, 16), hidden=1152, router="perfect", experts=18, top_k=6),
    Round(tokens=(0, 0, 0), hidden=256),
    Round(tokens=(9, 16, 2), hidden=256, router="holes", dtype=torch.float16, add=True),
    Round(tokens=(3, 1, 7), hidden=384, router="one-hot", dtype=torch.float32),
    Round(tokens=(4, 5, 6), hidden=7168, top_k=8, experts=256),
]


def return_rows(group: weft.Group, way: str, split_phase: bool) -> None:
    for case in CASES:
        with make(group, case, **combining(way), split_phase=split_phase) as a2a:
            for seed in range(3):
                turn = case.next(seed=seed, tokens=case.tokens[seed:] + case.tokens[:seed])
                one_round(a2a, turn, way, split_phase)
            a2a.check()


def one_round(a2a: weft.AllToAll, case: Round, way: str, split_phase: bool) -> None:
    group = a2a.group
    x, ids, weights, add = case.of(group.rank, group.device)
    given, out = add if case.add else None, torch.full_like(x, float("nan"))
    if split_phase:
        a2a.dispatch_send(x, ids, weights)
        between = x.float().sum()  # anything at all fits between the halves
        received = a2a.dispatch_recv()
    else:
        received = a2a.dispatch(x, ids, weights)
    a2a.output().copy_(weft.reference.identity_experts(received, case.dtype))
    if split_phase:
        a2a.combine_send()
        between = between + 1
        a2a.combine_recv(out=out, add=given)
    else:
        a2a.combine(out=out, add=given)
    wanted = weft.reference.identity_round_trip(
        x,
        ids,
        weights,
        a2a.placement,
        ranks=group.size,
        add=given,
        combine_dtype={"fp8": "fp8"}.get(way),
    )
    assert torch.equal(bits(out), bits(wanted))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split_phase", [False, True])
@pytest.mark.parametrize("way", ["pull", "push", "fp8"])
def test_rows_return_bit_by_bit(ranks, kind, way, split_phase):
    ranks(3, kind)(return_rows, way, split_phase)


def strange_rows(hidden: int) -> torch.Tensor:
    """Rows whose blocks are zeros, specials, tiny, huge, and everything between."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((16, hidden), generator=generator)
    x *= torch.logspace(-40, 36, 16)[:, None]
    x[1] = 0
    x[2, 5] = float("inf")
    x[3, hidden - 1] = float("nan")
    x[4, :128] = 2.0**-118
    x[5, :32] = -0.0
    x[6] = 448.0
    x[7] = torch.linspace(-500, 500, hidden)
    return x


# One block, several, and as many as a model has.
QUANTISED = (
    (torch.bfloat16, 7168),
    (torch.bfloat16, 128),
    (torch.float16, 640),
    (torch.float32, 640),
)


def quantised(group: weft.Group, kind: str) -> None:
    for dtype, hidden in QUANTISED:
        case = Round(tokens=(16, 16), hidden=hidden, dtype=dtype, top_k=2, experts=6)
        extra = weft.Payload((3,), torch.int32)
        a2a = make(group, case, quantize=kind, payloads=[weft.Payload((hidden,), dtype), extra])
        with a2a:
            x = strange_rows(hidden).to(dtype).to(group.device)
            tag = torch.arange(48, dtype=torch.int32, device=group.device).view(16, 3)
            ids = case.of(group.rank, group.device)[1]
            received = a2a.dispatch([x, tag], ids)
            carried = (received.ids >= 0).any(dim=2)
            q, scales, tags = received.payloads
            wanted_q, wanted_scales = weft.reference.quantize(x.cpu(), kind)
            for source in range(group.size):
                here = carried[source].cpu()
                assert torch.equal(bits(q[source].cpu()[here]), bits(wanted_q[here]))
                # Which NaN a NaN scale is, is not told.
                ours = scales[source].cpu()[here].float().nan_to_num(7e37)
                theirs = wanted_scales[here].float().nan_to_num(7e37)
                assert torch.equal(ours, theirs)
                assert torch.equal(tags[source].cpu()[here], tag.cpu()[here])
            a2a.output().zero_()
            a2a.combine()
            a2a.check()


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize("kind", ["fp8", "mxfp8"])
def test_dispatch_quantises_bit_by_bit(ranks, device, kind):
    ranks(2, device)(quantised, kind)


@pytest.mark.parametrize("kind", ["fp8", "mxfp8"])
def test_errors_are_bounded(kind):
    """|x - q s| <= 2^-4 |x| for normal numbers of a block, and half a subnormal step below them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((64, 1024), generator=generator) * torch.logspace(-30, 30, 64)[:, None]
    q, scales = weft.reference.quantize(x, kind)
    back = weft.reference.dequantize(q, scales).double()
    columns = 1024 // scales.shape[1]
    step = scales.double().repeat_interleave(columns, dim=1)
    error = (back - x.double()).abs()
    allowed = torch.maximum(2.0**-4 * x.double().abs(), 2.0**-10 * step)
    assert bool((error <= allowed * (1 + 1e-6)).all())


def lying_counts(group: weft.Group, way: str) -> None:
    case = CASES[1]
    with make(group, case, **combining(way)) as a2a:
        for lie in (-1, 2**31 - 1):
            x, ids, weights, _ = case.of(group.rank, group.device)
            received = a2a.dispatch(x, ids, weights)
            a2a.output().zero_()
            received.counts.fill_(lie)
            a2a.combine()
        one_round(a2a, case, way, split_phase=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["push", "fp8"])
def test_a_count_is_never_believed_beyond_the_inbox(ranks, kind, way):
    ranks(3, kind)(lying_counts, way)


def out_of_turn(group: weft.Group) -> None:
    case = CASES[0]
    x, ids, weights, _ = case.of(group.rank, group.device)
    with make(group, case) as a2a, pytest.raises(InvalidArgument, match="split_phase=True"):
        a2a.dispatch_send(x, ids, weights)
    with make(group, case, split_phase=True) as a2a:
        for call in (a2a.dispatch_recv, a2a.combine_send, a2a.combine_recv, a2a.combine):
            with pytest.raises(OutOfOrder, match="expects dispatch"):
                call()
        a2a.dispatch_send(x, ids, weights)
        with pytest.raises(OutOfOrder, match="expects dispatch_recv"):
            a2a.dispatch(x, ids, weights)
        a2a.dispatch_recv()
        a2a.combine_send()
        with pytest.raises(OutOfOrder, match="expects combine_recv"):
            a2a.combine()
        a2a.combine_recv()


def test_halves_come_in_turn(ranks):
    ranks(3, "threads")(out_of_turn)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantize": "fp8", "hidden": 96}, ("96", "pad hidden to 128")),
        ({"combine_dtype": "fp8", "hidden": 200}, ("200", "pad hidden to 256")),
        (
            {"quantize": "fp8", "payloads": [weft.Payload((64,), torch.uint8)]},
            ("[64]", "uint8", "[128]"),
        ),
    ],
)
def test_sizes_that_cannot_be(options, words):
    sizes = {"ranks": 2, "max_tokens": 8, "top_k": 2, "num_experts": 4, "hidden": 128, **options}
    with pytest.raises(InvalidArgument) as caught:
        weft.AllToAll.memory_bytes(**sizes)
    assert all(word in str(caught.value) for word in words), caught.value
