# SPDX-License-Identifier: Apache-2.0
"""mode="low_latency": its exchange, its GEMMs, and the order of its products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, EXPERTS, HIDDEN, Case
from tests.moe.test_layer import PAIRS
from weft.errors import InvalidArgument
from weft.gemm import config as gemm_config
from weft.moe.layer.config import choose_gemm, supports_flag_in_data

LOW = {"mode": "low_latency"}


def options_reach(group: weft.Group) -> None:
    case = Case(CONFIGS["softmax"], tokens=(4, 4))
    owners = [1, 0, 1, 1, 0, 0, 1, 1]
    fp8 = {"combine_dtype": "fp8", "quantize": "fp8", "profile": True, "expert_map": owners}
    for options, expected in ((fp8, (True, 128)), ({}, (False, 0))):
        with case.open(group, **LOW, **options) as layer:
            exchange = layer.exchange
            assert isinstance(exchange, weft.LowLatencyAllToAll)
            shape = exchange.config.shape
            assert (shape.combine_fp8, shape.group, shape.reduce) == (*expected, "receiver")
            assert (exchange._tracks.numel() > 0) == bool(options)
            if options:
                assert exchange.placement.ranks == tuple(owners)
                own = tuple(e for e in range(EXPERTS) if owners[e] == group.rank)
                assert layer.local_experts == own
                continue
            assert len(exchange.result_buffers) == 1
            sizes: dict[str, Any] = {
                "max_tokens": 4,
                "hidden": HIDDEN,
                "top_k": 3,
                "num_experts": EXPERTS,
            }
            assert exchange.memory == weft.LowLatencyAllToAll.memory_bytes(
                ranks=2, **sizes, quantize=None, slots=1, reduce="receiver"
            )


def test_options_reach_the_exchange(ranks):
    ranks(2, "threads")(options_reach)


def test_the_gemm_of_a_device():
    cpu, gpu, half = torch.device("cpu"), torch.device("cuda", 0), replace(PAIRS, dtype=torch.half)
    wide = replace(PAIRS, dtype=torch.float32)

    def choose(device: torch.device, config: weft.MoEConfig = PAIRS, **inputs: Any) -> str:
        options = {"fp8": False, "quantize": None, **inputs}
        return choose_gemm("auto", device, config, **options)

    def missing() -> None:
        raise InvalidArgument("no Triton here")

    assert (choose(cpu), choose(cpu, fp8=True, quantize="fp8")) == ("torch", "grouped")
    for import_triton in (lambda: None, missing):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("weft.gemm.triton_launch.import_triton", import_triton)
            patch.setattr("weft.moe.layer.config.import_triton", import_triton)
            if import_triton is missing:
                assert choose(gpu) == "torch"
                with pytest.raises(InvalidArgument, match="no Triton"):
                    choose(gpu, fp8=True, quantize="fp8")
                continue
            assert (choose(gpu), choose(gpu, half)) == ("grouped", "grouped")
            assert (choose(gpu, wide), choose(gpu, quantize="fp8")) == ("torch", "torch")
            assert choose(gpu, fp8=True, quantize="fp8") == "grouped"


@pytest.mark.parametrize(
    ("hopper", "config", "fp8", "able"),
    [
        (True, PAIRS, True, True),
        (True, PAIRS, False, True),
        (False, PAIRS, True, False),
        (True, replace(PAIRS, dtype=torch.float32), True, False),  # it stores two bytes a number
        (True, replace(PAIRS, hidden=384), True, False),  # columns of FP8 come in pairs of blocks
        (True, replace(PAIRS, biased=True), True, False),
    ],
)
def test_which_gemms_store_rows_with_flag_in_data(monkeypatch, hopper, config, fp8, able):
    monkeypatch.setattr(gemm_config, "is_hopper", lambda _: hopper)
    for experts in (1, 8):
        gpu = torch.device("cuda", 0)
        assert supports_flag_in_data(config, experts, fp8=fp8, device=gpu) == able
        assert supports_flag_in_data(config, experts, fp8=fp8, device=torch.device("cpu"))
