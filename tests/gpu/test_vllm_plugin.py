# SPDX-License-Identifier: Apache-2.0
"""The vLLM plug-in on GPUs, with the stand-in's layers: CUDA graphs of several sizes and eager."""

import random
from typing import Any

import pytest
import torch

import weft
from tests.plugins.standins import HIDDEN, alone, max_relative_difference, tokens
from tests.plugins.vllm.workers import Worker, leave

pytestmark = pytest.mark.gpu

SIZES = (1, 4, 17, 40)  # decode, both ends of prefill, and two rounds
CLOSE = {"": 0.02, "fp8": 0.06}  # of bfloat16, and of rows in FP8


def replay(group: weft.Group, form: str, method: str) -> float:
    from weft.plugins.vllm import engine

    worker = Worker(group, form, method, layers=1, dtype=torch.bfloat16)
    engine.PADDED_BY_ROUTER = False
    device, graphs = group.device, {}
    for size in SIZES:  # in the same order on every rank
        x = torch.zeros(size, HIDDEN, dtype=torch.bfloat16, device=device)
        padding = torch.zeros(size, dtype=torch.bool, device=device)
        everyone = [size] * group.size
        worker.step(x, everyone, padding)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = worker.step(x, everyone, padding)
        graphs[size] = graph, x, padding, out
    result, order = 0.0, random.Random(1)
    for turn in range(40):
        size, eager = order.choice(SIZES), turn % 3 == 0
        real = order.randint(0, size)
        graph, x, padding, out = graphs[size]
        x.copy_(tokens(size, 100 * turn + group.rank).bfloat16())
        padding.copy_(torch.arange(size) >= real)
        if eager:
            out = worker.step(x, [size] * group.size, padding)
        else:
            graph.replay()
        want = alone(x.cpu(), real=real, layers=1)
        result = max(result, max_relative_difference(out.float().cpu(), want.float()))
    assert not engine._blocks or not engine._blocks.is_broken
    leave()
    return result


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("form", "method"), [("block", ""), ("exchange", ""), ("exchange", "fp8")])
def test_graphs_and_padding(ranks: Any, count: int, form: str, method: str) -> None:
    assert max(ranks(count, "cuda")(replay, form, method)) < CLOSE[method]
