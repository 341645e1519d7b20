# SPDX-License-Identifier: Apache-2.0
"""Refusals of grouped GEMMs, before anything runs, with both values in the text."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gemm.cases import Case, Made
from tests.gemm.launches import record_launches
from weft.errors import InvalidArgument
from weft.gemm import Gated, GatedQuant, GemmPlan, Push, WgmmaPlan, grouped_gemm
from weft.gemm.config import FP8, GatingParams
from weft.gemm.triton_launch import check_plan
from weft.moe import Gating

Change = Callable[[Made], dict[str, Any]]


def push(made: Made, dtype: torch.dtype | None = None, **kwargs: Any) -> dict[str, Any]:
    return {"epilogue": Push(torch.zeros(made.case.rows, dtype=torch.int64), dtype, **kwargs)}


INT = torch.int32
CHANGES: dict[str, tuple[Case, Change, str]] = {
    "a of one dimension": (
        Case(),
        lambda m: {"a": m.a[0]},
        r"a has shape \[256\]; it must be \[rows, 256\]",
    ),
    "k of a and b": (
        Case(),
        lambda m: {"b": m.b[..., :128].contiguous()},
        r"a has .* \[rows, 128\]",
    ),
    "float32": (Case(), lambda m: {"a": m.a.float()}, "float32"),
    "dtypes": (Case(), lambda m: {"b": m.b.bfloat16()}, "bfloat16"),
    "n of FP8": (Case(n=192 + 64), lambda m: {"b": m.b[:, :192].contiguous()}, "n is 192"),
    "experts": (
        Case(masked=True),
        lambda m: {"b": m.b[:2]},
        r"a has shape \[3, .* \[2, max_rows, 256\]",
    ),
    "strided a": (Case(), lambda m: {"a": m.a.T.contiguous().T}, "contiguous"),
    "no offsets": (Case(), lambda _: {"offsets": None}, "offsets are None"),
    "masked with offsets": (
        Case(masked=True),
        lambda _: {"offsets": torch.zeros(4, dtype=INT)},
        "offsets are set",
    ),
    "offsets' length": (Case(), lambda _: {"offsets": torch.zeros(7, dtype=INT)}, r"\[7\]"),
    "int64 counts": (Case(), lambda m: {"counts": m.given["counts"].long()}, "int64"),
    "counts' length": (Case(), lambda _: {"counts": torch.zeros(4, dtype=INT)}, r"\[4\]"),
    "no scales": (Case(), lambda _: {"a_scale": None}, "needs a_scale"),
    "scales' shape": (Case(), lambda _: {"b_scale": torch.ones(3, 2, 1)}, r"\[3, 2, 1\]"),
    "scales of BF16": (
        Case(dtype=torch.bfloat16),
        lambda _: {"a_scale": torch.ones(1)},
        "scales belong to",
    ),
    "uneven scales": (
        Case(masked=True),
        lambda m: {"a_scale": torch.ones(3, 2 * m.case.max_rows, 2)[:, : m.case.max_rows]},
        "strides",
    ),
    "bias": (Case(), lambda _: {"bias": torch.ones(3, 5)}, r"\[3, 5\]"),
    "out's shape": (Case(), lambda _: {"out": torch.ones(5, 256)}, r"out has shape \[5, 256\]"),
    "out's dtype": (Case(), lambda m: {"out": torch.ones(m.case.rows, 256).to(FP8)}, "float8"),
    "a pair to store": (Case(), lambda _: {"out": (torch.ones(1), torch.ones(1))}, "pair"),
    "one to quantise": (Case(), lambda _: {"epilogue": GatedQuant(), "out": torch.ones(1)}, "pair"),
    "out to push": (
        Case(),
        lambda m: {**push(m), "out": torch.ones(1)},
        "out is a tensor .* with Push",
    ),
    "dst_addr": (Case(), lambda _: {"epilogue": Push(torch.zeros(2))}, "dst_addr has dtype"),
    "an abort flag without flag-in-data": (
        Case(),
        lambda m: push(m, abort_flag=torch.zeros(1, dtype=torch.int32)),
        "abort_flag of Push needs flag_in_data=True",
    ),
    "an abort flag of another size": (
        Case(),
        lambda m: push(m, flag_in_data=True, abort_flag=torch.zeros(2, dtype=torch.int32)),
        "abort_flag has shape",
    ),
    "quantised columns": (
        Case(dtype=torch.bfloat16, n=128),
        lambda _: {"epilogue": GatedQuant()},
        "n is 128; GatedQuant needs",
    ),
    "a gate without an up": (
        Case(dtype=torch.bfloat16, n=264),
        lambda _: {"epilogue": Gated()},
        "halves",
    ),
    "FP8 with block_k 64": (Case(), lambda _: {"plan": GemmPlan(64, block_k=64)}, "block_k"),
    "gating in single blocks": (
        Case(),
        lambda _: {"epilogue": Gated(), "plan": GemmPlan(64)},
        "block_n is 128",
    ),
    "FP8 and half of block_n": (Case(n=384), lambda _: {"plan": GemmPlan(64, 256)}, "384 columns"),
    "a bias of WgmmaPlan": (
        Case(),
        lambda _: {"plan": WgmmaPlan(32), "bias": torch.ones(3, 256)},
        "does not support a bias for FP8",
    ),
    "gating of WgmmaPlan": (
        Case(),
        lambda _: {"plan": WgmmaPlan(32), "epilogue": Gated()},
        "FP8 with GatedQuant",
    ),
    "n of WgmmaPlan": (Case(n=384), lambda _: {"plan": WgmmaPlan(32)}, "multiple of 256 for"),
    "FP8 of BF16 by WgmmaPlan": (
        Case(dtype=torch.bfloat16),
        lambda _: {"plan": WgmmaPlan(32), "epilogue": GatedQuant()},
        "a is torch.bfloat16",
    ),
    "tiles that FP8 lacks": (Case(), lambda _: {"plan": WgmmaPlan(192)}, "block_m is 192"),
    "float32 of WgmmaPlan": (
        Case(),
        lambda m: {"plan": WgmmaPlan(32), "out": torch.ones(m.case.rows, 256)},
        "out is torch.float32",
    ),
    "dtype of Push": (
        Case(),
        lambda m: push(m, torch.int32),
        "epilogue.dtype is torch.int32; choose one of torch.bfloat16",
    ),
}


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize("name", CHANGES)
def test_refused(name: str, known: bool, monkeypatch: pytest.MonkeyPatch):
    """known: also where the call was launched before and differs from it by what is refused."""
    if known:
        record_launches(monkeypatch)
    case, change, words = CHANGES[name]
    made = case.make()
    kwargs: dict[str, Any] = {"a": made.a, "b": made.b, **made.given}
    grouped_gemm(**kwargs)  # as it is, it is served
    with pytest.raises(InvalidArgument, match=words):
        grouped_gemm(**kwargs | change(made))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"alpha": math.nan}, "alpha is nan.*finite"),
        ({"alpha": math.inf}, "alpha is inf.*finite"),
        ({"offset": math.inf}, "offset is inf.*finite"),
        ({"offset": math.nan}, "offset is nan.*finite"),
        ({"limit": 0.0}, "limit is 0.0"),
        ({"limit": math.inf}, "limit is inf"),
        ({"beta": 4.0}, "beta is 4.0 and linear_beta is None; pass both"),
        ({"beta": 4.0, "linear_beta": 0.0}, "linear_beta is 0"),
    ],
)
@pytest.mark.parametrize("kind", [Gated, GatedQuant, Gating])
def test_invalid_gating_parameters_are_refused(
    kind: type[GatingParams], numbers: dict[str, float], words: str
):
    with pytest.raises(InvalidArgument, match=words):
        kind(**numbers)


def test_unsupported_hopper_tiles_are_refused():
    with pytest.raises(InvalidArgument, match="block_m is 48; choose one of 32, 64"):
        WgmmaPlan(48)


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
