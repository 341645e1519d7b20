# SPDX-License-Identifier: Apache-2.0
"""Quantised rows, counts of missing peers, and the order of split calls."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.kinds import THREADS, on_ranks
from tests.rounds import Round, bits, combine_options, play
from weft.errors import InvalidArgument, OutOfOrder


def strange_rows(hidden: int) -> torch.Tensor:
    """Return rows whose blocks are zeros, specials, tiny, huge, and everything between."""
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
    *((torch.bfloat16, 7168), (torch.bfloat16, 128)),
    *((torch.float16, 640), (torch.float32, 640)),
)


@pytest.mark.parametrize("quantize", ["fp8", "mxfp8"])
@on_ranks(2)
def test_dispatch_quantises_bit_by_bit(group, quantize):
    for dtype, hidden in QUANTISED:
        case = Round(tokens=(16, 16), hidden=hidden, dtype=dtype, top_k=2, experts=6, extra=(12,))
        with case.open(group, quantize=quantize) as a2a:
            x = strange_rows(hidden).to(dtype)
            tag = torch.arange(16 * 12, dtype=torch.uint8).view(16, 12)
            ids = case.inputs_of(group.rank, group.device)[1]
            received = a2a.dispatch([x.to(group.device), tag.to(group.device)], ids)
            carries = (received.ids >= 0).any(dim=2).cpu()
            q, scales, tags = (plane.cpu() for plane in received.payloads)
            expected_q, expected_scales = weft.reference.quantize(x, quantize)
            for source in range(group.size):
                kept = carries[source]
                assert torch.equal(bits(q[source][kept]), bits(expected_q[kept]))
                # Which NaN a NaN scale is, is not defined.
                result = scales[source][kept].float().nan_to_num(7e37)
                assert torch.equal(result, expected_scales[kept].float().nan_to_num(7e37))
                assert torch.equal(tags[source][kept], tag[kept])
            a2a.output().zero_()
            a2a.combine()
            a2a.check()


@pytest.mark.parametrize("kind", ["fp8", "mxfp8"])
def test_errors_are_bounded(kind):
    """|x - q s| <= 2^-4 |x| for normal values of a block, and half a subnormal step otherwise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((64, 1024), generator=generator) * torch.logspace(-30, 30, 64)[:, None]
    q, scales = weft.reference.quantize(x, kind)
    back = weft.reference.dequantize(q, scales).double()
    step = scales.double().repeat_interleave(1024 // scales.shape[1], dim=1)
    error = (back - x.double()).abs()
    allowed = torch.maximum(2.0**-4 * x.double().abs(), 2.0**-10 * step)
    assert bool((error <= allowed * (1 + 1e-6)).all())


@pytest.mark.parametrize("way", ["push", "fp8"])
@on_ranks(3)
def test_counts_beyond_the_inbox_are_clamped(group, way):
    case = Round(tokens=(16, 16, 16), hidden=256, experts=18, top_k=6, options=combine_options(way))
    with case.open(group) as a2a:
        for lie in (-1, 2**31 - 1):
            received = a2a.dispatch(*case.inputs_of(group.rank, group.device)[:3])
            a2a.output().zero_()
            received.counts.fill_(lie)
            a2a.combine()
        play(a2a, case, poison=False)


@on_ranks(3, [THREADS])
def test_split_calls_must_alternate(group):
    case = Round(tokens=(5, 0, 16), hidden=256)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    with case.open(group) as a2a, pytest.raises(InvalidArgument, match="split_phase=True"):
        a2a.dispatch_send(x, ids, weights)
    with case.open(group, split_phase=True) as a2a:
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
