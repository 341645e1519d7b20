# SPDX-License-Identifier: Apache-2.0
"""epilogue_at="receiver": compared with the owner's bits, in graphs, and refused arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.allreduce.test_allreduce import make
from tests.kinds import on_ranks
from tests.sums import BACKENDS, Sum, assert_same_outputs, play, quant_specs
from weft.allreduce.call import FP8Token
from weft.errors import GeometryMismatch


@on_ranks(3)
def test_equal_inputs_have_the_same_bits_at_the_owner(group):
    """With equal inputs on all ranks, both places of the epilogue give the same bits."""
    case = Sum(7, 384, special=True)
    with make(group, 7, case) as owner, make(group, 7, case, epilogue_at="receiver") as receiver:
        for quant in quant_specs(group.device, case.hidden):
            for backend in BACKENDS:
                want = play(owner, case, backend, quant)
                assert_same_outputs(play(receiver, case, backend, quant), want)


def captured(group: weft.Group) -> None:
    """Replay graphs with other values, of sizes that a cluster does not divide."""
    case = Sum(11, 7168, differ=True)
    with make(group, 11, case, epilogue_at="receiver") as ar:
        for backend in ("twoshot", "twoshot_bulk"):
            x = case.rows(group.rank, group.device)
            residual, weight = case.shared(group.device, group.rank)
            kwargs: dict[str, Any] = {
                "residual": residual,
                "weight": weight,
                "quant": FP8Token(),
                "norm_out": True,
            }
            ar.fused(x, backend=backend, **kwargs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = ar.fused(x, backend=backend, **kwargs)
            for seed in range(4):
                drawn = case.next(seed=seed)
                xs = [drawn.rows(rank, group.device) for rank in range(group.size)]
                x.copy_(xs[group.rank])
                brought = drawn.shared(group.device, group.rank)
                residual.copy_(brought[0])
                weight.copy_(brought[1])
                graph.replay()
                torch.cuda.synchronize()
                ar.check()
                want = weft.reference.allreduce_fused(xs, residual, weight, quant=FP8Token())
                assert_same_outputs(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 4])
def test_in_a_cuda_graph(ranks, count):
    ranks(count, "cuda")(captured)


def disagreeing(group: weft.Group) -> str:
    at = ("owner", "receiver")[group.rank]
    with pytest.raises(GeometryMismatch) as caught:
        weft.AllReduce(group, max_tokens=8, hidden=256, epilogue_at=at)
    return str(caught.value)


def test_ranks_that_differ_raise(ranks):
    for text in ranks(2, "cpu")(disagreeing):
        assert "epilogue_at" in text
        assert "owner" in text
        assert "receiver" in text
