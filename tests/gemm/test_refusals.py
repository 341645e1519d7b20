# SPDX-License-Identifier: Apache-2.0
"""Refusals of grouped GEMMs, before anything runs, with both values in the text."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gemm.cases import Case, CaseTensors
from tests.gemm.test_prepared import record_launches
from weft.errors import InvalidArgument
from weft.gemm import (
    Gated,
    GatedQuant,
    GemmPlan,
    Push,
    Store,
    StoreQuant,
    WgmmaPlan,
    grouped_gemm,
)
from weft.gemm.config import FP8
from weft.gemm.triton_launch import check_plan
from weft.moe import Gating

Change = Callable[[CaseTensors], dict[str, Any]]


def push(made: CaseTensors, dtype: torch.dtype | None = None, **kwargs: Any) -> dict[str, Any]:
    return {"epilogue": Push(torch.zeros(made.case.rows, dtype=torch.int64), dtype, **kwargs)}


def zeros(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


ONES, PLAN = torch.ones, WgmmaPlan(32)
FP8_CASE, MASKED, BF16 = Case(), Case(masked=True), Case(dtype=torch.bfloat16)
BF16_384 = replace(BF16, n=384)
# Beside those of tests/moe/test_arguments.py: wrong dtypes, shapes and strides of one tensor.
REFUSED: list[tuple[Case, Change, str]] = [
    (FP8_CASE, lambda m: {"b": m.b[..., :128].contiguous()}, r"a has .* \[rows, 128\]"),
    (FP8_CASE, lambda m: {"b": m.b.bfloat16()}, "bfloat16"),
    (FP8_CASE, lambda m: {"b": m.b[:, :192].contiguous()}, "n is 192"),
    (MASKED, lambda m: {"b": m.b[:2]}, r"a has shape \[3, .* \[2, max_rows, 256\]"),
    (FP8_CASE, lambda _: {"offsets": None}, "offsets are None"),
    (MASKED, lambda _: {"offsets": zeros(4)}, "offsets are set"),
    (FP8_CASE, lambda _: {"offsets": zeros(7)}, r"\[7\]"),
    (FP8_CASE, lambda _: {"counts": zeros(4)}, r"\[4\]"),
    (FP8_CASE, lambda _: {"a_scale": None}, "needs a_scale"),
    (FP8_CASE, lambda _: {"b_scale": ONES(3, 2, 1)}, r"\[3, 2, 1\]"),
    (BF16, lambda _: {"a_scale": ONES(1)}, "scales belong to"),
    (MASKED, lambda m: {"a_scale": ONES(3, 2 * len(m.a[0]), 2)[:, : len(m.a[0])]}, "strides"),
    (FP8_CASE, lambda _: {"bias": ONES(3, 5)}, r"\[3, 5\]"),
    (FP8_CASE, lambda _: {"out": ONES(5, 256)}, r"out has shape \[5, 256\]"),
    (FP8_CASE, lambda m: {"out": ONES(m.case.rows, 256).to(FP8)}, "float8"),
    (FP8_CASE, lambda _: {"out": (ONES(1), ONES(1))}, "pair"),
    (FP8_CASE, lambda _: {"epilogue": GatedQuant(), "out": ONES(1)}, "pair"),
    (
        FP8_CASE,
        lambda _: {"epilogue": StoreQuant(), "out": ONES(1)},
        "StoreQuant it must be a pair",
    ),
    (FP8_CASE, lambda m: {**push(m), "out": ONES(1)}, "out is a tensor .* with Push"),
    (FP8_CASE, lambda _: {"epilogue": Push(ONES(2))}, "dst_addr has dtype"),
    (FP8_CASE, lambda m: push(m, abort_flag=zeros(1)), "abort_flag of Push needs flag_in_data=Tr"),
    (FP8_CASE, lambda m: push(m, flag_in_data=True, abort_flag=zeros(2)), "abort_flag has shape"),
    (FP8_CASE, lambda m: push(m, torch.int32), "epilogue.dtype is torch.int32; choose one of tor"),
    (replace(BF16, n=128), lambda _: {"epilogue": GatedQuant()}, "n is 128; GatedQuant needs"),
    (replace(BF16, n=264), lambda _: {"epilogue": StoreQuant()}, "needs n to be a multiple of 128"),
    (BF16_384, lambda _: {"epilogue": StoreQuant(), "plan": GemmPlan(64, 256)}, "384 columns"),
    (BF16, lambda _: {"epilogue": StoreQuant(), "plan": PLAN}, "out is torch.float8_e4m3fn"),
    (replace(BF16, n=264), lambda _: {"epilogue": Gated()}, "halves"),
    (FP8_CASE, lambda _: {"plan": GemmPlan(64, block_k=64)}, "block_k"),
    (FP8_CASE, lambda _: {"epilogue": Gated(), "plan": GemmPlan(64)}, "block_n is 128"),
    (Case(n=384), lambda _: {"plan": GemmPlan(64, 256)}, "384 columns"),
    (FP8_CASE, lambda _: {"plan": PLAN, "bias": ONES(3, 256)}, "does not support a bias for FP8"),
    (FP8_CASE, lambda _: {"plan": PLAN, "epilogue": Gated()}, "FP8 with GatedQuant"),
    (Case(n=384), lambda _: {"plan": PLAN}, "multiple of 256 for"),
    (BF16, lambda _: {"plan": PLAN, "epilogue": GatedQuant()}, "a is torch.bfloat16"),
    (FP8_CASE, lambda _: {"plan": WgmmaPlan(192)}, "block_m is 192"),
    (FP8_CASE, lambda m: {"plan": PLAN, "out": ONES(m.case.rows, 256)}, "out is torch.float32"),
]


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize(("case", "change", "words"), REFUSED)
def test_refused(case: Case, change: Change, words: str, known: bool, monkeypatch: Any):
    """known: also where the call was launched before and differs from it by what is refused."""
    if known:
        record_launches(monkeypatch)
    made = case.make()
    kwargs: dict[str, Any] = {"a": made.a, "b": made.b, **made.given}
    grouped_gemm(**kwargs)  # as it is, it is served
    with pytest.raises(InvalidArgument, match=words):
        grouped_gemm(**kwargs | change(made))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"limit": 0.0}, "limit is 0.0"),
        ({"limit": math.inf}, "limit is inf"),
        ({"beta": 4.0}, "beta is 4.0 and linear_beta is None; pass both"),
        ({"beta": 4.0, "linear_beta": 0.0}, "linear_beta is 0"),
    ],
)
@pytest.mark.parametrize("kind", [Gated, GatedQuant, Gating])
def test_invalid_gating_parameters_are_refused(kind, numbers, words):
    with pytest.raises(InvalidArgument, match=words):
        kind(**numbers)


@pytest.mark.parametrize("kind", [Store, StoreQuant])
def test_unknown_activations_are_refused(kind: type[Store]):
    with pytest.raises(InvalidArgument, match="activation is 'gelu'.*'relu2'"):
        kind("gelu")


def test_the_error_without_triton_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    from weft.gemm import triton_launch

    triton_launch.import_triton.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(InvalidArgument, match=r"\[gpu\]'"):
        triton_launch.import_triton()


def test_on_gpus_flag_in_data_needs_a_wgmma_plan() -> None:
    push = Push(torch.zeros(1, dtype=torch.int64), flag_in_data=True)
    a = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda"))
    call: Any = SimpleNamespace(a=a, b=a, gated=False, epilogue=push)
    with pytest.raises(InvalidArgument, match="needs a WgmmaPlan, which only Hopper GPUs support"):
        check_plan(call, GemmPlan(64, block_k=64))
    call.epilogue = Push(push.dst_addr)
    check_plan(call, GemmPlan(64, block_k=64))
