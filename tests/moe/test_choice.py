# SPDX-License-Identifier: Apache-2.0
""" "auto": its rule at the limits, the measurements behind it, and equal choices on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, WIDER, Case
from weft.moe import MODES, OVERLAPS
from weft.moe.layer.choice import choose_overlap

DEEP = replace(CONFIGS["deepseek"], hidden=WIDER, intermediate=128, shared=128)
CASE = Case(DEEP, tokens=(4, 0))
GROUPED = {"gemm": "grouped", "timeout": 600.0}
ALL = [(mode, overlap) for mode in MODES for overlap in OVERLAPS]


@pytest.mark.parametrize(
    ("mode", "ranks", "most"),
    [("throughput", 4, 1024), ("low_latency", 4, 512), ("throughput", 1, 256)],
)
def test_rows_are_pushed_up_to_a_size(mode, ranks, most):
    def at(max_tokens: int, supported: list[tuple[str, str]] = ALL) -> str:
        return choose_overlap(supported, mode, max_tokens=max_tokens, num_ranks=ranks)[0]

    assert (at(1), at(most), at(most + 1)) == ("gemm_push", "gemm_push", "shared_expert")
    bare = [(mode, "none"), (mode, "gemm_push")]
    assert (at(most, bare), at(most + 1, bare)) == ("gemm_push", "none")
    assert at(1, ALL[:2] if mode == "throughput" else ALL[3:5]) == "shared_expert"
    assert at(4096, [(mode, "gemm_push")]) == "gemm_push"


def result(layer: weft.MoE, rank: int) -> torch.Tensor:
    x, logits = CASE.inputs_of(rank, layer.exchange.group.device)
    return layer(x, logits).clone()


def chosen(group: weft.Group) -> list[str]:
    """Return the choice of "auto" after running the layer and a sibling."""
    with CASE.open(group, **GROUPED) as layer:
        results, got = layer.explain(), result(layer, group.rank)
        layer.check()
        sibling = layer.sibling(
            layer._weights, shared=layer._shared, correction=CASE.correction(group.device)
        )
        assert sibling.explain() == results
        assert (layer.mode, layer.overlap) == (results.mode, results.overlap)
    with CASE.open(group, mode=results.mode, overlap="none", **GROUPED) as plain:
        assert torch.equal(result(plain, group.rank), got)
    return [results.mode, results.overlap, results.auto]


@pytest.mark.parametrize(
    ("kind", "mode"), [("cpu", "throughput"), pytest.param("cuda", None, marks=pytest.mark.gpu)]
)
def test_all_ranks_make_and_explain_the_same_choice(ranks, kind, mode):
    first, second = ranks(2, kind)(chosen)
    assert first == second
    assert first[1:3] == ["gemm_push", "gemm_push"]
    assert mode is None or first[0] == mode


def explained(group: weft.Group, options: list[dict[str, Any]]) -> Any:
    with CASE.open(group, **{**GROUPED, **options[group.rank]}) as layer:
        return layer.explain()


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ({"combine_dtype": "fp8"}, {"combine_dtype": "fp8"}, "shared_expert"),
        ({}, {"gemm": "torch"}, "shared_expert"),  # pushing needs grouped GEMMs on all ranks
        ({"gemm": "torch"}, {}, "shared_expert"),
        ({"overlap": "none"}, {"overlap": "none"}, "gemm_push"),
    ],
)
def test_options_of_any_rank_narrow_the_choice(ranks, one, other, overlap):
    first, second = ranks(2, "threads")(explained, [one, other])
    assert first == second
    assert (first.overlap, first.auto) == (one.get("overlap", overlap), overlap)
