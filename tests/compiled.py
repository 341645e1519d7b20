# SPDX-License-Identifier: Apache-2.0
"""Compare functions around weft's calls with their torch.compile results, on all device kinds.

None rounds twice between two calls of weft, because a fusing compiler may omit one rounding.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import weft
from tests.lowlatency_rounds import Mode
from tests.moe.layers import CONFIGS, Case
from tests.rounds import Round, bits, synchronize
from tests.sums import Sum
from weft.allreduce.call import FP8Group, FP8Static, FP8Token, MoEFinalize, Quant
from weft.lowlatency.reference import unpack_scales
from weft.lowlatency.results import ExpertRows

PATIENT: dict[str, Any] = {"timeout": 200.0}  # ranks compile for longer than two seconds apart


def assert_same(
    got: tuple[torch.Tensor | None, ...], wanted: tuple[torch.Tensor | None, ...]
) -> None:
    assert len(got) == len(wanted)
    for place, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if one is None or other is None:
            assert one is other, place
            continue
        assert one.shape == other.shape, place
        assert int((bits(one) != bits(other)).sum()) == 0, place


def compile_body(body: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Compile the body as one graph. Results of a captured graph last until the next call."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    traced = torch.compile(body, fullgraph=True, **options)

    def call(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        result = traced(*args)
        skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
        assert skips == 0, "not captured, though asked for"
        return result

    return call


def compare_compiled(
    group: weft.Group,
    body: Callable[..., Any],
    options: dict[str, Any],
    what: Any,
    case: Round | Case,
    turns: tuple[tuple[int, ...], ...],
) -> None:
    traced = compile_body(body, options)
    for seed, tokens in enumerate(turns):
        now: Any = case.next(tokens=tokens[: group.size], seed=seed)
        args = now.inputs_of(group.rank, group.device)[:3]  # without what a round adds
        assert_same(traced(what, *args), body(what, *args))
        synchronize(group.device)


def run_chain(
    ar: weft.AllReduce,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    quant: Quant | None,
) -> tuple[torch.Tensor | None, ...]:
    a = ar.fused(x * 2, residual=residual, weight=weight)
    assert a.norm is not None
    b = ar.fused(a.norm + 1, residual=a.residual, weight=weight, quant=quant, norm_out=True)
    assert b.norm is not None
    c = ar.fused(b.norm.abs(), backend="twoshot")  # relu's zeros may differ in their sign
    assert c.out is not None
    assert a.out is None
    return a.norm, a.residual, b.residual, b.norm, b.quant, b.scale, c.out * 3


def run_finalize(
    ar: weft.AllReduce,
    rows: torch.Tensor,
    index: torch.Tensor,
    scales: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Run a prologue with passed outputs (one aliases residual), new ones and omitted ones."""
    kept, norm = residual.clone(), torch.empty_like(residual)
    spec = MoEFinalize(rows * 2, index, scales, shared=residual - 1, routed_scaling_factor=1.7)
    result = ar.fused(
        prologue=spec,
        residual=kept,
        weight=weight,
        weight_bias=1.0,
        out=True,
        residual_out=kept,
        norm_out=norm,
    )
    bare = ar.fused(prologue=spec, residual=residual, residual_out=False, out=True)
    assert result.quant is None
    assert bare.residual is None
    return result.out, kept + 1, result.norm, norm * 2, bare.out


TURNS = ((5, 3), (0, 8), (4, 4), (6, 0))  # tokens of the ranks, call by call


def compare_all_reduces(
    group: weft.Group,
    options: dict[str, Any],
    quants: tuple[str, ...],
    sizes: tuple[int, ...] = (5, 8, 0, 1, 3),
) -> None:
    device = group.device
    specs: dict[str, Quant | None] = {
        "none": None,
        "static": FP8Static(torch.tensor([0.037], device=device)),
        "token": FP8Token(),
        "group": FP8Group(),
        "ue8m0": FP8Group(scale="ue8m0"),
    }
    with weft.AllReduce(group, max_tokens=16, hidden=256, **PATIENT) as ar:
        for name in quants:
            traced = compile_body(run_chain, options)
            for tokens in sizes:
                case = Sum(tokens, seed=tokens)
                residual, weight = case.shared(device)
                # A parameter, as a model has: without gradients it is a tensor like any other.
                args = (case.rows(group.rank, device), residual, torch.nn.Parameter(weight))
                with torch.no_grad():
                    assert_same(traced(ar, *args, specs[name]), run_chain(ar, *args, specs[name]))
                synchronize(group.device)
        traced = compile_body(run_finalize, options)
        for tokens in sizes[:2]:
            case = Sum(tokens, seed=tokens)
            rows = case.next(tokens=9).rows(group.rank, device)
            index = torch.arange(2 * tokens, dtype=torch.int32, device=device).view(-1, 2) % 9
            scales = torch.rand(index.shape, device=device)
            residual, weight = case.shared(device)
            parts = (rows, index, scales, residual, weight)
            assert_same(traced(ar, *parts), run_finalize(ar, *parts))
            synchronize(group.device)
        ar.check()


def own_experts(a2a: weft.LowLatencyAllToAll, got: ExpertRows) -> torch.Tensor:
    """Multiply every expert's rows, including unused ones, by a factor of its own."""
    rows = got.x.float()
    if got.scales is not None:
        scales = unpack_scales(got.scales, a2a.config.shape.blocks)
        rows = (rows.view(*scales.shape, -1) * scales[..., None]).view(rows.shape)
    experts = torch.arange(rows.shape[0], device=rows.device)[:, None, None]
    return (rows * (1 + experts / 8)).to(a2a.dtype)


def run_two_live(
    a2a: weft.LowLatencyAllToAll, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Hold two results, combine them in reverse order, and read both after their combine."""
    first = a2a.dispatch(x * 2, ids, weights)
    second = a2a.dispatch(x + 1, ids.flip(0), weights)
    y, z = own_experts(a2a, first), own_experts(a2a, second)
    late = a2a.combine(z, ids.flip(0), weights, second.handle)
    early = a2a.combine(y, ids, weights, first.handle, add=x) * 2
    return early, late + 1, first.counts + 0, second.ranges * 2


LOW_MODES = {
    "fp8": Mode(),
    "plain": Mode(quantize=None),
    "ue8m0": Mode(scale="ue8m0"),
    "reduced": Mode(scale="fp32_col", reduce="sender", combine_dtype="fp8"),
}


def compare_low_latency(
    group: weft.Group,
    options: dict[str, Any],
    modes: tuple[str, ...],
    turns: tuple[tuple[int, ...], ...] = TURNS,
) -> None:
    """Compare dispatch, experts and combine in one graph, also on ranks without tokens."""
    for name in modes:
        mode = replace(LOW_MODES[name], more=PATIENT)
        case = Round((5, 3), top_k=3, experts=8, hidden=512)
        with mode.make(group, case, 8) as a2a:
            compare_compiled(group, run_two_live, options, a2a, case, turns)
            assert a2a.traced_handles.in_use == (False, False)
            assert not a2a.traced_handles.handles
            a2a.check()


def run_in_place(
    a2a: weft.AllToAll, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Write experts' results into output() in parts, twice, between dispatch and combine."""
    outs = []
    for sent in (x * 2, x - 1):
        received = a2a.dispatch(sent, ids, weights)
        own = (received.ids >= 0).any(dim=2, keepdim=True)
        y = torch.where(own, received.x, 0.0)
        a2a.output()[:1].copy_(y[:1] * 2)
        a2a.output()[1:].copy_(y[1:])
        a2a.output()[:, 1:].mul_(4)
        outs.append(a2a.combine(add=x))
    return outs[0] * 2, outs[1] + outs[0]


def compare_all_to_all(
    group: weft.Group, options: dict[str, Any], turns: tuple[tuple[int, ...], ...] = TURNS
) -> None:
    case = Round((5, 3), top_k=3, experts=8, hidden=64)
    with weft.AllToAll(group, **case.sizes(8), **PATIENT) as a2a:
        compare_compiled(group, run_in_place, options, a2a, case, turns)
        a2a.check()


def run_two_layers(
    layer: weft.MoE, x: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    first = layer(x * 2, logits)
    hidden = first + x
    layer(hidden, logits.flip(1), out=hidden)
    ids, weights = layer.route(logits)
    return first * 2, hidden - x, run_steps(layer, hidden, ids, weights)


def run_steps(
    layer: weft.MoE, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    exchange = layer.exchange
    if isinstance(exchange, weft.AllToAll):
        received = exchange.dispatch(x, ids, weights)
        layer.experts(received)
        exchange.output().mul_(2)
        return exchange.combine(add=x)
    rows = exchange.dispatch(x, ids, weights)
    return exchange.combine(layer.experts(rows), ids, weights, rows.handle, add=x)


def compare_layers(
    group: weft.Group,
    options: dict[str, Any],
    built: dict[str, Any],
    turns: tuple[tuple[int, ...], ...] = TURNS,
) -> None:
    case = Case(CONFIGS["deepseek"], tokens=(6, 3))
    with case.open(group, max_tokens=8, **built, **PATIENT) as layer:
        x, logits = case.next(tokens=case.tokens[: group.size]).inputs_of(group.rank, group.device)
        before = layer(x, logits)
        compare_compiled(group, run_two_layers, options, layer, case, turns)
        after = layer(x, logits)
        synchronize(group.device)
        layer.check()
        assert_same((after,), (before,))
