# SPDX-License-Identifier: Apache-2.0
"""A layer built wrongly, called wrongly, or left by its peers: typed errors, never a hang."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, EXPERTS, HIDDEN, Case, bound
from tests.moe.test_layer import BOTH, settle
from weft.errors import (
    Aborted,
    CreationFailed,
    GeometryMismatch,
    InvalidArgument,
    OutOfOrder,
    PeerLeft,
    PeerTimeout,
    TokenOverflow,
)
from weft.moe import Expert, ExpertWeights, MoEConfig, Routing

CASE = Case(CONFIGS["deepseek"], tokens=(4, 6))


def built_wrongly(group: weft.Group, config: MoEConfig, options: dict[str, Any]) -> str:
    with pytest.raises(InvalidArgument) as caught:
        CASE.next(config=config).open(group, **options)
    return str(caught.value)


PLAIN = CONFIGS["softmax"]
DEEP = replace(CONFIGS["deepseek"], hidden=256, intermediate=128, shared=128)
LOW = {"mode": "low_latency"}
WRONG: list[tuple[MoEConfig, dict[str, Any], str]] = [
    (PLAIN, {"mode": "token"}, "mode is 'token'; choose one of 'auto', 'throughput'"),
    (PLAIN, {"overlap": "sbo"}, "overlap is 'sbo'; choose one of 'auto', 'none', 'shared_expert'"),
    (PLAIN, {"overlap": "shared_expert"}, "there is nothing to overlap"),
    (PLAIN, {**LOW, "overlap": "shared_expert"}, "there is nothing to overlap"),
    (PLAIN, {"overlap": "gemm_push", "gemm": "torch"}, "use gemm='grouped'"),
    (PLAIN, {"overlap": "gemm_push", "combine_dtype": "fp8"}, "leave combine_dtype out"),
    (PLAIN, {"gemm": "triton"}, "gemm is 'triton'; choose one of 'auto', 'grouped', 'torch'"),
    (PLAIN, {"gemm": "torch", "max_rows": 0}, "max_rows is 0"),
    (PLAIN, {**LOW, "max_rows": 64}, "leave it out"),
    (PLAIN, {"quantize": "int4"}, "quantize is 'int4'"),
    (PLAIN, {**LOW, "quantize": "mxfp8"}, "use 'fp8' or None"),
    (PLAIN, {"gemm": "grouped", "quantize": "fp8"}, "needs FP8 weights"),
    (PLAIN, {"combine_dtype": "bf16"}, "choose one of None, 'fp8'"),
    (DEEP, {"fp8": True, "gemm": "torch"}, "has no FP8 weights"),
    (DEEP, {"fp8": True, "quantize": "mxfp8"}, "takes FP8 rows"),
    (replace(PLAIN, hidden=12), {}, "multiples of 16 bytes"),
    (replace(PLAIN, hidden=72), LOW, "hidden"),
]


@pytest.mark.parametrize(("config", "options", "words"), WRONG)
def test_what_cannot_be_built(ranks, config, options, words):
    texts = ranks(2, "threads")(built_wrongly, config, options)
    assert words in texts[0]
    assert texts[0] == texts[1]


def wrong_parts(group: weft.Group, options: dict[str, Any]) -> None:
    """One rank's part is wrong: both ranks raise, and the next layer is made as ever."""
    device = group.device
    good = ExpertWeights.stack(CASE.config, [CASE.expert(e) for e in range(4)], device)
    mine: dict[str, Any] = {
        "shared": CASE.shared(device),
        "correction": CASE.correction(device),
    }
    biased = ExpertWeights.stack(
        CONFIGS["gpt-oss"], [Expert.seeded(CONFIGS["gpt-oss"], e) for e in range(4)], device
    )
    wrong: list[tuple[ExpertWeights, dict[str, Any], str]] = [
        (
            replace(good, gate_up=good.gate_up[1:]),
            {},
            "gate_up has 3 experts, and this rank has 4",
        ),
        (replace(good, down=good.down.float()), {}, "down has dtype torch.float32"),
        (biased, {}, "the config has biased=False"),
        (good, {"shared": None}, "shared is None, the config has shared=48"),
        (
            good,
            {"correction": None},
            "correction is None, but this routing was made with correction=True",
        ),
        (good, {"correction": torch.zeros(3, device=device)}, "correction has shape [3]"),
    ]
    for weights, changes, words in wrong:
        parts = {**mine, **changes} if group.rank else mine
        given = weights if group.rank else good
        with pytest.raises(CreationFailed) as caught:
            weft.MoE(group, CASE.config, given, max_tokens=6, **parts, **options)
        assert "failed on rank 1 of 2" in str(caught.value)
        assert words in str(caught.value)
    with weft.MoE(group, CASE.config, good, max_tokens=6, **mine, **options) as layer:
        layer(*CASE.of(group.rank, device))
        with pytest.raises(CreationFailed, match="loading an MoE layer failed on rank 1"):
            layer.sibling(good, **(mine if group.rank == 0 else {}))
        layer(*CASE.of(group.rank, device))
        settle(group)


@BOTH
def test_wrong_parts(ranks, mode):
    ranks(2, "threads")(wrong_parts, {"mode": mode})


def other_rules(group: weft.Group) -> None:
    routing = Routing(EXPERTS, 3, renormalise=group.rank == 0)
    with pytest.raises(GeometryMismatch, match="MoE layer differs.*renormalise"):
        CASE.next(config=replace(PLAIN, routing=routing)).open(group)
    with pytest.raises(GeometryMismatch, match=r"MoE layer differs.*mode"):
        CASE.open(group, mode=("throughput", "low_latency")[group.rank])


def test_ranks_have_one_rule_and_one_mode(ranks):
    ranks(2, "threads")(other_rules)


def called_wrongly(group: weft.Group, name: str, options: dict[str, Any]) -> None:
    """Every refusal comes before anything is sent, so that the next call is a round as ever."""
    case = CASE.next(config=CONFIGS[name])
    with case.open(group, **options) as layer:
        x, logits = case.of(group.rank, group.device)
        many = torch.zeros(7, HIDDEN, dtype=x.dtype, device=x.device)
        wide = torch.zeros(7, EXPERTS, device=x.device)
        refused: list[tuple[tuple[torch.Tensor, ...], dict[str, Any], str]] = [
            ((x.double(), logits), {}, "x has dtype torch.float64"),
            ((x[:, 1:], logits), {}, "x has shape"),
            ((x, logits[1:]), {}, "logits are"),
            ((x, logits[:, 1:]), {}, "logits are"),
            ((x, logits), {"out": many}, "out has shape"),
            ((x, logits), {"num_tokens": torch.ones(1, device=x.device)}, "num_tokens has dtype"),
        ]
        if isinstance(layer.exchange, weft.AllToAll) and layer.overlap != "gemm_push":
            peers = layer.exchange.output()[0, : len(x)]
            refused.append(((x, logits), {"out": peers}, "out is in the symmetric memory"))
        for tensors, given, words in refused:
            with pytest.raises(InvalidArgument, match=words):
                layer(*tensors, **given)
        with pytest.raises(
            TokenOverflow, match="one round of this layer takes max_tokens=6: pass rows="
        ):
            layer(many, wide)
        result = layer(x, logits)
        wanted = case.wanted(layer, x, logits)
        torch.testing.assert_close(result.float(), wanted, rtol=0, atol=bound(case.config, wanted))
        settle(group)
        layer.check()
    with pytest.raises(OutOfOrder, match="was closed"):
        layer(x, logits)
    layer.close()


@BOTH
@pytest.mark.parametrize("name", ["softmax", "llama"])
def test_a_refused_call_sends_nothing(ranks, name, mode):
    ranks(2, "threads")(called_wrongly, name, {"mode": mode})


def few_rows(group: weft.Group) -> None:
    """Entries without a row count as zero and are reported; the next round is whole again."""
    case = CASE.next(config=PLAIN)
    room = 16 if group.device.type == "cpu" else 8  # of all experts; on a GPU of each
    with case.open(group, max_rows=room, gemm="torch") as layer:
        x, logits = case.of(group.rank, group.device)
        hot = torch.full_like(logits, -9.0)
        hot[:, :3] = 9.0 - torch.arange(3.0, device=x.device)  # all of rank 0's, 30 rows
        result = layer(x, hot)
        settle(group)
        if group.rank == 0:
            with pytest.raises(TokenOverflow, match=str(room)):
                layer.check()
        layer.check()
        assert bool(result.isfinite().all())
        one = torch.full_like(logits, -9.0)
        one[0, :3] = 9.0 - torch.arange(3.0, device=x.device)
        one[1:, 4:7] = 9.0 - torch.arange(3.0, device=x.device)
        wanted = case.wanted(layer, x[:1], one[:1])
        torch.testing.assert_close(
            layer(x[:1], one[:1]).float(), wanted, rtol=0, atol=bound(case.config, wanted)
        )
        settle(group)
        layer.check()


def test_too_few_rows(ranks):
    ranks(2, "threads")(few_rows)


def absent(group: weft.Group, options: dict[str, Any]) -> None:
    with CASE.open(group, **options, timeout=0.5, first_timeout=0.5) as layer:
        if group.rank == 0:
            start = time.monotonic()
            with pytest.raises(PeerTimeout, match="rank 1 did not"):
                finished(group, layer)
            assert time.monotonic() - start < 100
        group.barrier()


def finished(group: weft.Group, layer: weft.MoE) -> None:
    """One call, waited for without a peer's help."""
    layer(*CASE.of(group.rank, group.device))
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    layer.check()


@BOTH
@pytest.mark.parametrize("overlap", ["none", "gemm_push"])
def test_an_absent_peer_is_named_in_time(ranks, overlap, mode):
    options = {"mode": mode, "overlap": overlap, "gemm": "grouped"}
    ranks(2, "threads")(absent, options)


def failing_shared(group: weft.Group, options: dict[str, Any]) -> None:
    """Rank 1 cannot end its round: rank 0 learns so at once, long before the deadline."""
    with CASE.open(group, **options, timeout=600.0, first_timeout=600.0) as layer:
        x, logits = CASE.of(group.rank, group.device)
        layer(x, logits)
        settle(group)
        start = time.monotonic()
        if group.rank == 1:

            def broken(x: torch.Tensor) -> torch.Tensor:
                raise ArithmeticError("no more")

            layer._shared = broken
            with pytest.raises(ArithmeticError, match="no more"):
                layer(x, logits)
            with pytest.raises((Aborted, OutOfOrder)):
                finished(group, layer)
        else:
            with pytest.raises(PeerLeft, match="rank 1 raised ArithmeticError: no more"):
                finished(group, layer)
        assert time.monotonic() - start < 60
        group.barrier()


@BOTH
@pytest.mark.parametrize("overlap", ["none", "gemm_push"])
def test_a_shared_expert_that_raises_ends_the_round_everywhere(ranks, overlap, mode):
    options = {"mode": mode, "overlap": overlap, "gemm": "grouped"}
    ranks(2, "threads")(failing_shared, options)


def aborted(group: weft.Group, options: dict[str, Any]) -> None:
    with CASE.open(group, **options, timeout=600.0, first_timeout=600.0) as layer:
        if group.rank == 1:
            layer.abort()
        with pytest.raises(Aborted, match=r"rank,? 1"):
            finished(group, layer)
        group.barrier()


@BOTH
def test_abort_reaches_the_layer(ranks, mode):
    ranks(2, "threads")(aborted, {"mode": mode})


def closed(group: weft.Group, options: dict[str, Any]) -> None:
    layer = CASE.open(group, **options)
    ids, _ = layer.route(CASE.of(group.rank, group.device)[1])
    weights = ExpertWeights.stack(CASE.config, [CASE.expert(e) for e in layer.local_experts])
    other = layer.sibling(
        weights, shared=CASE.shared(group.device), correction=CASE.correction(group.device)
    )
    received = layer.exchange.dispatch(CASE.of(group.rank, group.device)[0], ids)
    settle(group)
    layer.close()
    layer.close()
    other.check()  # the workspace goes with the last of its layers
    with pytest.raises(OutOfOrder, match="was closed"):
        layer.check()
    other.close()
    for late in (layer, other):
        with pytest.raises(OutOfOrder, match="was closed"):
            late(*CASE.of(group.rank, group.device))
        with pytest.raises(OutOfOrder, match="was closed"):
            late.check()
        with pytest.raises(OutOfOrder, match="was closed"):
            late.experts(received)


@BOTH
def test_a_closed_layer_says_so(ranks, mode):
    ranks(2, "threads")(closed, {"mode": mode})
