# SPDX-License-Identifier: Apache-2.0
"""MoE layers over several hosts, in both modes and every overlap."""

from typing import Any

import pytest
import torch

import weft
from tests.hosts.spanning import across, campaign
from tests.moe.layers import CONFIGS, Case, tolerance_of
from weft.errors import InvalidArgument
from weft.moe import balance

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "push": ("softmax", {"mode": "throughput", "overlap": "none", "gemm": "torch"}),
    "shared": ("deepseek", {"mode": "throughput", "overlap": "shared_expert", "gemm": "torch"}),
    "gemm push": ("deepseek", {"mode": "throughput", "overlap": "gemm_push", "gemm": "grouped"}),
    "input weights": ("llama", {"mode": "throughput", "overlap": "none", "gemm": "torch"}),
    "fp8 rows": ("gpt-oss", {"mode": "throughput", "quantize": "fp8", "combine_dtype": "fp8"}),
    "low latency": ("deepseek", {"mode": "low_latency", "overlap": "none", "gemm": "torch"}),
    "auto": ("softmax", {}),
}


@campaign
@across(2)
def test_layers_match_the_reference(group: weft.Group) -> None:
    for name, (config, options) in LAYERS.items():
        case = Case(CONFIGS[config], tokens=(5, 0, 8, 2))
        x, logits = case.inputs_of(group.rank, group.device)
        with case.open(group, max_tokens=20, **options) as layer:
            out = layer(x, logits)
            again = layer(x, logits, rows=8)  # of 20 slots for each host
            layer(x[:0], logits[:0], rows=0)
            assert torch.equal(out, again), name
            expected = case.expected(layer, x, logits, quantize=options.get("quantize"))
            layer.check()
        off = float((out.float() - expected).abs().max()) if len(x) else 0.0
        # One more rounding, of each host's sum; FP8 sums are rounded to an eighth of 2^-3.
        coarse = 2.0**-3 if options.get("combine_dtype") else 0.0
        most = float(expected.abs().max()) if len(x) else 1.0
        assert off <= 1.5 * tolerance_of(case.config, expected) + coarse * most, name


@across(2, 2)
def test_replicas_are_refused(group: weft.Group) -> None:
    case = Case(CONFIGS["softmax"], tokens=(1, 1))
    replicas = balance(torch.ones(8), ranks=2, replicas=2)
    with pytest.raises(InvalidArgument, match="replicas were passed for a group of 2 hosts"):
        case.open(group, replicas=replicas)
