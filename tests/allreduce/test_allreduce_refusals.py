# SPDX-License-Identifier: Apache-2.0
"""Invalid arguments are refused on the host, with the fix, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.kinds import THREADS, on_ranks
from tests.sums import Sum, play
from weft.errors import InvalidArgument, OutOfOrder, TokenOverflow

CASE = Sum(4, 256)
BF16 = torch.bfloat16


def rows(tokens: int = 4, hidden: int = 256, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros((tokens, hidden), dtype=dtype)


def calls() -> list[tuple[str, dict[str, object], str]]:
    x, weight = rows(), torch.ones(256)
    fp8 = torch.zeros((4, 256), dtype=torch.float8_e4m3fn)
    token, static = weft.FP8Token(), weft.FP8Static(torch.ones(1))
    index = torch.zeros((4, 2), dtype=torch.int32)
    moe = weft.MoEFinalize
    return [
        ("no rows", {}, "pass exactly one of them"),
        ("both", {"x": x, "prologue": moe(x, index)}, "pass exactly one of them"),
        ("dtype", {"x": rows(dtype=torch.float16)}, "x has dtype torch.float16"),
        ("hidden", {"x": rows(hidden=248)}, "x has shape [4, 248]; it must be [4, 256]"),
        ("strides", {"x": rows(8)[::2]}, "pass x.contiguous()"),
        ("alignment", {"x": torch.zeros(1032, dtype=BF16)[1:1025].view(4, 256)}, "x.clone()"),
        ("residual", {"x": x, "residual": rows(5)}, "residual has shape [5, 256]"),
        ("weight", {"x": x, "weight": torch.ones(128)}, "weight has shape [128]"),
        ("quant alone", {"x": x, "quant": token}, "weight is None, but quant"),
        ("quant", {"x": x, "weight": weight, "quant": "fp4"}, "NVFP4"),
        ("scale", {"x": x, "weight": weight, "quant": weft.FP8Static(torch.ones(2))}, "[1]"),
        ("residual_out", {"x": x, "residual_out": True}, "residual_out needs residual"),
        ("norm_out", {"x": x, "norm_out": True}, "norm_out needs weight"),
        ("quant_out", {"x": x, "weight": weight, "quant_out": fp8}, "quant_out needs quant"),
        ("scale_out", {"x": x, "weight": weight, "quant": static, "scale_out": True}, "scale_out"),
        ("half", {"x": x, "weight": weight, "quant": token, "scale_out": False}, "or neither"),
        ("rows", {"prologue": moe(rows(hidden=8), index)}, "rows has shape"),
        ("scales", {"prologue": moe(x, index, torch.ones(4, 3))}, "scales has shape"),
        ("shared", {"prologue": moe(x, index, None, rows(3))}, "shared has shape"),
    ]


def overlaps() -> list[dict[str, object]]:
    x, weight = rows(8), torch.ones(256, dtype=BF16)
    table = rows(8)
    index = torch.zeros((4, 1), dtype=torch.int32)
    return [
        {"x": x[:4], "out": x[2:6]},
        {"x": x[:4], "residual": table[:4], "weight": weight, "norm_out": table[1:5]},
        {"x": x[:4], "weight": weight, "out": table[:4], "norm_out": table[:4]},
        {"prologue": weft.MoEFinalize(table, index), "out": table[:4]},
        {"x": x[:1], "weight": weight, "out": weight.view(1, 256)},
    ]


def refuses(ar: weft.AllReduce) -> None:
    """Assert that each invalid call raises its text."""
    for name, kwargs, text in calls():
        with pytest.raises(InvalidArgument) as caught:
            ar.fused(**kwargs)  # type: ignore[arg-type]
        assert text in str(caught.value), name
    for kwargs in overlaps():
        with pytest.raises(InvalidArgument, match="overlaps"):
            ar.fused(**kwargs)  # type: ignore[arg-type]
    with pytest.raises(TokenOverflow, match="9 tokens in one call"):
        ar.fused(rows(9))


@on_ranks(2, [THREADS])
def test_invalid_calls_are_refused_without_effect(group):
    with weft.AllReduce(group, max_tokens=8, hidden=256, first_timeout=600.0) as ar:
        refuses(ar)
        play(ar, CASE, "oneshot")  # nothing was sent, nothing is broken
    for late in (lambda: ar.fused(rows()), ar.check, ar.abort, ar.history):
        with pytest.raises(OutOfOrder, match="closed"):
            late()
    ar.close()


@on_ranks(2, [THREADS])
def test_twoshot_does_not_continue_without_a_rank(group):
    sizes: dict[str, Any] = {"max_tokens": 8, "hidden": 256}
    with pytest.raises(InvalidArgument, match="'twoshot'.* with missing='drop'.*Omit backends"):
        weft.AllReduce(group, missing="drop", backends=("twoshot",), **sizes)
    with weft.AllReduce(group, missing="drop", **sizes) as ar:
        assert ar.backends == ("oneshot",)


@on_ranks(2, [THREADS])
def test_packed_scales_are_column_major(group):
    with weft.AllReduce(group, max_tokens=8, hidden=640, first_timeout=600.0) as ar:
        x, weight, quant = rows(4, 640), torch.ones(640), weft.FP8Group(128, "ue8m0")
        for wrong in (torch.zeros((4, 2), dtype=torch.int32), torch.zeros((2, 4)).t()):
            with pytest.raises(InvalidArgument, match="with strides"):
                ar.fused(x, weight=weight, quant=quant, scale_out=wrong)
        right = torch.full((2, 8), -1, dtype=torch.int32)
        ar.fused(x + 1, weight=weight, quant=quant, scale_out=right.t()[:4])
        assert bool((right[:, :4] != -1).all())
        assert bool((right[:, 4:] == -1).all()), "padding is the caller's"


@on_ranks(2, [THREADS])
def test_groups_need_whole_groups(group):
    with (
        weft.AllReduce(group, max_tokens=8, hidden=264, first_timeout=600.0) as ar,
        pytest.raises(InvalidArgument, match="pad hidden to 384"),
    ):
        ar.fused(rows(4, 264), weight=torch.ones(264), quant=weft.FP8Group())
