"""Router, experts, and the layer over both exchanges."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.moe import Experts, MoELayer, SwiGLU
from weft.ops.received import Received

HIDDEN, EXPERTS, TOP_K = 64, 8, 3


def test_experts_touch_only_rows_that_carry_a_token():
    experts = Experts([SwiGLU.seeded(HIDDEN, 32, torch.float32, seed) for seed in range(2)])
    x = torch.full((2, 3, HIDDEN), float("nan"))
    ids = torch.full((2, 3, TOP_K), -1, dtype=torch.int32)
    weights = torch.zeros(2, 3, TOP_K)
    x[1, 2] = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
    ids[1, 2] = torch.tensor([1, -1, 0])
    weights[1, 2] = torch.tensor([0.25, 0.0, 0.75])
    out = torch.full((2, 3, HIDDEN), 7.0)
    experts(Received((x,), ids, weights, torch.tensor([0, 3])), out)
    row = x[1, 2][None]
    wanted = 0.75 * experts.experts[0](row) + 0.25 * experts.experts[1](row)
    torch.testing.assert_close(out[1, 2][None], wanted)
    out[1, 2] = 7.0
    assert bool((out == 7.0).all())


def _layer(group, backend, tokens):
    kind = {"onesided": weft.AllToAll, "collective": weft.CollectiveAllToAll}[backend]
    exchange = kind(
        group,
        max_tokens=max(tokens),
        top_k=TOP_K,
        num_experts=EXPERTS,
        hidden=HIDDEN,
        dtype=torch.float32,
    )
    experts = [SwiGLU.seeded(HIDDEN, 32, torch.float32, e) for e in exchange.local_experts]
    gate = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(99))
    shared = SwiGLU.seeded(HIDDEN, 32, torch.float32, 50)
    layer = MoELayer(exchange, gate, Experts(experts), top_k=TOP_K, shared=shared)
    x = torch.randn(tokens[group.rank], HIDDEN, generator=torch.Generator().manual_seed(group.rank))
    result = layer(x)
    exchange.check()
    ids, weights = layer.route(x)
    wanted = shared(x)
    for expert in range(EXPERTS):
        weight = torch.where(ids == expert, weights, 0.0).sum(dim=1, keepdim=True)
        wanted = wanted + weight * SwiGLU.seeded(HIDDEN, 32, torch.float32, expert)(x)
    torch.testing.assert_close(result, wanted)
    group.barrier()
    exchange.close()
    return tuple(result.shape)


@pytest.mark.parametrize(("backend", "device"), [("onesided", "threads"), ("collective", "cpu")])
def test_layer_is_the_dense_sum(ranks, backend, device):
    tokens = [9, 0, 4]
    shapes = ranks(3, device)(_layer, backend, tokens)
    assert shapes == [(count, HIDDEN) for count in tokens]
