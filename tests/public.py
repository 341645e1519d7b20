# SPDX-License-Identifier: Apache-2.0
"""Every public object in every mode, independent of torch's default device and dtype."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import weft
from tests.rounds import combine_options
from weft.compat import deep_ep, triton_dist
from weft.compat.flashinfer import (
    AllReduceFusionPattern,
    MoeAlltoAll,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
)
from weft.moe import Expert, ExpertWeights, FP8Expert, MoEConfig, Routing, router_logits

MOST, HIDDEN, TOP_K, EXPERTS, INNER = 8, 256, 3, 8, 128
SIZES: dict[str, Any] = {
    "max_tokens": MOST,
    "top_k": TOP_K,
    "num_experts": EXPERTS,
    "hidden": HIDDEN,
}
CPU = torch.device("cpu")
CONFIG = MoEConfig(HIDDEN, INNER, Routing(EXPERTS, TOP_K), shared=INNER)
Results = list[torch.Tensor]


@dataclass
class PublicObject:
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


def random_rows(group: weft.Group, *shape: int, seed: int = 0) -> torch.Tensor:
    source = torch.Generator(device="cpu").manual_seed(64 * seed + group.rank)
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
    return weft.AllToAll(group, **SIZES, **options)


def rank_major(group: weft.Group, **options: Any) -> PublicObject:
    a2a, (x, ids, weights) = all_to_all(group, **options), tokens(group)
    split_phase = options.get("split_phase", False)
    pushes = options.get("combine") == "gemm_push"
    count = options.get("stats")
    stats = weft.reference.expert_load(ids, count) if count else None
    groups = weft.ExpertGroups(a2a) if pushes else None

    def call() -> Results:
        if split_phase:
            a2a.dispatch_send(x, ids, weights, stats=stats)
            received = a2a.dispatch_recv()
        else:
            received = a2a.dispatch(x, ids, weights, stats=stats)
        rows = received.x
        if a2a.config.quantized:
            rows = weft.reference.dequantize(*received.payloads[:2])
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

    return PublicObject(a2a, call, a2a.close, [] if groups is None else [groups])


def grouping(group: weft.Group) -> PublicObject:
    a2a, (x, ids, weights) = all_to_all(group), tokens(group)
    groups = weft.ExpertGroups(a2a, align=4)

    def call() -> Results:
        received = a2a.dispatch(x, ids, weights)
        packed = groups.gather(received)
        groups.scatter(packed.x.clone())
        return [*clone_all(packed.x, packed.counts, packed.slot), a2a.combine()]

    return PublicObject(groups, call, a2a.close, [groups])


def expert_major(group: weft.Group, **options: Any) -> PublicObject:
    x, ids, weights = tokens(group)
    a2a = weft.LowLatencyAllToAll(group, **SIZES, **options)
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

    return PublicObject(a2a, call, a2a.close)


def reduce(group: weft.Group, backend: str) -> PublicObject:
    operator = weft.AllReduce(group, max_tokens=MOST, hidden=HIDDEN)
    x, shared = random_rows(group, 6, HIDDEN).bfloat16(), torch.Generator(device="cpu")
    draw: dict[str, Any] = {"generator": shared.manual_seed(9), "dtype": torch.float32}
    residual = torch.randn((7, HIDDEN), **draw, device=CPU)
    residual, weight = residual[:6].bfloat16().to(group.device), residual[6].to(group.device)

    def call() -> Results:
        outs: Results = []
        for quant in (None, weft.FP8Token(), weft.FP8Group(128), weft.FP8Group(128, scale="ue8m0")):
            result = operator.fused(
                x, residual=residual, weight=weight, quant=quant, backend=backend
            )
            outs += clone_all(result.norm, result.residual, result.scale)
            outs += [] if result.quant is None else [result.quant.view(torch.uint8).clone()]
        return outs

    return PublicObject(operator, call, operator.close)


def experts(group: weft.Group, *, fp8: bool) -> Callable[[tuple[int, ...]], ExpertWeights]:
    def stack(local: tuple[int, ...]) -> ExpertWeights:
        local_experts = [Expert.seeded(CONFIG, 100 + e) for e in local]
        stacked = ExpertWeights.stack(CONFIG, local_experts, group.device)
        return stacked.to_fp8() if fp8 else stacked

    return stack


def layer(
    group: weft.Group, mode: str, overlap: str, *, fp8: bool = False, **more: Any
) -> PublicObject:
    shared: Any = Expert.seeded(CONFIG, 99, shared=True).to(group.device)
    if fp8:
        shared = FP8Expert.from_expert(shared)
    options: dict[str, Any] = {"max_tokens": MOST, "gemm": "grouped", "mode": mode, **more}
    weights = experts(group, fp8=fp8)
    operator = weft.MoE(group, CONFIG, weights, shared=shared, fp8=fp8, overlap=overlap, **options)
    x, gate = tokens(group)[0], torch.ones((EXPERTS, HIDDEN), dtype=torch.float32, device=CPU)
    gate += torch.arange(EXPERTS, dtype=torch.float32, device=CPU)[:, None] / 7
    gate = gate.to(group.device)

    def call() -> Results:
        out = operator(x, router_logits(x, gate) + random_rows(group, len(x), EXPERTS, seed=2))
        operator.check()
        return [out]

    return PublicObject(operator, call, operator.close)


def flashinfer_moe(group: weft.Group) -> PublicObject:
    class Mapping:
        moe_ep_rank, moe_ep_size = group.rank, group.size

    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "group": group}
    moe = MoeAlltoAll(Mapping(), MOST, TOP_K, EXPERTS, eplb_stats_num_experts=EXPERTS, **sizes)
    x, ids, weights = tokens(group)
    ids = ids.int()

    def call() -> Results:
        planes = moe.dispatch(ids, [x, ids, weights], MOST, EXPERTS, 1)
        seen = clone_all(*planes[1:2])
        y = moe.get_combine_payload_tensor_in_workspace(MOST, HIDDEN, torch.bfloat16)
        y.copy_(planes[0])
        return [*seen, moe.combine(y, MOST, payload_in_workspace=True)]

    return PublicObject(moe, call, moe.close)


def flashinfer_reduce(group: weft.Group) -> PublicObject:
    pattern = AllReduceFusionPattern
    workspace = create_allreduce_fusion_workspace(
        world_size=group.size, rank=group.rank, max_token_num=MOST, hidden_dim=HIDDEN,
        dtype=torch.bfloat16, group=group,
    )  # fmt: skip
    x, weight = random_rows(group, 6, HIDDEN).bfloat16(), random_rows(group, HIDDEN, seed=3).abs()
    weight, residual = torch.ones_like(weight).bfloat16(), torch.ones_like(x)
    scales = random_rows(group, 2, 6, seed=4).abs()
    rows = random_rows(group, 12, HIDDEN, seed=5).bfloat16()

    def call() -> Results:
        norm: dict[str, Any] = {"residual_in": residual, "rms_gamma": weight}
        static = allreduce_fusion(
            x, workspace, pattern.kARResidualRMSNormFP8Quant, scale_factor=0.5, **norm
        )
        norm |= {"moe_reduction_device_num_experts": 2, "moe_reduction_scale_input": scales}
        norm |= {"moe_reduction_active_experts_token_input": rows, "moe_reduction_token_input": x}
        added = allreduce_fusion(x, workspace, pattern.kMoEReductionARResidualRMSNorm, **norm)
        return [static.view(torch.uint8).clone(), added.clone()]

    return PublicObject(workspace, call, workspace.destroy)


def buffer(group: weft.Group, *, hooks: bool, **options: Any) -> PublicObject:
    operator, (x, ids, weights) = deep_ep.Buffer(group, low_latency_mode=True), tokens(group)

    def call() -> Results:
        numbers, counts, handle, _, hook = operator.low_latency_dispatch(
            x, ids, MOST, EXPERTS, return_recv_hook=hooks, **options
        )
        if hook is not None:
            hook()
        parts = (numbers,) if isinstance(numbers, torch.Tensor) else numbers
        seen = clone_all(parts[0].view(torch.uint8), *parts[1:], counts, *handle[:2])
        y = operator.get_next_low_latency_combine_buffer(handle)
        y.copy_(parts[0].to(torch.bfloat16))
        out, _, hook = operator.low_latency_combine(y, ids, weights, handle, return_recv_hook=hooks)
        if hook is not None:
            hook()
        return [*seen, out]

    return PublicObject(operator, call, operator.destroy)


def normal_buffer(group: weft.Group) -> PublicObject:
    operator, (x, ids, weights) = deep_ep.Buffer(group), tokens(group)
    numbers, scales = weft.reference.quantize(x, "fp8")

    def call() -> Results:
        per_rank, _, per_expert, in_rank, _ = operator.get_dispatch_layout(ids, EXPERTS)
        layout = (per_rank, None, in_rank, per_expert)
        seen: Results = [per_rank, per_expert, in_rank]
        count = 0
        for worst in (0, group.size * MOST):
            rows, *routed, _, handle, _ = operator.dispatch(
                x, None, *layout, ids, weights, num_worst_tokens=worst
            )
            assert isinstance(rows, torch.Tensor)
            assert handle is not None
            count = count or len(rows)  # with a bound, the rows after these are unused
            seen += [each[:count] for each in (rows, *routed) if each is not None]
            out, sums, _ = operator.combine(rows, handle, routed[1], bias=(x, x))
            seen += clone_all(out, sums)
        quantised, *_ = operator.dispatch((numbers, scales), handle)
        seen += [each[:count].view(torch.uint8) for each in quantised]
        operator.check()
        return seen

    return PublicObject(operator, call, operator.destroy)


def triton_layer(group: weft.Group) -> PublicObject:
    operator = triton_dist.EPLowLatencyAllToAllLayer(
        MOST, HIDDEN, TOP_K, True, group.rank, EXPERTS, group.size, group.size, group=group
    )
    x, ids, weights = tokens(group)

    def call() -> Results:
        rows, scales, counts, meta = operator.dispatch(x, None, ids)
        seen = clone_all(rows.view(torch.uint8), scales, counts, meta.recv_token_source_indices)
        y = rows.to(torch.bfloat16)
        return [*seen, operator.combine(y, ids, weights, meta)]

    return PublicObject(operator, call, operator.finalize)


def modes() -> Iterator[tuple[str, Callable[[weft.Group], PublicObject]]]:
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
    yield "MoeAlltoAll", flashinfer_moe
    yield "allreduce_fusion", flashinfer_reduce
    yield "Buffer", partial(buffer, hooks=False)
    yield "Buffer widened", partial(buffer, hooks=True, round_scale=True)
    yield "Buffer normal", normal_buffer
    yield "EPLowLatencyAllToAllLayer", triton_layer


MODES = dict(modes())
FAMILIES = sorted({name.split()[0] for name in MODES})  # modes of one run
