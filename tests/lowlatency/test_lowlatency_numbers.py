# SPDX-License-Identifier: Apache-2.0
"""Quantisation in the kernel, bit by bit: zeros, denormals, infinities, NaN, and every bf16."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.kinds import ANY, on_ranks
from tests.lowlatency_rounds import Mode
from tests.rounds import bits
from weft.lowlatency import reference as low
from weft.lowlatency.operator import LowLatencyAllToAll

HIDDEN = 1024
MODES = {
    "fp8": Mode(),
    "fp8 of 32": Mode(group_size=32),
    "by column": Mode(scale="fp32_col", group_size=64),
    "powers of two": Mode(scale="ue8m0"),
    "as they are": Mode(quantize=None),
    "as deep_ep": Mode(scale="fp32_col", recipe="deep_ep"),
    "as deep_ep, powers of two": Mode(scale="ue8m0", recipe="deep_ep"),
    "as triton_dist": Mode(recipe="triton_dist"),
}


def strange_rows(device: torch.device) -> torch.Tensor:
    """Return bf16 `[96, HIDDEN]`: every bit pattern, and rows with few special values."""
    generator = torch.Generator().manual_seed(5)
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    every = every[torch.randperm(2**16, generator=generator)].view(64, HIDDEN)
    rows = torch.randn((32, HIDDEN), generator=generator).bfloat16()
    rows[0] = 0
    rows[1] = -0.0
    rows[2, 5] = float("nan")
    rows[3, 200] = float("inf")
    rows[4, 900] = -float("inf")
    rows[5] = 1e-38
    rows[6] = 9e-41  # a denormal
    rows[7] = 2.0**-117
    rows[8] = 2.0**-118
    rows[9] = 3e38
    rows[10] *= 1e-36
    rows[11].view(torch.int16)[:] = -1  # NaN with all bits set
    return torch.cat((every.view(torch.bfloat16), rows)).to(device)


def delivered(group: weft.Group, name: str) -> None:
    mode = MODES[name]
    x = strange_rows(group.device)
    ids = torch.zeros((len(x), 1), dtype=torch.int32, device=x.device)
    with LowLatencyAllToAll(
        group,
        max_tokens=len(x),
        top_k=1,
        num_experts=1,
        hidden=HIDDEN,
        timeout=600.0,
        **mode.options,
    ) as a2a:
        got = a2a.dispatch(x, ids)
        numbers, scales = low.compute_delivered_rows(
            x, mode.quantize, mode.group_size, mode.scale, mode.recipe
        )
        assert torch.equal(bits(got.x[0]), bits(numbers))
        if scales is not None:
            assert got.scales is not None
            result = low.unpack_scales(got.scales, scales.shape[1])[0]
            # Which NaN a block has is not part of the meaning where it travels as a power of two.
            assert torch.equal(result.isnan(), scales.isnan())
            assert torch.equal(result[~result.isnan()], scales[~scales.isnan()])
        y = x[None].clone()
        out = a2a.combine(y, ids, None, got.handle)
        expected = low.combine(x[:, None], ids, None, a2a.placement, reduce=mode.reduce)
        assert torch.equal(bits(out), bits(expected.where(~expected.isnan(), _nan(expected))))


def _nan(like: torch.Tensor) -> torch.Tensor:
    """Return the NaN that every combine writes."""
    return torch.full_like(like.view(torch.int16), 0x7FFF).view(like.dtype)


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("name", MODES)
def test_every_value_is_delivered_as_in_the_reference(ranks, kind, name):
    if kind == "cuda" and MODES[name].recipe == "triton_dist":
        pytest.skip("GPUs divide as Triton does: tests/compat/test_triton_dist.py")
    ranks(1, kind)(delivered, name)


@pytest.mark.parametrize("reduce", ["receiver", "sender"])
@pytest.mark.parametrize("combine_dtype", [None, "fp8"])
@on_ranks(2)
def test_sums_are_weighted_in_top_k_order(group, reduce, combine_dtype):
    """Each product is rounded, and the weights would reveal any other order."""
    generator = torch.Generator().manual_seed(9)
    tokens, top_k, hidden = 6, 8, 128
    x = torch.randn((tokens, hidden), generator=generator).bfloat16().to(group.device)
    weights = (10.0 ** torch.randint(-6, 6, (tokens, top_k), generator=generator)).float()
    weights[0, 3] = float("nan")
    weights[1, 2] = 0.0
    weights = weights.to(group.device)
    ids = torch.arange(top_k, dtype=torch.int64).repeat(tokens, 1).to(group.device)
    a2a = LowLatencyAllToAll(
        group,
        max_tokens=tokens,
        top_k=top_k,
        num_experts=top_k,
        hidden=hidden,
        quantize=None,
        combine_dtype=combine_dtype,
        reduce=reduce,
    )
    with a2a:
        got = a2a.dispatch(x, ids, weights)
        y = got.x * torch.arange(1, len(a2a.local_experts) + 1, device=x.device)[:, None, None]
        out = a2a.combine(y, ids, weights, got.handle)
        local = torch.tensor(a2a.placement.local, device=x.device)[ids]
        rows = x[:, None] * (local + 1)[..., None].to(x.dtype)
        expected = low.combine(
            rows, ids, weights, a2a.placement, reduce=reduce, combine_dtype=combine_dtype
        )
        both_nan = out.isnan() & expected.isnan()
        assert torch.equal(bits(out[~both_nan]), bits(expected[~both_nan]))
        assert bool(both_nan[0].any())
