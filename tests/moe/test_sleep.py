# SPDX-License-Identifier: Apache-2.0
"""MoE layers continue after sleeps with the same bits, and leave no buffers behind meanwhile.

CPU ranks rehearse it without graphs; ranks may share one GPU.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.baseline import shares_mapped
from tests.moe.layers import CONFIGS, EXPERTS, Case
from tests.operators import capture_body
from tests.ranks import on_ranks
from weft.errors import OutOfOrder
from weft.heap import local
from weft.moe import ExpertWeights, balance

RANKS = 2
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "throughput": ("deepseek", {"mode": "throughput"}),
    "weighted inputs": ("llama", {"mode": "throughput"}),
    "low latency": ("softmax", {"mode": "low_latency", "overlap": "none"}),
    "fp8, replicas": ("softmax", {"mode": "throughput", "fp8": True, "gemm": "grouped"}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
@on_ranks(RANKS, "cpu", "cuda")
def test_layers_continue_after_every_sleep(group: weft.Group, way: str) -> None:
    name, options = WAYS[way]
    local.MIN_BYTES = 1  # small buffers, too
    if "replicas" in way:
        options = options | {"replicas": balance([1.0] * EXPERTS, RANKS, replicas=EXPERTS // 2)}
    config = CONFIGS[name]
    if "fp8" in options:
        config = replace(config, intermediate=128)  # a block of scales
    case = Case(config, (7, 5))
    layer = case.open(group, **options)

    def weights(experts: tuple[int, ...]) -> ExpertWeights:
        stacked = case.weights(experts, group.device, first=EXPERTS)
        return case.packed(stacked) if "fp8" in options else stacked

    second = layer.sibling(
        weights,
        shared=case.shared(group.device),
        correction=case.correction(group.device),
    )
    x, logits = case.inputs_of(group.rank, group.device)
    outs = [torch.empty_like(x) for _ in range(2)]

    def body() -> None:
        for each, out in zip((layer, second), outs, strict=True):
            each(x, logits, out=out)

    replay = capture_body(group, body)
    replay()
    layer.check()
    expected = [out.clone() for out in outs]
    addresses = [buffer.data_ptr() for buffer in layer.workspace.buffers]
    for _ in range(5):
        group.sleep()
        if group.device.type == "cpu":
            assert shares_mapped() == 0
        for refused in (lambda: layer(x, logits), lambda: second(x, logits)):
            with pytest.raises(OutOfOrder, match=r"call group\.wake\(\) first"):
                refused()
        group.wake()
        for out in outs:
            out.fill_(float("nan"))
        replay()
        layer.check()
        assert all(map(torch.equal, outs, expected))
        assert [buffer.data_ptr() for buffer in layer.workspace.buffers] == addresses
    group.barrier()
