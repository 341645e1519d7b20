# SPDX-License-Identifier: Apache-2.0
"""The layer against the dense reference: every rule, wire format and overlap, in both modes.

A test of GPUs runs all its cases in one launch.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, EXPERTS, WIDER, Case, ordinary_bytes, tolerance_of
from tests.operators import capture_body
from tests.ranks import on_ranks
from tests.rounds import bits
from weft.errors import InvalidArgument, OutOfOrder, TokenOverflow
from weft.moe import MODES, OVERLAPS
from weft.moe.layer.low_latency import LowLatencyWorkspace


def poison(layer: weft.MoE) -> None:
    """Fill all memory that this round may not read, and all buffers of the experts, with NaN."""
    group, exchange = layer.exchange.group, layer.exchange
    settle(group)  # the peers' last rows are summed
    buffers = list(layer.workspace.buffers)
    if isinstance(exchange, weft.AllToAll):
        size = (exchange.config.shape.returned_rows * exchange.config.shape.returned_bytes,)
        offset = exchange.config.offsets.returned
        buffers += [exchange.latest_received.x, exchange.output_buffer]
        buffers.append(exchange.heap.tensor(size, torch.uint8, offset=offset))
    else:
        names = ("x", "scales", "counts", "source", "ranges")
        buffers += [slot.tensors[name] for slot in exchange.result_buffers for name in names]
    for buffer in buffers:
        buffer.view(torch.uint8).fill_(0xFF)  # NaN in every type
    settle(group)


def settle(group: weft.Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    group.barrier()


def rounds(
    group: weft.Group, case: Case, options: dict[str, Any], slack: float = 1.0
) -> list[torch.Tensor]:
    """Run three rounds over poison, each near the reference."""
    results, fp8 = [], bool(options.get("fp8"))
    with case.open(group, **options) as layer:
        for seed in range(3):
            turn = seed % len(case.tokens)
            now = case.next(seed=seed, tokens=case.tokens[turn:] + case.tokens[:turn])
            x, logits = now.inputs_of(group.rank, group.device)
            poison(layer)
            out = torch.full_like(x, float("nan"))
            result = layer(x, logits, out=out)
            assert result is out
            case.check(result, now.expected(layer, x, logits, options.get("quantize"), fp8), slack)
            settle(group)
            layer.check()
            results.append(result)
    return results


BOTH = pytest.mark.parametrize("mode", MODES)


@BOTH
@on_ranks(3)
def test_every_rule(group, mode):
    for config in CONFIGS.values():
        for dtype in (torch.float32, torch.bfloat16):
            rounds(group, Case(replace(config, dtype=dtype), tokens=(9, 0, 4)), {"mode": mode})
    half = replace(CONFIGS["gpt-oss"], dtype=torch.float16)
    rounds(group, Case(half, tokens=(5, 7, 0)), {"mode": mode, "gemm": "torch"})


# Dispatch quantises as the reference does, to the bit. A row pushed back as FP8 is rounded to 2^-4
# of itself at worst, sixteen halves of a bf16 unit.
WIRES: tuple[tuple[dict[str, Any], float], ...] = (
    ({"quantize": "fp8"}, 1.0),
    ({"quantize": "mxfp8"}, 1.0),
    ({"combine_dtype": "fp8"}, 16.0 / 5),
    ({"quantize": "fp8", "combine_dtype": "fp8"}, 16.0 / 5),
    ({"expert_map": [1, 0, 1, 1, 0, 0, 1, 1]}, 1.0),
    ({"expert_map": [1] * EXPERTS}, 1.0),  # two ranks without experts
    ({"expert_map": [1] * EXPERTS, "quantize": "fp8"}, 1.0),
)


@BOTH
@on_ranks(3)
def test_every_wire(group, mode):
    case = Case(CONFIGS["deepseek"], tokens=(6, 3, 0))
    for options, slack in WIRES:
        if (mode, options.get("quantize")) != ("low_latency", "mxfp8"):
            rounds(group, case, {"mode": mode, "overlap": "shared_expert", **options}, slack)


DEEP = replace(CONFIGS["deepseek"], hidden=WIDER, intermediate=128, shared=128)
BIASED = replace(CONFIGS["gpt-oss"], hidden=WIDER, intermediate=128)
UNGATED = replace(CONFIGS["nemotron"], hidden=WIDER, intermediate=128)
# Pushed FP8 columns come in pairs of blocks.
PAIRS = replace(DEEP, hidden=256)


def overlaps_of(config: weft.MoEConfig, device: torch.device, **options: Any) -> list[str]:
    left_out = {"gemm_push"} if options["gemm"] != "grouped" else set()
    if device.type == "cuda" and options["mode"] == "low_latency" and config.biased:
        left_out |= {"gemm_push"} if options.get("fp8") else set()
    if not config.shared:
        left_out.add("shared_expert")
    return [overlap for overlap in OVERLAPS if overlap not in left_out]


def one_result(group: weft.Group, case: Case, options: dict[str, Any]) -> None:
    """Rounds with each overlap have the bits of the first."""
    # A sum in another order may round to the neighbour in FP8: 2^-3 of a number.
    slack = 3.0 if options.get("fp8") else 1.0
    first: list[torch.Tensor] = []
    for overlap in overlaps_of(case.config, group.device, **options):
        result = rounds(group, case, {**options, "overlap": overlap}, slack)
        first = first or result
        for ours, theirs in zip(result, first, strict=True):
            assert torch.equal(bits(ours), bits(theirs)), overlap


GROUPED: dict[str, Any] = {"gemm": "grouped"}
FP8 = {**GROUPED, "fp8": True}
# The modes that CPU ranks run of each; GPU ranks run both.
OVERLAPPED: list[tuple[weft.MoEConfig, dict[str, Any], tuple[str, ...]]] = [
    (DEEP, GROUPED, MODES),
    (DEEP, FP8, ("low_latency",)),
    (DEEP, {**FP8, "expert_map": [1] * EXPERTS}, ("throughput",)),
    (DEEP, {"gemm": "torch"}, ("low_latency",)),
    (BIASED, GROUPED, MODES),
    (BIASED, {"gemm": "torch"}, ("throughput",)),
    (UNGATED, GROUPED, ("throughput",)),
    (UNGATED, FP8, ("low_latency",)),
    (PAIRS, FP8, ()),
    (replace(DEEP, dtype=torch.float16), GROUPED, ()),
]


@BOTH
@on_ranks(3, timeout=3000.0)
def test_every_overlap_gives_the_same_bits(group, mode):
    for config, options, modes in OVERLAPPED:
        if group.device.type == "cuda" and mode == "low_latency":
            config = replace(config, hidden=PAIRS.hidden)
        if group.device.type == "cuda" or mode in modes:
            one_result(group, Case(config, tokens=(9, 0, 4)), {**options, "mode": mode})


@BOTH
@on_ranks(3, "threads")
def test_any_routing(group, mode):
    """Run many rounds in one layer: ties, hot experts, idle experts, uneven batches."""
    case = Case(replace(CONFIGS["softmax"], dtype=torch.float32), tokens=(6, 6, 6))
    numbers = torch.tensor([-float("inf"), -1.0, -0.0, 0.0, 2.0, 2.0, 30.0])
    with case.open(group, overlap="none", mode=mode) as layer:
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            counts = torch.randint(0, 7, (group.size,), generator=generator).tolist()
            x, logits = case.next(seed=seed, tokens=tuple(counts)).inputs_of(
                group.rank, group.device
            )
            pick = torch.randint(0, 7, logits.shape, generator=generator)
            logits = numbers[pick].to(group.device)
            logits[:, seed % EXPERTS] = 1.0  # one logit at least is finite
            poison(layer)
            case.check(layer(x, logits), case.expected(layer, x, logits))
            settle(group)
            layer.check()


@BOTH
@on_ranks(2, "threads")
def test_tokens_are_sent_before_the_shared_expert_runs(group, mode):
    case, seen = Case(CONFIGS["deepseek"], tokens=(3, 2)), []
    shared = case.shared(group.device)
    assert shared is not None
    for overlap in ("none", "shared_expert"):
        with case.open(group, overlap=overlap, mode=mode) as layer:

            def watched(x: torch.Tensor, layer: weft.MoE = layer) -> torch.Tensor:
                seen.append(layer.workspace.is_mid_round)
                return shared.forward(x)

            layer._shared = watched
            layer(*case.inputs_of(group.rank, group.device))
            settle(group)
    assert seen == [False, True, False, True]


def padded_tokens(group: weft.Group, case: Case, mode: str) -> None:
    """Padding of any content reaches no expert; a NaN logit affects its own token only."""
    with case.open(group, mode=mode) as layer:
        x, logits = case.inputs_of(group.rank, group.device)
        clean, padded = layer(x, logits), logits.clone()
        padded[3:] = float("nan")
        shared = case.shared(group.device)
        for count in (0, 3, -2, 1, -(2**31), 7, 2**31 - 1):
            real, valid = min(max(count, 0), len(x)), 0 <= count <= len(x)
            num_tokens = torch.tensor([count], dtype=torch.int32, device=group.device)
            poison(layer)
            result = layer(x, padded if valid else logits, num_tokens=num_tokens)
            case.check(result[:real], case.expected(layer, x[:real], logits[:real]))
            rest = torch.zeros_like(x) if shared is None else shared(x)
            assert torch.equal(result[real:], rest[real:])
            settle(group)
            if not valid and isinstance(layer.exchange, weft.AllToAll):
                with pytest.raises(TokenOverflow, match=f"num_tokens on the device is {count}; "):
                    layer.check()
            layer.check()
        logits[2, 1] = float("nan")
        poison(layer)
        broken = layer(x, logits)
        settle(group)
        assert bool(broken[2].isnan().all())
        others = [t for t in range(len(x)) if t != 2]
        case.check(broken[others], clean[others].float())
        layer.check()


@BOTH
@on_ranks(2)
def test_padding_and_nan(group, mode):
    for config in CONFIGS.values():
        padded_tokens(group, Case(config, tokens=(6, 5)), mode)


@BOTH
@on_ranks(2)
def test_siblings_share_one_workspace(group, mode):
    """Run two layers of one workspace in turn, many times; its sizes are known."""
    case, device = Case(CONFIGS["deepseek"], tokens=(4, 6)), group.device
    with case.open(group, mode=mode) as first:
        held = ordinary_bytes(first)
        weights = case.weights(first.local_experts, device, first=50)
        shared, correction = case.shared(device), case.correction(device)
        second = first.sibling(weights, shared=shared, correction=correction)
        assert second.exchange is first.exchange
        assert ordinary_bytes(second) == held
        x, logits = case.inputs_of(group.rank, device)
        for _ in range(2):
            one, two = first(x, logits), second(x, logits)
            expected = case.expected(first, x, logits)
            case.check(one, expected)
            assert float((two.float() - expected).abs().max()) > 10 * tolerance_of(
                case.config, expected
            )
        second.close()
        assert torch.equal(bits(first(x, logits)), bits(one))
        settle(group)


def few_rows(group: weft.Group, options: dict[str, Any]) -> None:
    """Rows beyond max_rows count as zero and are reported; the next round is complete."""
    case = Case(replace(DEEP, shared=0), tokens=(16, 16))
    with case.open(group, mode="throughput", max_rows=16, **options) as layer:
        x, logits = case.inputs_of(group.rank, group.device)
        hot = torch.full_like(logits, -9.0)
        hot[:, :3] = 9.0 - torch.arange(3.0, device=x.device)  # experts of rank 0
        poison(layer)
        out = layer(x, hot)
        settle(group)
        assert bool(out.isfinite().all())
        if group.rank == 0:
            with pytest.raises(TokenOverflow, match="16"):
                layer.check()
        layer.check()
        one = hot[:1]
        case.check(layer(x[:1], one), case.expected(layer, x[:1], one))
        settle(group)
        layer.check()


TORCH: dict[str, Any] = {"gemm": "torch", "overlap": "none"}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("threads", TORCH), pytest.param("cuda", TORCH, marks=pytest.mark.gpu)]
    + [("threads", {**GROUPED, "overlap": overlap}) for overlap in ("none", "gemm_push")],
)
def test_rows_beyond_max_rows(ranks, kind, options):
    ranks(2, kind)(few_rows, options)


@on_ranks(2)
def test_layers_that_push_rows_have_no_buffer_for_results(group):
    case = Case(PAIRS, tokens=(5, 7))
    options = {"mode": "throughput", "overlap": "gemm_push", "gemm": "grouped"}
    with case.open(group, **options) as layer:
        assert layer.workspace.experts.buffers[-1].numel() == 0
        x, logits = case.inputs_of(group.rank, group.device)
        ids, weights = layer.route(logits)
        exchange = layer.exchange
        assert isinstance(exchange, weft.AllToAll)
        received = exchange.dispatch(x, ids, weights)
        with pytest.raises(InvalidArgument, match="call the layer, or build it with"):
            layer.experts(received)
        exchange.combine()


@pytest.mark.parametrize("overlap", ["none", "gemm_push"])
@on_ranks(2)
def test_low_latency_rounds_by_hand(group, overlap):
    """A round of single steps has the bits of a call; a call in its middle is refused.

    Rows that are pushed: experts of a broken group store nothing.
    """
    case, pushes = Case(PAIRS, tokens=(5, 7)), overlap == "gemm_push"
    options = {"mode": "low_latency", "overlap": overlap, "gemm": "grouped" if pushes else "auto"}
    with case.open(group, **options) as layer:
        exchange, shared = layer.exchange, case.shared(group.device)
        assert isinstance(exchange, weft.LowLatencyAllToAll)
        assert shared is not None
        x, logits = case.inputs_of(group.rank, group.device)
        expected, (ids, weights) = layer(x, logits), layer.route(logits)
        rows = exchange.dispatch(x, ids)
        with pytest.raises(OutOfOrder, match="during a round of layer.exchange"):
            layer(x, logits)
        layer.check()  # peers were not told to leave
        y = layer.experts(rows)
        assert (y is None) == pushes
        if pushes:
            workspace = layer.workspace
            assert isinstance(workspace, LowLatencyWorkspace)
            experts, grouped = workspace.experts, workspace._build_rows_by_expert(rows)
            with pytest.raises(InvalidArgument, match="has no buffer for results"):
                experts.run(layer._weights, grouped, tokens=len(x))
            assert experts.buffers[-1].numel() == 0
            with pytest.raises(InvalidArgument, match="stores them at their owners"):
                exchange.combine(torch.empty(rows.x.shape).to(x), ids, weights, rows.handle)
        out = exchange.combine(y, ids, weights, rows.handle, add=shared(x))
        assert torch.equal(bits(out), bits(expected))
        if not pushes:
            assert torch.equal(bits(layer(x, logits)), bits(expected))
        settle(group)
        if pushes:
            rows = exchange.dispatch(x, ids)
            group.barrier()
            assert rows.abort_flag is not None
            rows.abort_flag.fill_(1)
            layer.experts(rows)
            group.barrier()
            layout = exchange.config.offsets
            size = layout.share_bytes - layout.back
            stored = exchange.heap.tensor((size,), torch.uint8, offset=layout.back)
            assert bool((stored == 0xFF).all())
            group.barrier()


def replayed(group: weft.Group, case: Case, replays: int, **options: Any) -> None:
    """Replay one graph with new tokens, routing and counts."""
    fp8 = bool(options.get("fp8"))
    with case.open(group, **options) as layer:
        x, logits = case.inputs_of(group.rank, group.device)
        count = torch.tensor([16], dtype=torch.int32, device=group.device)
        out = torch.empty_like(x)

        def call() -> None:
            layer(x, logits, num_tokens=count, out=out)

        replay = capture_body(group, call)
        for seed in range(1, replays + 1):
            values = case.next(seed=seed).inputs_of(group.rank, group.device)
            for place, value in zip((x, logits), values, strict=True):
                place.copy_(value)
            real = (16, 1, 0, 7, 13)[(seed - 1) % 5]
            count.fill_(real)
            out.fill_(float("nan"))
            poison(layer)
            replay()
            settle(group)
            layer.check()
            if not fp8:
                case.check(out[:real], case.expected(layer, x[:real], logits[:real]))
            eager = layer(x, logits, num_tokens=count)
            settle(group)
            assert torch.equal(bits(eager[:real]), bits(out[:real]))


@BOTH
@on_ranks(2, "cuda", timeout=300.0)
def test_replays_follow_tokens_routing_and_counts(group, mode):
    graphs = [
        *(("deepseek", gemm, each) for gemm in ("grouped", "torch") for each in OVERLAPS[:2]),
        *(("gpt-oss", "grouped", "none"), ("llama", "grouped", "shared_expert")),
        ("deepseek", "grouped", "gemm_push"),
    ]
    if mode == "low_latency":
        graphs.append(("gpt-oss", "grouped", "gemm_push"))
        for overlap in ("shared_expert", "gemm_push"):
            replayed(group, Case(PAIRS, tokens=(16, 16)), 39, fp8=True, overlap=overlap, mode=mode)
    for name, gemm, overlap in graphs:
        case = Case(CONFIGS[name], tokens=(16, 16))
        replayed(group, case, 5, gemm=gemm, overlap=overlap, mode=mode)
