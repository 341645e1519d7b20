# SPDX-License-Identifier: Apache-2.0
"""The layer against the dense reference: every rule and wire, in both modes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, EXPERTS, HIDDEN, Case, bound
from tests.rounds import bits
from weft.errors import TokenOverflow
from weft.moe import MODES


def poison(layer: weft.MoE) -> None:
    """NaN wherever nothing of this round may be read, and in every buffer of the experts."""
    group, work = layer.exchange.group, layer._workspace
    settle(group)
    group.barrier()  # the peers' last rows are summed
    if isinstance(layer.exchange, weft.AllToAll):
        poison_by_rank(layer.exchange)
    else:
        for slot in layer.exchange._slots:
            for name in ("x", "scales", "counts", "source", "ranges"):
                slot.tensors[name].view(torch.uint8).fill_(0xFF)
    for buffer in work.buffers:
        buffer.view(torch.uint8).fill_(0xFF)  # NaN in every type
    settle(group)


def poison_by_rank(a2a: weft.AllToAll) -> None:
    a2a._received.x.view(torch.uint8).fill_(0xFF)
    a2a._output.fill_(float("nan"))
    size = (a2a.config.shape.returned_rows * a2a.config.shape.returned_bytes,)
    offset = a2a.config.offsets.returned
    a2a.heap.tensor(size, torch.uint8, offset=offset).fill_(0xFF)


def settle(group: weft.Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    group.barrier()


def rounds(
    group: weft.Group, case: Case, options: dict[str, Any], slack: float = 1.0
) -> list[torch.Tensor]:
    """Three rounds over poison, each near the reference."""
    found, fp8 = [], bool(options.get("fp8"))
    with case.open(group, **options) as layer:
        for seed in range(3):
            turn = seed % len(case.tokens)
            now = case.next(seed=seed, tokens=case.tokens[turn:] + case.tokens[:turn])
            x, logits = now.of(group.rank, group.device)
            poison(layer)
            out = torch.full_like(x, float("nan"))
            result = layer(x, logits, out=out)
            assert result is out
            wanted = now.wanted(layer, x, logits, options.get("quantize"), fp8)
            torch.testing.assert_close(
                result.float(), wanted, rtol=0, atol=slack * bound(case.config, wanted)
            )
            settle(group)
            layer.check()
            found.append(result)
    return found


WIDTHS = [torch.float32, torch.bfloat16]
BOTH = pytest.mark.parametrize("mode", MODES)


@BOTH
@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_rule(ranks, name, mode):
    case = Case(replace(CONFIGS[name], dtype=torch.float32), tokens=(9, 0, 4))
    ranks(3, "threads")(rounds, case, {"mode": mode})


# Dispatch quantises as the reference does, to the bit. A row pushed back as FP8 is rounded to 2^-4
# of itself at worst, sixteen halves of a bf16 unit.
WIRES: dict[str, tuple[dict[str, Any], float]] = {
    "fp8 out": ({"quantize": "fp8"}, 1.0),
    "mxfp8 out": ({"quantize": "mxfp8"}, 1.0),
    "fp8 back": ({"combine_dtype": "fp8"}, 16.0 / 5),
    "fp8 both ways": ({"quantize": "fp8", "combine_dtype": "fp8"}, 16.0 / 5),
    "a map": ({"expert_map": [1, 0, 1, 1, 0, 0, 1, 1]}, 1.0),
    "a rank without experts": ({"expert_map": [1] * 8}, 1.0),
    "a rank without experts, fp8": ({"expert_map": [1] * 8, "quantize": "fp8"}, 1.0),
}
CARRIED = [(m, wire) for m in MODES for wire in WIRES if (m, wire) != ("low_latency", "mxfp8 out")]


@pytest.mark.parametrize(("mode", "wire"), CARRIED)
def test_every_wire(ranks, mode, wire):
    options, slack = WIRES[wire]
    case = Case(CONFIGS["deepseek"], tokens=(6, 3, 0))
    given = {"mode": mode, "gemm": "torch", "overlap": "shared_expert", **options}
    ranks(3, "threads")(rounds, case, given, slack)


def any_routing(group: weft.Group, options: dict[str, Any]) -> None:
    """Many rounds in one layer: ties, hot experts, experts that nobody wants, uneven batches."""
    case = Case(replace(CONFIGS["softmax"], dtype=torch.float32), tokens=(6, 6, 6))
    numbers = torch.tensor([-float("inf"), -1.0, -0.0, 0.0, 2.0, 2.0, 30.0])
    with case.open(group, overlap="none", **options) as layer:
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            counts = torch.randint(0, 7, (group.size,), generator=generator).tolist()
            now = case.next(seed=seed, tokens=tuple(counts))
            x, logits = now.of(group.rank, group.device)
            pick = torch.randint(0, 7, logits.shape, generator=generator)
            logits = numbers[pick].to(group.device)
            logits[:, seed % EXPERTS] = 1.0  # one logit at least is finite
            poison(layer)
            wanted = now.wanted(layer, x, logits)
            torch.testing.assert_close(
                layer(x, logits), wanted, rtol=0, atol=bound(case.config, wanted)
            )
            settle(group)
            layer.check()


@BOTH
def test_any_routing(ranks, mode):
    ranks(3, "threads")(any_routing, {"mode": mode})


def order_of_calls(group: weft.Group, options: dict[str, Any]) -> None:
    """Tokens are sent before the shared expert runs; one row has tried it before the first send."""
    case, seen = Case(CONFIGS["deepseek"], tokens=(3, 2)), []
    shared = case.shared(group.device)
    assert shared is not None
    for overlap in ("none", "shared_expert"):
        with case.open(group, overlap=overlap, **options) as layer:

            def watched(x: torch.Tensor, layer: weft.MoE = layer) -> torch.Tensor:
                seen.append(layer._workspace.mid_round)
                return shared.forward(x)

            layer._shared = watched
            layer(*case.of(group.rank, group.device))
            settle(group)
    assert seen == [False, True, False, True]


@BOTH
def test_tokens_go_before_the_shared_expert(ranks, mode):
    ranks(2, "threads")(order_of_calls, {"mode": mode})


def padded_tokens(group: weft.Group, name: str, options: dict[str, Any]) -> None:
    case = Case(CONFIGS[name], tokens=(6, 5))
    with case.open(group, **options) as layer:
        x, logits = case.of(group.rank, group.device)
        logits[3:] = float("nan")  # padding may hold anything
        shared = case.shared(group.device)
        for count in (0, 3, -2, 1):
            real = max(count, 0)
            given = torch.tensor([count], dtype=torch.int32, device=group.device)
            poison(layer)
            result = layer(x, logits, num_tokens=given)
            wanted = case.wanted(layer, x[:real], logits[:real])
            torch.testing.assert_close(
                result[:real].float(), wanted, rtol=0, atol=bound(case.config, wanted)
            )
            rest = torch.zeros_like(x) if shared is None else shared(x)
            assert torch.equal(result[real:], rest[real:])
            settle(group)
            if count < 0 and isinstance(layer.exchange, weft.AllToAll):
                with pytest.raises(TokenOverflow, match="num_tokens on the device is -2"):
                    layer.check()
            layer.check()


@BOTH
@pytest.mark.parametrize("name", ["softmax", "llama"])
def test_padding_reaches_no_expert(ranks, name, mode):
    ranks(2, "threads")(padded_tokens, name, {"mode": mode})


def nan_logits(group: weft.Group, name: str, options: dict[str, Any]) -> None:
    case = Case(CONFIGS[name], tokens=(4, 5))
    with case.open(group, **options) as layer:
        x, logits = case.of(group.rank, group.device)
        clean = layer(x, logits)
        settle(group)
        logits[2, 1] = float("nan")
        poison(layer)
        broken = layer(x, logits)
        settle(group)
        assert bool(broken[2].isnan().all())
        others = [t for t in range(len(x)) if t != 2]
        torch.testing.assert_close(
            broken[others].float(),
            clean[others].float(),
            rtol=0,
            atol=bound(case.config, clean.float()),
        )
        layer.check()


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "throughput") for name in CONFIGS), ("deepseek", "low_latency")]
)
def test_a_nan_logit_spoils_its_own_token_only(ranks, name, mode):
    ranks(2, "threads")(nan_logits, name, {"mode": mode})


def siblings(group: weft.Group, options: dict[str, Any]) -> None:
    """Two layers in one workspace, one after the other, many times."""
    case = Case(CONFIGS["deepseek"], tokens=(4, 6))
    other = case.next(config=replace(case.config))
    with case.open(group, **options) as first:
        held = first.workspace_bytes
        device = group.device
        weights = weft.moe.ExpertWeights.stack(
            case.config, [case.expert(50 + e) for e in first.local_experts], device
        )
        second = first.sibling(
            weights, shared=case.shared(device), correction=case.correction(device)
        )
        assert second.exchange is first.exchange
        assert second.workspace_bytes == held
        x, logits = case.of(group.rank, device)
        for _ in range(2):
            one, two = first(x, logits), second(x, logits)
            wanted = other.wanted(first, x, logits)
            torch.testing.assert_close(one.float(), wanted, rtol=0, atol=bound(case.config, wanted))
            assert float((two.float() - wanted).abs().max()) > 10 * bound(case.config, wanted)
        second.close()
        assert torch.equal(bits(first(x, logits)), bits(one))
        settle(group)


@BOTH
def test_siblings_share_one_workspace(ranks, mode):
    ranks(2, "threads")(siblings, {"mode": mode})


@BOTH
def test_processes(ranks, mode):
    """The default device of `weft.launch`: processes, not threads."""
    case = Case(CONFIGS["deepseek"], tokens=(5, 0))
    ranks(2, "cpu")(rounds, case, {"mode": mode, "overlap": "shared_expert"})


def sizes(group: weft.Group, mode: str) -> None:
    case = Case(replace(CONFIGS["softmax"], dtype=torch.float32), tokens=(4, 4))
    with case.open(group, gemm="torch", mode=mode) as layer:
        exchange = layer.exchange
        if isinstance(exchange, weft.AllToAll):
            rows, beside = 2 * 4 * 3, weft.ExpertGroups.memory_bytes(exchange)
        else:
            rows, beside = 4 * 2 * 4, exchange.memory.ordinary  # local experts, ranks, tokens
        assert layer.workspace_bytes == rows * (2 * 32 + 32 + HIDDEN) * 4 + beside
        assert layer.local_experts == tuple(range(EXPERTS))[group.rank * 4 : group.rank * 4 + 4]
        assert (layer.gemm, layer.config) == ("torch", case.config)


@BOTH
def test_sizes_are_known(ranks, mode):
    ranks(2, "threads")(sizes, mode)
