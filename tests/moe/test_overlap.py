# SPDX-License-Identifier: Apache-2.0
"""Every overlap gives one result: the same bits, near the reference, whatever runs beside what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, EXPERTS, WIDER, Case
from tests.moe.test_layer import BOTH, poison, rounds, settle
from tests.rounds import bits
from weft.errors import InvalidArgument
from weft.moe import OVERLAPS

DEEP = replace(CONFIGS["deepseek"], hidden=WIDER, intermediate=128, shared=128)
BIASED = replace(CONFIGS["gpt-oss"], hidden=WIDER, intermediate=128)


def overlaps_of(config: weft.moe.MoEConfig, device: torch.device, **options: Any) -> list[str]:
    left_out = {"gemm_push"} if options["gemm"] != "grouped" else set()
    if device.type == "cuda" and options["mode"] == "low_latency" and config.biased:
        left_out |= {"gemm_push"} if options.get("fp8") else set()
    if not config.shared:
        left_out.add("shared_expert")
    return [overlap for overlap in OVERLAPS if overlap not in left_out]


def one_result(group: weft.Group, case: Case, options: dict[str, Any]) -> None:
    """Rounds with each overlap; the first one's bits are everyone's."""
    # A sum in another order may round to the neighbour in FP8: 2^-3 of a number.
    slack = 3.0 if options.get("fp8") else 1.0
    first: list[torch.Tensor] = []
    for overlap in overlaps_of(case.config, group.device, **options):
        found = rounds(group, case, {**options, "overlap": overlap}, slack)
        first = first or found
        for ours, theirs in zip(found, first, strict=True):
            assert torch.equal(bits(ours), bits(theirs)), overlap


GROUPED: dict[str, Any] = {"gemm": "grouped"}
CASES: list[tuple[weft.moe.MoEConfig, dict[str, Any]]] = [
    (DEEP, GROUPED),
    (DEEP, {**GROUPED, "fp8": True}),
    (DEEP, {**GROUPED, "fp8": True, "expert_map": [1] * EXPERTS}),
    (DEEP, {"gemm": "torch"}),
    (BIASED, GROUPED),
    (BIASED, {"gemm": "torch"}),
]


@BOTH
@pytest.mark.parametrize(("config", "options"), CASES)
def test_every_overlap_gives_the_same_bits(ranks, config, options, mode):
    case = Case(config, tokens=(9, 0, 4))
    ranks(3, "threads")(one_result, case, {**options, "mode": mode})


@BOTH
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_processes(ranks, kind, mode):
    options = {**GROUPED, "fp8": True, "mode": mode}
    config = replace(DEEP, hidden=256)  # pushed FP8 columns come in pairs of blocks on Hopper
    ranks(3, kind)(one_result, Case(config, tokens=(9, 0, 4)), options)


def few_rows(group: weft.Group, given: dict[str, Any]) -> None:
    """Rows that find no room count as nothing, and are not what lay there before."""
    case = Case(replace(DEEP, shared=0), tokens=(16, 16))
    with case.open(group, gemm="grouped", max_rows=8, **given) as layer:
        x, logits = case.of(group.rank, group.device)
        poison(layer)
        out = layer(x, logits)
        settle(group)
        assert bool(out.isfinite().all())
        with pytest.raises(weft.errors.TokenOverflow):
            layer.check()
    group.barrier()


@pytest.mark.parametrize("overlap", ["none", "gemm_push"])
def test_rows_without_room(ranks, overlap):
    ranks(2, "threads")(few_rows, {"overlap": overlap})


def wrong_weights(group: weft.Group) -> None:
    case = Case(DEEP, tokens=(4, 4))
    plain = weft.moe.ExpertWeights.stack(DEEP, [case.expert(e) for e in range(EXPERTS)])
    with pytest.raises(InvalidArgument, match="gate_up"):
        weft.MoE(group, DEEP, plain, max_tokens=4, shared=case.shared(group.device), fp8=True)
    with pytest.raises(InvalidArgument, match="gate_up"):
        weft.MoE(
            group,
            DEEP,
            plain.to_fp8(),
            max_tokens=4,
            shared=case.shared(group.device),
            gemm="torch",
        )


def test_weights_of_the_other_kind(ranks):
    ranks(1, "threads")(wrong_weights)
