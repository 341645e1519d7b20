# SPDX-License-Identifier: Apache-2.0
"""Arguments that share memory are refused, or give the same bits as separate arguments.

Each draw places two tensors of a call in one block of memory at a random distance. The same call
with clones of these tensors gives the expected result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import weft
from tests.objects import EXPERTS, HIDDEN, MOST, TOP_K, experts, random_rows, tokens
from weft.compat import deep_ep, flashinfer
from weft.errors import InvalidArgument
from weft.gemm import grouped_gemm
from weft.moe import MoEConfig, Routing

Tensors = dict[str, torch.Tensor]
Call = Callable[[Tensors], list[torch.Tensor]]
SIZES: dict[str, Any] = {"max_tokens": MOST, "top_k": TOP_K, "num_experts": EXPERTS}
COUNT, BYTES = 5, torch.uint8


def share(chance: random.Random, tensors: Tensors) -> Tensors:
    """Return `tensors` with a result and another tensor placed in one block of memory."""
    first = chance.choice([name for name in sorted(tensors) if "out" in name])
    second = chance.choice([name for name in sorted(tensors) if name != first])
    sizes = [tensors[name].nbytes for name in (first, second)]
    reach = range(-(sizes[1] // 16) * 16, sizes[0] + 1, 16)
    distance = chance.choice((0, *chance.choices(reach, k=3)))
    start = max(0, -distance)
    block = torch.zeros(sum(sizes) + start + 64, dtype=torch.uint8)
    block = block[-block.data_ptr() % 16 :]
    laid = dict(tensors)
    for name, offset, size in zip((first, second), (start, start + distance), sizes, strict=True):
        tensor = tensors[name]
        laid[name] = block[offset : offset + size].view(tensor.dtype).view(tensor.shape)
        laid[name].copy_(tensor)
    return laid


def alltoall(group: weft.Group, **options: Any) -> Iterator[tuple[Tensors, Call]]:
    x, ids, weights = (each[:COUNT] for each in tokens(group))
    with weft.AllToAll(group, **SIZES, hidden=HIDDEN, **options) as op:
        y = random_rows(group, op.ep_size, MOST, HIDDEN, seed=4).bfloat16()
        inputs = {"x": x, "y": y, "out": torch.zeros_like(x), "add": x + 1}

        def call(t: Tensors) -> list[torch.Tensor]:
            seen = op.dispatch(t["x"], ids, weights).x.clone()
            try:
                return [seen.nan_to_num(), op.combine(t["y"], out=t["out"], add=t["add"]).clone()]
            except InvalidArgument:
                op.combine()
                raise

        yield inputs, call


def low_latency(group: weft.Group, **options: Any) -> Iterator[tuple[Tensors, Call]]:
    x, ids, weights = (each[:COUNT] for each in tokens(group))
    with weft.LowLatencyAllToAll(group, **SIZES, hidden=HIDDEN, quantize=None, **options) as op:
        y = random_rows(group, op.num_local_experts, op.ep_size * MOST, HIDDEN, seed=4).bfloat16()
        inputs = {"x": x, "y": y, "out": torch.zeros_like(x), "add": x + 1}
        inputs |= {"ids": ids, "weights": weights}

        def call(t: Tensors) -> list[torch.Tensor]:
            handle = op.dispatch(t["x"], t["ids"], t["weights"]).handle
            back = t["y"], t["ids"], t["weights"], handle
            try:
                return [op.combine(*back, t["out"], t["add"]).clone()]
            except InvalidArgument:
                op.combine(y, ids, t["weights"], handle)
                raise

        yield inputs, call


def all_reduce(group: weft.Group, backend: str) -> Iterator[tuple[Tensors, Call]]:
    rows = [random_rows(group, COUNT, HIDDEN, seed=seed).bfloat16() for seed in range(5)]
    inputs = dict(zip(("x", "out", "residual_out", "norm_out"), rows, strict=False))
    generator = torch.Generator().manual_seed(3)
    shared = torch.randn((COUNT + 1, HIDDEN), generator=generator).bfloat16()
    inputs |= {"residual": shared[:COUNT], "weight": shared[COUNT]}
    inputs |= {"quant_out": rows[0].to(torch.float8_e4m3fn), "scale_out": torch.zeros(COUNT, 2)}
    with weft.AllReduce(group, max_tokens=MOST, hidden=HIDDEN) as op:

        def call(t: Tensors) -> list[torch.Tensor]:
            reduced = op.fused(**t, quant=weft.FP8Group(128), backend=backend)  # type: ignore
            outs = (reduced.out, reduced.residual, reduced.norm, reduced.quant, reduced.scale)
            return [each.view(torch.uint8).clone() for each in outs if each is not None]

        yield inputs, call


def layer(group: weft.Group, mode: str) -> Iterator[tuple[Tensors, Call]]:
    x, ids, weights = (each[:COUNT] for each in tokens(group))
    config = MoEConfig(HIDDEN, 128, Routing(EXPERTS, TOP_K))
    with weft.MoE(group, config, experts(group, fp8=False), max_tokens=MOST, mode=mode) as op:
        inputs = {"x": x, "out": torch.zeros_like(x), "ids": ids, "weights": weights}

        def call(t: Tensors) -> list[torch.Tensor]:
            routed: dict[str, Any] = {"topk_ids": t["ids"], "topk_weights": t["weights"]}
            return [op(t["x"], **routed, out=t["out"]).clone()]

        yield inputs, call


def gemm(group: weft.Group) -> Iterator[tuple[Tensors, Call]]:
    a, b = random_rows(group, 8, 128).bfloat16(), random_rows(group, 2, 128, 128, seed=1).bfloat16()
    counts, offsets = torch.tensor([5, 3]).int(), torch.tensor([0, 5, 8]).int()
    inputs = {"a": a, "b": b, "counts": counts, "offsets": offsets}
    inputs |= {"bias": random_rows(group, 2, 128, seed=2), "out": torch.zeros(8, 128).bfloat16()}
    yield inputs, lambda t: [grouped_gemm(**t).clone()]  # type: ignore


def fusion(group: weft.Group) -> Iterator[tuple[Tensors, Call]]:
    with flashinfer.create_allreduce_fusion_workspace(
        world_size=group.size, rank=group.rank, max_token_num=MOST, hidden_dim=HIDDEN,
        dtype=torch.bfloat16, group=group,
    ) as workspace:  # fmt: skip
        rows = [random_rows(group, COUNT, HIDDEN, seed=seed).bfloat16() for seed in range(4)]
        names = ("input", "residual_in", "residual_out", "norm_out")
        inputs = dict(zip(names, rows, strict=True))
        inputs |= {"rms_gamma": torch.ones(HIDDEN).bfloat16()}

        def call(t: Tensors) -> list[torch.Tensor]:
            flashinfer.allreduce_fusion(workspace=workspace, pattern=1, **t)  # type: ignore
            return [t["residual_out"].clone(), t["norm_out"].clone()]

        yield inputs, call


def flashinfer_moe(group: weft.Group) -> Iterator[tuple[Tensors, Call]]:
    class Mapping:
        moe_ep_rank, moe_ep_size = group.rank, group.size

    x, ids, weights = (each[:COUNT] for each in tokens(group))
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "group": group}
    with flashinfer.MoeAlltoAll(Mapping(), MOST, TOP_K, EXPERTS, **sizes) as op:
        y = random_rows(group, group.size, MOST, HIDDEN, seed=4).bfloat16()
        inputs = {"x": x, "ids": ids.int(), "payload": y, "output": torch.zeros_like(x)}

        def call(t: Tensors) -> list[torch.Tensor]:
            op.dispatch(t["ids"], [t["x"], weights], MOST)
            try:
                return [op.combine(t["payload"], MOST, output=t["output"]).clone()]
            except InvalidArgument:
                op.combine(y, MOST)
                raise

        yield inputs, call


def buffer(group: weft.Group) -> Iterator[tuple[Tensors, Call]]:
    x, ids, weights = (each[:COUNT] for each in tokens(group))
    op = deep_ep.Buffer(group, low_latency_mode=True)
    y = random_rows(group, EXPERTS // group.size, group.size * MOST, HIDDEN, seed=4).bfloat16()
    inputs = {"x": x, "y": y, "out": torch.zeros_like(x), "ids": ids, "weights": weights}

    def call(t: Tensors) -> list[torch.Tensor]:
        sent: dict[str, Any] = {"use_fp8": False}
        _, _, handle, _, _ = op.low_latency_dispatch(t["x"], t["ids"], MOST, EXPERTS, **sent)
        back = t["ids"], t["weights"], handle
        try:
            return [op.low_latency_combine(t["y"], *back, out=t["out"])[0].clone()]
        except InvalidArgument:
            op.low_latency_combine(y, ids, weights, handle)
            raise

    yield inputs, call
    op.destroy()


CASES: dict[str, Callable[[weft.Group], Iterator[tuple[Tensors, Call]]]] = {
    "AllToAll": alltoall,
    "AllToAll push": lambda group: alltoall(group, combine="push"),
    "LowLatencyAllToAll": low_latency,
    "LowLatencyAllToAll receiver": lambda group: low_latency(group, reduce="receiver"),
    **{f"AllReduce {b}": lambda group, b=b: all_reduce(group, b) for b in ("oneshot", "twoshot")},  # type: ignore
    "MoE throughput": lambda group: layer(group, "throughput"),
    "MoE low_latency": lambda group: layer(group, "low_latency"),
    "grouped_gemm": gemm,
    "allreduce_fusion": fusion,
    "MoeAlltoAll": flashinfer_moe,
    "Buffer": buffer,
}


def played(group: weft.Group, name: str, seed: int, draws: int) -> tuple[int, int]:
    """Return the numbers of refused and of correct calls."""
    chance = random.Random(f"{name} {seed}")
    refused = right = 0
    for inputs, call in CASES[name](group):
        for number in range(draws):
            laid = share(chance, inputs)
            expected = call({key: value.clone() for key, value in laid.items()})
            try:
                results = call(laid)
            except InvalidArgument as error:
                if "overlaps" not in str(error):
                    raise
                refused += 1
                continue
            pairs = zip(results, expected, strict=True)
            assert all(a.view(BYTES).equal(b.view(BYTES)) for a, b in pairs), (seed, number)
            right += 1
        group.barrier()
    return refused, right


@pytest.mark.parametrize("draws", [25, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_shared_memory_is_refused_or_harmless(ranks, name, draws):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    for refused, right in ranks(2, "threads")(played, name, seed, draws):
        assert refused + right == draws
        # A MoeAlltoAll reads copies, so that its result may lie anywhere.
        assert refused > 0 or name == "MoeAlltoAll"
