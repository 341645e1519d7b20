# SPDX-License-Identifier: Apache-2.0
"""Hopper's grouped GEMM on a CPU with biases and results of other dtypes than its operands."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.gemm.cases import Case, gated
from tests.gemm.emulate import EmulatedGemms, compile_gemms, tensor_map
from weft.gemm import STORE, Gated, WgmmaPlan, kernels, reference
from weft.gemm.kernels import BIASES, OPERANDS, GemmShape

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

BF16, FP16 = torch.bfloat16, torch.float16
GATED = Gated(1.702, 1.0, 0.7)
# Fewer columns than a warp has, odd steps of k.
CASES = {
    "tiny": (Case(BF16, counts=(5, 0, 37, 1, 64), n=16, k=8, bias=True), torch.float32, 32),
    "masked": (Case(FP16, counts=(33, 65, 0, 97), n=144, k=136, bias=True, masked=True), FP16, 64),
    "other": (Case(FP16, counts=(33, 193), n=400, k=72, bias=True), BF16, 192),
}
EPILOGUES = ("store", "gated", "push")


def all_shapes() -> Iterator[GemmShape]:
    for case, bias, block_m in CASES.values():
        for epilogue in EPILOGUES:
            for out in ("bf16", "fp16"):
                sizes = (len(case.counts), case.n, case.k, WgmmaPlan(block_m))
                yield GemmShape(*sizes, epilogue, out, OPERANDS[case.dtype], BIASES[bias])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGemms:
    shapes = tuple(all_shapes())
    folder = tmp_path_factory.mktemp("gemms") / "tree"
    return EmulatedGemms(ctypes.CDLL(str(compile_gemms(shapes, folder))), shapes)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("out", [BF16, FP16])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_oracle(
    library: EmulatedGemms,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    out: torch.dtype,
    epilogue: str,
):
    case, bias, block_m = CASES[name]
    made = case.make()
    made.given["bias"] = made.given["bias"].to(bias)
    wanted, plan = made.oracle(), WgmmaPlan(block_m)
    monkeypatch.setattr(kernels, "tensor_map", tensor_map)
    for seed in range(3):
        mine = replace(library, seed=seed, policy=seed, sms=(2, 4, 6)[seed])
        monkeypatch.setattr(reference, "compute", mine.compute)
        if epilogue == "gated":
            made.call(GATED, plan, out).agrees(gated(GATED, wanted), 2.0**-6)
            continue
        got = made.call(STORE, plan, out)
        got.agrees(wanted, 2.0**-6)
        if epilogue == "push":
            stored, came = made.pushed(plan, out)
            assert torch.equal(stored[came], got.numbers.reshape(case.rows, -1)[came])
