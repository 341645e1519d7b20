"""torch.compile sees dispatch and combine as opaque, ordered operations."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.rounds import Round

CASE = Round(tokens=(6, 4), hidden=32)


def layer(a2a: weft.AllToAll, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    received = a2a.dispatch(x, ids, w)
    scale = torch.where(received.ids >= 0, received.weights, 0.0).sum(dim=2, keepdim=True)
    y = (received.x.float() * scale).to(x.dtype)
    return a2a.combine(y, add=x) * 2


def compiled(group: weft.Group) -> None:
    x, ids, w, _ = CASE.of(group.rank, group.device)
    a2a = weft.AllToAll(
        group, max_tokens=6, top_k=CASE.top_k, num_experts=CASE.experts, hidden=CASE.hidden
    )
    with a2a:
        eager = layer(a2a, x, ids, w)
        traced = torch.compile(lambda *t: layer(a2a, *t), backend="aot_eager", fullgraph=True)
        for _ in range(3):
            assert torch.equal(traced(x, ids, w), eager)
        twice = torch.compile(
            lambda *t: layer(a2a, *t) + layer(a2a, *t), backend="aot_eager", fullgraph=True
        )
        epoch = a2a.history()[-1].epoch
        assert torch.equal(twice(x, ids, w), eager + eager)
        # Two equal calls stay two calls.
        assert a2a.history()[-1].epoch == epoch + 2


def test_a_compiled_layer_equals_the_eager_one(ranks):
    ranks(2, "cpu")(compiled)


def closed(group: weft.Group) -> None:
    a2a = weft.AllToAll(group, max_tokens=6, top_k=2, num_experts=4, hidden=16)
    handle, order = a2a._handle, a2a._order
    a2a.close()
    with pytest.raises(weft.errors.OutOfOrder):
        torch.ops.weft.combine(None, torch.zeros(1), None, order, handle)


def test_a_compiled_graph_outlives_its_all_to_all_with_an_error(ranks):
    ranks(1, "threads")(closed)
