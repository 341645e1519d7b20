"""Hopper's product on a CPU with biases and results of other dtypes than its operands."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.gemm.cases import SENTINEL, Case, Made, Output, gated
from tests.gemm.emulate import EmulatedProducts, compile_products, tensor_map
from tests.recorded import reads
from weft.gemm import STORE, Gated, Push, WgmmaPlan, grouped_gemm, hopper, reference
from weft.gemm.hopper import BIASES, OPERANDS, Kind

pytestmark = [pytest.mark.usefixtures("one_thread"), reads("tests/emulator/*.hpp")]

BF16, FP16 = torch.bfloat16, torch.float16
GATED = Gated(1.702, 1.0, 0.7)
# Fewer columns than a warp has, odd steps of k.
CASES = {
    "tiny": (Case(BF16, counts=(5, 0, 37, 1, 64), n=16, k=8, bias=True), torch.float32, 32),
    "masked": (Case(FP16, counts=(33, 65, 0, 97), n=144, k=136, bias=True, masked=True), FP16, 64),
    "other": (Case(FP16, counts=(33, 193), n=400, k=72, bias=True), BF16, 192),
}
FINISHES = ("store", "gated", "push")


def all_kinds() -> Iterator[Kind]:
    for case, bias, rows in CASES.values():
        for finish in FINISHES:
            for number in ("bf16", "fp16"):
                sizes = (len(case.counts), case.n, case.k, WgmmaPlan(rows))
                yield Kind(*sizes, finish, number, OPERANDS[case.dtype], BIASES[bias])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> EmulatedProducts:
    kinds = tuple(all_kinds())
    folder = tmp_path_factory.mktemp("products") / "tree"
    return EmulatedProducts(ctypes.CDLL(str(compile_products(kinds, folder))), kinds)


def call(made: Made, finish: str, rows: int, out: torch.dtype) -> Output:
    """One product into tensors full of SENTINEL."""
    case, plan = made.case, WgmmaPlan(rows)
    if finish == "push":
        there = torch.full((case.rows, case.n), SENTINEL, dtype=out)
        order = torch.randperm(case.rows, generator=torch.Generator().manual_seed(1))
        home = there.data_ptr() + order * case.n * 2
        grouped_gemm(made.a, made.b, plan=plan, epilogue=Push(home, out), **made.given)
        return Output(case, there[order])
    width = case.n // 2 if finish == "gated" else case.n
    numbers = torch.full((*made.a.shape[:-1], width), SENTINEL, dtype=out)
    how = GATED if finish == "gated" else STORE
    grouped_gemm(made.a, made.b, plan=plan, epilogue=how, out=numbers, **made.given)
    return Output(case, numbers)


@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize("out", [BF16, FP16])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_oracle(
    library: EmulatedProducts,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    out: torch.dtype,
    finish: str,
):
    case, bias, rows = CASES[name]
    made = case.make()
    made.given["bias"] = made.given["bias"].to(bias)
    wanted = made.product()
    monkeypatch.setattr(hopper, "tensor_map", tensor_map)
    for seed in range(3):
        mine = replace(library, seed=seed, policy=seed, sms=(2, 4, 6)[seed])
        monkeypatch.setattr(reference, "compute", mine.compute)
        got = call(made, finish, rows, out)
        got.agrees(gated(GATED, wanted) if finish == "gated" else wanted, 2.0**-6)
