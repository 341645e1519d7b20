# SPDX-License-Identifier: Apache-2.0
"""Weft's own objects in every mode, independent of torch's default device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import weft
from tests.rounds import combine_options
from weft.moe import Expert, ExpertWeights, FP8Expert, MoEConfig, Routing, router_logits

MOST, HIDDEN, TOP_K, EXPERTS, INNER = 8, 256, 3, 8, 128
CPU = torch.device("cpu")
CONFIG = MoEConfig(HIDDEN, INNER, Routing(EXPERTS, TOP_K), shared=INNER)
Results = list[torch.Tensor]


@dataclass
class Made:
    """A constructed object, one call of it, and the way to release it.

    call: returns copies of all that came out, so nothing that it returns shows a heap.
    """

    what: Any
    call: Callable[[], Results]
    close: Callable[[], None]
    parts: list[Any] = field(default_factory=list)  # made from it, and closed before it

    def give_back(self) -> None:
        for part in self.parts:
            part.close()
        self.close()


def generator(group: weft.Group, seed: int = 0) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(64 * seed + group.rank)


def random_rows(group: weft.Group, *shape: int, seed: int = 0) -> torch.Tensor:
    source = generator(group, seed)
    drawn = torch.randn(shape, generator=source, dtype=torch.float32, device=CPU)
    return drawn.to(group.device)


def tokens(group: weft.Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, ids and weights of this rank; rank 1 of 2 has max_tokens tokens."""
    count = (5, MOST)[group.rank % 2]
    scores = random_rows(group, count, EXPERTS, seed=1)
    weights, ids = scores.softmax(dim=1).topk(TOP_K)
    return random_rows(group, count, HIDDEN).bfloat16(), ids, weights


def clone_all(*tensors: torch.Tensor | None) -> Results:
    return [t.clone() for t in tensors if t is not None]


def all_to_all(group: weft.Group, **options: Any) -> weft.AllToAll:
    sizes: dict[str, Any] = {
        "max_tokens": MOST,
        "top_k": TOP_K,
        "num_experts": EXPERTS,
        "hidden": HIDDEN,
    }
    return weft.AllToAll(group, **sizes, **options)


def rank_major(group: weft.Group, **options: Any) -> Made:
    a2a, (x, ids, weights) = all_to_all(group, **options), tokens(group)
    split_phase = options.get("split_phase", False)
    pushes = options.get("combine") == "gemm_push"
    stats = None
    if options.get("stats"):
        stats = weft.reference.expert_load(ids, options["stats"])
    groups = weft.ExpertGroups(a2a) if pushes else None

    def call() -> Results:
        if split_phase:
            a2a.dispatch_send(x, ids, weights, stats=stats)
            received = a2a.dispatch_recv()
        else:
            received = a2a.dispatch(x, ids, weights, stats=stats)
        rows = (
            weft.reference.dequantize(*received.payloads[:2])
            if a2a.config.quantized
            else (received.x)
        )
        seen = clone_all(received.counts, received.ids, received.stats)
        if groups is not None:
            grouped = groups.gather(received)
            groups.send(grouped.x.clone())
            return [*seen, a2a.combine_recv()]
        y = weft.reference.identity_experts(
            weft.Received((rows, *received.payloads[1:]), received.ids, received.weights,
                          received.counts),
            torch.bfloat16,
        ).nan_to_num()  # fmt: skip
        if split_phase:
            a2a.combine_send(y)
            return [*seen, a2a.combine_recv()]
        return [*seen, a2a.combine(y)]

    return Made(a2a, call, a2a.close, [] if groups is None else [groups])


def grouping(group: weft.Group) -> Made:
    a2a, (x, ids, weights) = all_to_all(group), tokens(group)
    groups = weft.ExpertGroups(a2a, align=4)

    def call() -> Results:
        received = a2a.dispatch(x, ids, weights)
        packed = groups.gather(received)
        groups.scatter(packed.x.clone())
        return [*clone_all(packed.x, packed.counts, packed.slot), a2a.combine()]

    return Made(groups, call, a2a.close, [groups])


def expert_major(group: weft.Group, **options: Any) -> Made:
    x, ids, weights = tokens(group)
    a2a = weft.LowLatencyAllToAll(
        group, max_tokens=MOST, top_k=TOP_K, num_experts=EXPERTS, hidden=HIDDEN, **options
    )
    split_phase = options.get("split_phase", False)

    def call() -> Results:
        if split_phase:
            rows, receive = a2a.dispatch_send(x, ids, weights)
            receive()
        else:
            rows = a2a.dispatch(x, ids, weights)
        seen = clone_all(rows.x.view(torch.uint8), rows.scales, rows.counts, rows.source)
        y = rows.x.to(torch.bfloat16)
        if split_phase:
            out, receive = a2a.combine_send(y, ids, weights, rows.handle)
            receive()
            return [*seen, out]
        return [*seen, a2a.combine(y, ids, weights, rows.handle)]

    return Made(a2a, call, a2a.close)


def reduce(group: weft.Group, backend: str) -> Made:
    made = weft.AllReduce(group, max_tokens=MOST, hidden=HIDDEN)
    x, shared = (
        random_rows(group, 6, HIDDEN).bfloat16(),
        torch.Generator(device="cpu").manual_seed(9),
    )
    size = (7, HIDDEN)
    residual = torch.randn(size, generator=shared, dtype=torch.float32, device=CPU)
    residual, weight = residual[:6].bfloat16().to(group.device), residual[6].to(group.device)

    def call() -> Results:
        outs: Results = []
        for quant in (None, weft.FP8Token(), weft.FP8Group(128), weft.FP8Group(128, scale="ue8m0")):
            result = made.fused(x, residual=residual, weight=weight, quant=quant, backend=backend)
            outs += clone_all(result.norm, result.residual, result.scale)
            outs += [] if result.quant is None else [result.quant.view(torch.uint8).clone()]
        return outs

    return Made(made, call, made.close)


def experts(group: weft.Group, *, fp8: bool) -> Callable[[tuple[int, ...]], ExpertWeights]:
    def stack(local: tuple[int, ...]) -> ExpertWeights:
        made = [Expert.seeded(CONFIG, 100 + e) for e in local]
        stacked = ExpertWeights.stack(CONFIG, made, group.device)
        return stacked.to_fp8() if fp8 else stacked

    return stack


def layer(group: weft.Group, mode: str, overlap: str, *, fp8: bool = False, **more: Any) -> Made:
    shared: Any = Expert.seeded(CONFIG, 99, shared=True).to(group.device)
    if fp8:
        shared = FP8Expert.from_expert(shared)
    options: dict[str, Any] = {
        "max_tokens": MOST,
        "gemm": "grouped",
        "mode": mode,
        "overlap": overlap,
    }
    made = weft.MoE(
        group, CONFIG, experts(group, fp8=fp8), shared=shared, fp8=fp8, **(options | more)
    )
    x, gate = tokens(group)[0], torch.ones((EXPERTS, HIDDEN), dtype=torch.float32, device=CPU)
    gate += torch.arange(EXPERTS, dtype=torch.float32, device=CPU)[:, None] / 7
    gate = gate.to(group.device)

    def call() -> Results:
        out = made(x, router_logits(x, gate) + random_rows(group, len(x), EXPERTS, seed=2))
        made.check()
        return [out]

    return Made(made, call, made.close)


def modes() -> Iterator[tuple[str, Callable[[weft.Group], Made]]]:
    for way in ("pull", "push", "fp8"):
        yield f"AllToAll {way}", partial(rank_major, **combine_options(way))
    yield "AllToAll choices", partial(rank_major, combine="gemm_push", split_phase=True)
    yield "AllToAll halves", partial(rank_major, combine="push", split_phase=True, stats=EXPERTS)
    for word in ("fp8", "mxfp8"):
        yield f"AllToAll {word}", partial(rank_major, quantize=word)
    explicit = [0] * 5 + [1] * 3
    yield "AllToAll map", partial(rank_major, expert_map=explicit, profile=True)
    yield "ExpertGroups", grouping
    yield "LowLatency", expert_major
    receiver = partial(expert_major, reduce="receiver")
    yield "LowLatency halves", partial(receiver, split_phase=True, expert_map=explicit)
    yield "LowLatency sender", partial(expert_major, reduce="sender", combine_dtype="fp8")
    yield "LowLatency plain", partial(receiver, quantize=None, profile=True)
    for backend in ("oneshot", "twoshot", "twoshot_bulk"):
        yield f"AllReduce {backend}", partial(reduce, backend=backend)
    for overlap in ("none", "shared_expert", "gemm_push"):
        yield f"MoE rank {overlap}", partial(layer, mode="throughput", overlap=overlap)
    for overlap in ("none", "shared_expert", "gemm_push"):
        yield f"MoE expert {overlap}", partial(layer, mode="low_latency", overlap=overlap)
    for mode in ("throughput", "low_latency"):
        yield f"MoE {mode} fp8", partial(layer, mode=mode, overlap="gemm_push", fp8=True)
    yield "MoE torch", partial(layer, mode="throughput", overlap="none", gemm="torch")
    yield "MoE auto", partial(layer, mode="throughput", overlap="auto", gemm="auto")
