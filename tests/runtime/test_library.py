"""torch.compile sees dispatch and combine as opaque, ordered operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.recorded import TORCH, reads
from tests.rounds import Round
from weft.runtime import library

CASE = Round(tokens=(6, 4), hidden=32)


def layer(a2a: weft.AllToAll, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    received = a2a.dispatch(x, ids, w)
    scale = torch.where(received.ids >= 0, received.weights, 0.0).sum(dim=2, keepdim=True)
    y = (received.x.float() * scale).to(x.dtype)
    return a2a.combine(y, add=x) * 2


def zero_copy(
    a2a: weft.AllToAll, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    received = a2a.dispatch(x, ids, w)
    scale = torch.where(received.ids >= 0, received.weights, 0.0).sum(dim=2, keepdim=True)
    a2a.output().copy_(received.x.float() * scale)
    return a2a.combine(add=x) * 2


def late_reader(
    a2a: weft.AllToAll, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    """Uses what was received only after two rounds: a compiler must not move the read there."""
    received = a2a.dispatch(x, ids, w)
    seen = torch.where(received.ids[..., :1] >= 0, received.x * 3, 0.0)
    a2a.combine(received.x)
    layer(a2a, x + 1, ids, w)
    return seen


def make(group: weft.Group) -> weft.AllToAll:
    return weft.AllToAll(
        group, max_tokens=6, top_k=CASE.top_k, num_experts=CASE.experts, hidden=CASE.hidden
    )


def compiled(group: weft.Group, backend: str) -> None:
    x, ids, w, _ = CASE.of(group.rank, group.device)
    cheap = backend != "inductor"  # whose every graph is half a minute of C++
    with make(group) as a2a, make(group) as other:
        for body in (layer, zero_copy, late_reader) if cheap else (late_reader,):
            traced = torch.compile(body, backend=backend, fullgraph=True)
            for owner in (a2a, other, a2a) if cheap else (a2a,):
                torch.testing.assert_close(traced(owner, x, ids, w), body(owner, x, ids, w))
        if not cheap:
            return
        twice = torch.compile(
            lambda *t: layer(a2a, *t) + layer(a2a, *t), backend=backend, fullgraph=True
        )
        eager = layer(a2a, x, ids, w)
        epoch = a2a.history()[-1].epoch
        torch.testing.assert_close(twice(x, ids, w), eager + eager)
        # Two equal calls stay two calls.
        assert a2a.history()[-1].epoch == epoch + 2
        received = a2a.dispatch(x, ids, w)
        combine = torch.compile(lambda y: a2a.combine(y), backend=backend, fullgraph=True)
        assert combine(received.x.clone()).shape == x.shape


@pytest.mark.parametrize(
    ("count", "backend"),
    [(2, "aot_eager"), pytest.param(1, "inductor", marks=reads(tools=(TORCH,)))],
)
def test_a_compiled_layer_equals_the_eager_one(ranks, count, backend):
    """Every rank of inductor would compile the same C++."""
    ranks(count, "cpu")(compiled, backend)


def named(group: weft.Group) -> None:
    """Graphs stay on disk: another process may have other sizes under the same serial number."""
    with make(group) as a2a, make(group) as same:
        sizes: dict[str, Any] = {"max_tokens": 7, "top_k": CASE.top_k, "num_experts": CASE.experts}
        with weft.AllToAll(group, **sizes, hidden=CASE.hidden) as other:
            names = [owner._handle >> library.SERIAL_BITS for owner in (a2a, same, other)]
            assert len({a2a._handle, same._handle, other._handle}) == 3
    assert names[0] == names[1] != names[2]


def test_a_graph_of_other_sizes_is_another_graph(ranks):
    ranks(1, "threads")(named)


def closed(group: weft.Group) -> None:
    a2a = weft.AllToAll(group, max_tokens=6, top_k=2, num_experts=4, hidden=16)
    handle, order = a2a._handle, a2a._order
    a2a.close()
    with pytest.raises(weft.errors.OutOfOrder):
        torch.ops.weft.combine(None, torch.zeros(1), None, order, handle)


def test_a_compiled_graph_outlives_its_all_to_all_with_an_error(ranks):
    ranks(1, "threads")(closed)
