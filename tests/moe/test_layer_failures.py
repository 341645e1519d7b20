# SPDX-License-Identifier: Apache-2.0
"""Invalid layers, invalid calls and missing peers raise typed errors and never hang."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, EXPERTS, HIDDEN, Case
from tests.moe.test_layer import BOTH, DEEP, PAIRS, settle
from tests.ranks import on_ranks
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
from weft.moe import OVERLAPS, MoEConfig, Routing

CASE = Case(CONFIGS["deepseek"], tokens=(4, 6))
PLAIN = CONFIGS["softmax"]
LOW = {"mode": "low_latency"}
WRONG: list[tuple[MoEConfig, dict[str, Any], str]] = [
    (PLAIN, {"overlap": "shared_expert"}, "without a shared expert"),
    (PLAIN, {**LOW, "overlap": "shared_expert"}, "without a shared expert"),
    (PLAIN, {"overlap": "gemm_push", "gemm": "torch"}, "use gemm='grouped'"),
    (
        PLAIN,
        {"overlap": "gemm_push", "combine_dtype": "fp8"},
        "stores rows in the layer's dtype: leave it out",
    ),
    (PLAIN, {**LOW, "max_rows": 64}, "leave it out"),
    (PLAIN, {**LOW, "quantize": "mxfp8"}, "use 'fp8' or None"),
    (PLAIN, {"gemm": "grouped", "quantize": "fp8"}, "needs FP8 weights"),
    (PAIRS, {"fp8": True, "gemm": "torch"}, "does not support FP8 weights"),
    (PAIRS, {"fp8": True, "quantize": "mxfp8"}, "needs FP8 rows"),
    (replace(PLAIN, hidden=12), {}, "multiples of 16 bytes"),
    (replace(PLAIN, hidden=72), LOW, "hidden"),
]


@on_ranks(2, "threads")
def test_invalid_layers_are_refused(group):
    for config, options, words in WRONG:
        with pytest.raises(InvalidArgument, match=words):
            CASE.next(config=config).open(group, **options)


@BOTH
@on_ranks(2)
def test_wrong_parts(group, mode):
    """If one rank's part is wrong, both ranks raise, and the next layer works."""
    device = group.device
    good = CASE.weights(range(4), device)
    own: dict[str, Any] = {"shared": CASE.shared(device), "correction": CASE.correction(device)}
    biased = CASE.next(config=CONFIGS["gpt-oss"]).weights(range(4), device)
    unasked = "correction is None, but this routing has correction=True"
    for weights, changes, words in (
        (replace(good, gate_up=good.gate_up[1:]), {}, "gate_up has 3 experts, but this rank has 4"),
        (replace(good, down=good.down.float()), {}, "down has dtype torch.float32"),
        (biased, {}, "the config has biased=False"),
        (good, {"shared": None}, "shared is None, but the config has shared=48"),
        (good, {"correction": None}, unasked),
        (good, {"correction": torch.zeros(3, device=device)}, "correction has shape [3]"),
    ):
        parts = {**own, **changes} if group.rank else own
        inputs = weights if group.rank else good
        with pytest.raises(CreationFailed) as caught:
            weft.MoE(group, CASE.config, inputs, max_tokens=6, mode=mode, **parts)
        assert "failed on rank 1 of 2" in str(caught.value)
        assert words in str(caught.value)
    with weft.MoE(group, CASE.config, good, max_tokens=6, mode=mode, **own) as layer:
        layer(*CASE.inputs_of(group.rank, device))
        with pytest.raises(CreationFailed, match="loading an MoE layer failed on rank 1"):
            layer.sibling(good, **(own if group.rank == 0 else {}))
        layer(*CASE.inputs_of(group.rank, device))
        settle(group)


@on_ranks(1, "threads")
def test_weights_of_the_other_kind_are_refused(group):
    plain = Case(DEEP, tokens=(4,)).weights(range(EXPERTS), group.device)
    shared = Case(DEEP, tokens=(4,)).shared(group.device)
    for weights, options in ((plain, {"fp8": True}), (plain.to_fp8(), {"gemm": "torch"})):
        with pytest.raises(InvalidArgument, match="gate_up"):
            weft.MoE(group, DEEP, weights, max_tokens=4, shared=shared, **options)


@on_ranks(2, "threads")
def test_ranks_have_one_rule_and_one_mode(group):
    routing = Routing(EXPERTS, 3, renormalise=group.rank == 0)
    with pytest.raises(GeometryMismatch, match="MoE layer differs.*renormalise"):
        CASE.next(config=replace(PLAIN, routing=routing)).open(group)
    for options in ({"mode": ("throughput", "low_latency")}, {"overlap": ("auto", "none")}):
        ((name, values),) = options.items()
        with pytest.raises(GeometryMismatch, match=f"MoE layer differs.*{name}"):
            CASE.open(group, **{name: values[group.rank]})


@BOTH
@pytest.mark.parametrize("name", ["softmax", "llama"])
@on_ranks(2)
def test_a_refused_call_sends_nothing(group, name, mode):
    """Every refusal comes before anything is sent: the next call is a whole round."""
    case = CASE.next(config=CONFIGS[name])
    with case.open(group, mode=mode) as layer:
        x, logits = case.inputs_of(group.rank, group.device)
        many = torch.zeros(7, HIDDEN, dtype=x.dtype, device=x.device)
        if isinstance(layer.exchange, weft.AllToAll) and layer.overlap != "gemm_push":
            peers = layer.exchange.output()[0, : len(x)]
            with pytest.raises(InvalidArgument, match="out is in the symmetric memory"):
                layer(x, logits, out=peers)
        with pytest.raises(TokenOverflow, match="exceeds max_tokens=6 of one round: pass rows="):
            layer(many, torch.zeros(7, EXPERTS, device=x.device))
        case.check(layer(x, logits), case.expected(layer, x, logits))
        settle(group)
        layer.check()


def finish_call(group: weft.Group, layer: weft.MoE) -> None:
    """Make one call and wait for it, without a peer's help."""
    layer(*CASE.inputs_of(group.rank, group.device))
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    layer.check()


def absent(group: weft.Group, options: dict[str, Any]) -> None:
    with CASE.open(group, **options, timeout=0.3, first_timeout=0.3) as layer:
        if group.rank == 0:
            with pytest.raises(PeerTimeout, match="rank 1 did not"):
                finish_call(group, layer)
        group.barrier()


def fail_in_shared_expert(group: weft.Group, options: dict[str, Any]) -> None:
    """Rank 1 cannot finish its round, and rank 0 does not wait for the deadline."""
    with CASE.open(group, **options, timeout=600.0, first_timeout=600.0) as layer:
        x, logits = CASE.inputs_of(group.rank, group.device)
        layer(x, logits)
        settle(group)
        if group.rank == 1:

            def broken(x: torch.Tensor) -> torch.Tensor:
                raise ArithmeticError("no more")

            layer._shared = broken
            with pytest.raises(ArithmeticError, match="no more"):
                layer(x, logits)
            with pytest.raises((Aborted, OutOfOrder)):
                finish_call(group, layer)
        else:
            with pytest.raises(PeerLeft, match="rank 1 raised ArithmeticError: no more"):
                finish_call(group, layer)
        group.barrier()


def aborted(group: weft.Group, options: dict[str, Any]) -> None:
    with CASE.open(group, **options, timeout=600.0, first_timeout=600.0) as layer:
        if group.rank == 1:
            layer.abort()
        with pytest.raises(Aborted, match=r"rank,? 1"):
            finish_call(group, layer)
        group.barrier()


@BOTH
@pytest.mark.parametrize("overlap", OVERLAPS)
@on_ranks(2)
def test_a_peer_that_does_not_finish_is_named(group, overlap, mode):
    """The peer is absent, its shared expert raises, or it aborts."""
    for body in (absent, fail_in_shared_expert, aborted):
        body(group, {"mode": mode, "overlap": overlap, "gemm": "grouped"})


@BOTH
@on_ranks(2, "threads")
def test_a_closed_layer_raises(group, mode):
    layer, device = CASE.open(group, mode=mode), group.device
    x, logits = CASE.inputs_of(group.rank, device)
    ids, _ = layer.route(logits)
    weights, correction = CASE.weights(layer.local_experts, device), CASE.correction(device)
    other = layer.sibling(weights, shared=CASE.shared(device), correction=correction)
    received = layer.exchange.dispatch(x, ids)
    settle(group)
    layer.close()
    layer.close()
    other.check()  # the workspace goes with the last of its layers
    with pytest.raises(OutOfOrder, match="is closed"):
        layer.check()
    other.close()
    for late in (layer, other):
        for use in (lambda: late(x, logits), late.check, lambda: late.experts(received)):  # noqa: B023
            with pytest.raises(OutOfOrder, match="is closed"):
                use()
