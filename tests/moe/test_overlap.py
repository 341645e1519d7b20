"""Every overlap gives one result: the same bits, near the reference, whatever runs beside what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, EXPERTS, WIDER, Case, bound
from tests.moe.test_layer import poison, settle
from tests.rounds import bits
from weft.errors import InvalidArgument
from weft.moe import OVERLAPS

DEEP = replace(CONFIGS["deepseek"], hidden=WIDER, intermediate=128, shared=128)
BIASED = replace(CONFIGS["gpt-oss"], hidden=WIDER, intermediate=128)
MODES: dict[str, dict[str, Any]] = {
    "none": {"overlap": "none"},
    "shared_expert": {"overlap": "shared_expert"},
    "gemm_push": {"overlap": "gemm_push"},
}


def modes_of(config: weft.moe.MoEConfig, gemm: str) -> dict[str, dict[str, Any]]:
    left_out = {"gemm_push"} if gemm != "grouped" else set()
    if not config.shared:
        left_out.add("shared_expert")
    return {name: given for name, given in MODES.items() if name not in left_out}


def one_result(group: weft.Group, case: Case, options: dict[str, Any]) -> None:
    """Three rounds in each mode, over poison; the first mode's bits are everyone's."""
    fp8 = bool(options.get("fp8"))
    first: dict[int, torch.Tensor] = {}
    for given in modes_of(case.config, options["gemm"]).values():
        with case.open(group, **options, **given) as layer:
            for seed in range(3):
                turn = seed % len(case.tokens)
                now = case.next(seed=seed, tokens=case.tokens[turn:] + case.tokens[:turn])
                x, logits = now.of(group.rank, group.device)
                poison(layer)
                result = layer(x, logits, out=torch.full_like(x, float("nan")))
                settle(group)
                layer.check()
                assert torch.equal(bits(first.setdefault(seed, result)), bits(result)), given
                if first[seed] is result:
                    wanted = now.wanted(layer, x, logits, fp8=fp8)
                    # A sum in another order may round to the neighbour in FP8: 2^-3 of a number.
                    slack = 3.0 if fp8 else 1.0
                    torch.testing.assert_close(
                        result.float(), wanted, rtol=0, atol=slack * bound(case.config, wanted)
                    )


@pytest.mark.parametrize("kind", ["threads", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("config", [DEEP, BIASED], ids=["deepseek", "gpt-oss"])
@pytest.mark.parametrize(
    "options",
    [{"gemm": "grouped"}, {"gemm": "grouped", "fp8": True}, {"gemm": "torch"}],
    ids=["bf16", "fp8", "torch"],
)
def test_every_overlap_gives_the_same_bits(ranks, options, config, kind):
    if kind != "threads" and (config is BIASED or options["gemm"] == "torch"):
        pytest.skip("once with processes is enough")
    ranks(3, kind)(one_result, Case(config, tokens=(9, 0, 4)), options)


@pytest.mark.parametrize("gemm", ["torch"])
def test_overlaps_with_torchs_products(ranks, gemm):
    ranks(2, "threads")(one_result, Case(DEEP, tokens=(5, 7)), {"gemm": gemm})


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_rank_without_experts(ranks, fp8):
    options = {"gemm": "grouped", "fp8": fp8, "expert_map": [1] * EXPERTS}
    ranks(2, "threads")(one_result, Case(DEEP, tokens=(5, 7)), options)


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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"overlap": "sideways"}, "choose one of"),
    ({"overlap": "push", "combine": "push", "gemm": "grouped"}, "leave combine_by out"),
    ({"overlap": "none", "combine": "gemm_push"}, "choose one of None, 'gemm_push', 'fp8'"),
    ({"overlap": "none", "combine": "pull"}, "choose one of None, 'gemm_push', 'fp8'"),
    ({"overlap": "gemm_push", "gemm": "torch"}, "use gemm='grouped'"),
    ({"fp8": True, "gemm": "torch"}, "no FP8 weights"),
    ({"fp8": True, "quantize": "mxfp8"}, "takes FP8 rows"),
    ({"gemm": "grouped", "quantize": "fp8"}, "needs FP8 weights"),
]


def refused(group: weft.Group, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Case(DEEP, tokens=(4,)).open(group, **options)


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_refusals(ranks, options, words):
    ranks(1, "threads")(refused, options, words)


def chosen(group: weft.Group) -> None:
    plain = replace(DEEP, shared=0)
    for config, options, want in (
        (DEEP, {}, "shared_expert"),
        (plain, {}, "none"),
        (DEEP, {"gemm": "grouped"}, "gemm_push"),
        (plain, {"fp8": True}, "gemm_push"),
        (DEEP, {"gemm": "grouped", "combine_dtype": "fp8"}, "shared_expert"),
        (DEEP, {"gemm": "grouped", "mode": "low_latency"}, "gemm_push"),
        (DEEP, {"gemm": "grouped", "max_tokens": 1025}, "shared_expert"),
    ):
        with Case(config, tokens=(4,)).open(group, **options) as layer:
            assert layer.overlap == want


def test_what_auto_comes_to(ranks):
    ranks(1, "threads")(chosen)


def test_every_overlap_has_a_test():
    assert set(OVERLAPS) == {given["overlap"] for given in MODES.values()}


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
