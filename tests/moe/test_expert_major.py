"""The layer whose rows come by expert: all that the layer by rank must do, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, EXPERTS, HIDDEN, Case, bound
from tests.moe.test_layer import (
    WIDTHS,
    any_routing,
    both_overlaps,
    nan_logits,
    order_of_calls,
    padded_tokens,
    poison,
    rounds,
    settle,
    siblings,
)
from tests.moe.test_layer_failures import (
    aborted,
    absent,
    called_wrongly,
    closed,
    failing_shared,
    wrong_parts,
)
from tests.rounds import bits
from weft.errors import GeometryMismatch, InvalidArgument, OutOfOrder
from weft.moe.config import choose_gemm

BY_EXPERT = {"mode": "low_latency"}
DEEP = replace(CONFIGS["deepseek"], hidden=256, intermediate=128, shared=128)


@pytest.mark.parametrize("dtype", WIDTHS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_rule(ranks, name, dtype):
    case = Case(replace(CONFIGS[name], dtype=dtype), tokens=(9, 0, 4))
    ranks(3, "threads")(rounds, case, BY_EXPERT)


@pytest.mark.parametrize("name", ["softmax", "gpt-oss"])
@pytest.mark.parametrize("gemm", ["grouped", "torch"])
def test_every_way_to_multiply(ranks, gemm, name):
    case = Case(CONFIGS[name], tokens=(5, 7, 0))
    ranks(3, "threads")(rounds, case, {**BY_EXPERT, "gemm": gemm})


# As of the layer by rank: a row that returns as FP8 is off by 2^-4 of itself at worst.
WIRES: dict[str, tuple[dict[str, Any], float]] = {
    "fp8 out": ({"quantize": "fp8"}, 1.0),
    "fp8 back": ({"combine_dtype": "fp8"}, 16.0 / 5),
    "fp8 both ways": ({"quantize": "fp8", "combine_dtype": "fp8"}, 16.0 / 5),
    "a map": ({"expert_map": [1, 0, 1, 1, 0, 0, 1, 1]}, 1.0),
    "a rank without experts": ({"expert_map": [1] * 8}, 1.0),
}


@pytest.mark.parametrize("wire", list(WIRES))
@pytest.mark.parametrize("overlap", ["none", "shared_expert"])
def test_every_wire(ranks, overlap, wire):
    options, slack = WIRES[wire]
    case = Case(CONFIGS["deepseek"], tokens=(6, 3, 0))
    ranks(3, "threads")(rounds, case, {**BY_EXPERT, **options, "overlap": overlap}, slack)


def fp8_rounds(group: weft.Group, case: Case, options: dict[str, Any]) -> None:
    with case.open(group, fp8=True, **options) as layer:
        assert (layer.gemm, layer._workspace.plan.quantize) == ("grouped", "fp8")
        for seed in range(3):
            now = case.next(seed=seed)
            x, logits = now.of(group.rank, group.device)
            poison(layer)
            result = layer(x, logits, out=torch.full_like(x, float("nan")))
            wanted = now.wanted(layer, x, logits, fp8=True)
            # A sum in another order may round to the neighbour in FP8: 2^-3 of a number.
            torch.testing.assert_close(
                result.float(), wanted, rtol=0, atol=3 * bound(case.config, wanted)
            )
            settle(group)
            layer.check()


@pytest.mark.parametrize("more", [{}, {"expert_map": [1] * 8}])
def test_fp8_experts(ranks, more):
    case = Case(DEEP, tokens=(9, 0, 4))
    ranks(3, "threads")(fp8_rounds, case, {**BY_EXPERT, "overlap": "shared_expert", **more})


def test_any_routing(ranks):
    ranks(3, "threads")(any_routing, BY_EXPERT)


@pytest.mark.parametrize("more", [{}, {"gemm": "torch"}, {"fp8": True}])
def test_overlap_changes_no_bit(ranks, more):
    ranks(3, "threads")(both_overlaps, Case(DEEP, tokens=(9, 0, 4)), {**BY_EXPERT, **more})


def test_tokens_go_before_the_shared_expert(ranks):
    ranks(2, "threads")(order_of_calls, BY_EXPERT)


@pytest.mark.parametrize("name", ["softmax", "llama"])
def test_padding_reaches_no_expert(ranks, name):
    ranks(2, "threads")(padded_tokens, name, BY_EXPERT)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_nan_logit_spoils_its_own_token_only(ranks, name):
    ranks(2, "threads")(nan_logits, name, BY_EXPERT)


def test_siblings_share_one_workspace(ranks):
    ranks(2, "threads")(siblings, BY_EXPERT)


def test_processes(ranks):
    """The default device of `weft.launch`: processes, not threads."""
    case = Case(DEEP, tokens=(5, 0))
    ranks(2, "cpu")(fp8_rounds, case, {**BY_EXPERT, "overlap": "shared_expert"})


def by_hand(group: weft.Group) -> None:
    """A round by hand has the bits of a call; a call in the middle of it is refused."""
    case = Case(DEEP, tokens=(5, 7))
    with case.open(group, **BY_EXPERT, overlap="none") as layer:
        exchange, shared = layer.exchange, case.shared(group.device)
        assert isinstance(exchange, weft.LowLatencyAllToAll)
        assert shared is not None
        x, logits = case.of(group.rank, group.device)
        wanted, (ids, weights) = layer(x, logits), layer.route(logits)
        rows = exchange.dispatch(x, ids)
        with pytest.raises(OutOfOrder, match="within a round of layer.exchange"):
            layer(x, logits)
        layer.check()  # the refusal has told nobody to leave
        y = layer.experts(rows)
        assert y is not None
        out = exchange.combine(y, ids, weights, rows.handle, add=shared(x))
        assert torch.equal(bits(out), bits(wanted))
        assert torch.equal(bits(layer(x, logits)), bits(wanted))
        settle(group)


def test_rounds_by_hand(ranks):
    ranks(2, "threads")(by_hand)


def sizes(group: weft.Group) -> None:
    case = Case(replace(CONFIGS["softmax"], dtype=torch.float32), tokens=(4, 4))
    with case.open(group, **BY_EXPERT, gemm="torch") as layer:
        assert isinstance(layer.exchange, weft.LowLatencyAllToAll)
        rows = 4 * 2 * 4  # local experts, ranks, tokens
        buffers = rows * (2 * 32 + 32 + HIDDEN) * 4
        assert layer.workspace_bytes == buffers + layer.exchange.memory.ordinary
        one = weft.LowLatencyAllToAll.memory_bytes(
            ranks=2,
            max_tokens=4,
            hidden=HIDDEN,
            top_k=3,
            num_experts=EXPERTS,
            dtype=torch.float32,
            quantize=None,
            slots=1,
        )
        assert layer.exchange.memory == one
        assert layer.local_experts == tuple(range(EXPERTS))[group.rank * 4 : group.rank * 4 + 4]


def test_sizes_are_known(ranks):
    ranks(2, "threads")(sizes)


def options_reach(group: weft.Group) -> None:
    case = Case(CONFIGS["softmax"], tokens=(4, 4))
    options: dict[str, Any] = {"combine_dtype": "fp8", "quantize": "fp8", "profile": True}
    owners = [1, 0, 1, 1, 0, 0, 1, 1]
    with case.open(group, **BY_EXPERT, **options, expert_map=owners) as layer:
        exchange = layer.exchange
        assert isinstance(exchange, weft.LowLatencyAllToAll)
        shape = exchange.config.shape
        assert (shape.combine_fp8, shape.group, shape.reduce) == (True, 128, "receiver")
        assert exchange._rounds.tracks.numel() > 0
        assert exchange.placement.ranks == tuple(owners)
        assert layer.local_experts == tuple(e for e in range(8) if owners[e] == group.rank)
    with case.open(group, **BY_EXPERT) as layer:
        exchange = layer.exchange
        assert isinstance(exchange, weft.LowLatencyAllToAll)
        shape = exchange.config.shape
        assert (shape.combine_fp8, shape.group, shape.reduce) == (False, 0, "receiver")
        assert len(exchange._rounds.slots) == 1


def test_options_reach_the_exchange(ranks):
    ranks(2, "threads")(options_reach)


PLAIN = CONFIGS["softmax"]
REFUSED: list[tuple[weft.MoEConfig, dict[str, Any], str]] = [
    (
        PLAIN,
        {"mode": "token"},
        "mode is 'token'; choose one of 'auto', 'throughput'",
    ),
    (PLAIN, {**BY_EXPERT, "overlap": "gemm_push", "gemm": "torch"}, "use gemm='grouped'"),
    (
        PLAIN,
        {**BY_EXPERT, "overlap": "gemm_push", "combine_dtype": "fp8"},
        "leave combine_dtype out",
    ),
    (PLAIN, {**BY_EXPERT, "overlap": "shared_expert"}, "there is nothing to overlap"),
    (PLAIN, {**BY_EXPERT, "quantize": "mxfp8"}, "use 'fp8' or None"),
    (PLAIN, {**BY_EXPERT, "max_rows": 64}, "leave it out"),
    (PLAIN, {**BY_EXPERT, "gemm": "grouped", "quantize": "fp8"}, "needs FP8 weights"),
    (DEEP, {**BY_EXPERT, "gemm": "torch", "fp8": True}, "has no FP8 weights"),
    (replace(PLAIN, hidden=72), {**BY_EXPERT}, "hidden"),
]


def refused(group: weft.Group, config: weft.MoEConfig, options: dict[str, Any]) -> str:
    with pytest.raises(InvalidArgument) as caught:
        Case(config, tokens=(4, 6)).open(group, **options)
    return str(caught.value)


@pytest.mark.parametrize(("config", "options", "words"), REFUSED)
def test_what_cannot_be_built(ranks, config, options, words):
    texts = ranks(2, "threads")(refused, config, options)
    assert words in texts[0]
    assert texts[0] == texts[1]


def two_exchanges(group: weft.Group) -> None:
    with pytest.raises(GeometryMismatch, match=r"MoE layer differs.*mode"):
        Case(PLAIN, tokens=(4, 4)).open(group, mode=("throughput", "low_latency")[group.rank])


def test_ranks_have_one_exchange(ranks):
    ranks(2, "threads")(two_exchanges)


@pytest.mark.parametrize("overlap", ["none", "shared_expert", "gemm_push"])
def test_an_absent_peer_is_named_in_time(ranks, overlap):
    ranks(2, "threads")(absent, {**BY_EXPERT, "overlap": overlap, "gemm": "grouped"})


@pytest.mark.parametrize("overlap", ["none", "shared_expert", "gemm_push"])
def test_a_shared_expert_that_raises_ends_the_round_everywhere(ranks, overlap):
    ranks(2, "threads")(failing_shared, {**BY_EXPERT, "overlap": overlap, "gemm": "grouped"})


def test_abort_reaches_the_layer(ranks):
    ranks(2, "threads")(aborted, BY_EXPERT)


def test_a_closed_layer_says_so(ranks):
    ranks(2, "threads")(closed, BY_EXPERT)


def test_wrong_parts(ranks):
    ranks(2, "threads")(wrong_parts, BY_EXPERT)


@pytest.mark.parametrize("name", ["softmax", "llama"])
def test_a_refused_call_sends_nothing(ranks, name):
    ranks(2, "threads")(called_wrongly, name, BY_EXPERT)


def test_ways_that_a_device_has():
    cpu, gpu, half = torch.device("cpu"), torch.device("cuda", 0), replace(DEEP, dtype=torch.half)
    wide = replace(DEEP, dtype=torch.float32)

    def choose(device: torch.device, config: weft.MoEConfig = DEEP, **given: Any) -> str:
        options = {"fp8": False, "quantize": None, **given}
        return choose_gemm("auto", device, config, **options)

    assert (choose(cpu), choose(cpu, fp8=True, quantize="fp8")) == ("torch", "grouped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.gemm.triton_launch.installed", lambda: None)
        patch.setattr("weft.moe.config.installed", lambda: None)
        assert (choose(gpu), choose(gpu, half)) == ("grouped", "grouped")
        assert (choose(gpu, wide), choose(gpu, quantize="fp8")) == ("torch", "torch")
        assert choose(gpu, fp8=True, quantize="fp8") == "grouped"

    def missing() -> None:
        raise InvalidArgument("no Triton here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.gemm.triton_launch.installed", missing)
        patch.setattr("weft.moe.config.installed", missing)
        assert choose(gpu) == "torch"
        with pytest.raises(InvalidArgument, match="no Triton"):
            choose(gpu, fp8=True, quantize="fp8")
