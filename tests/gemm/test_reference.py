# SPDX-License-Identifier: Apache-2.0
"""What a grouped GEMM means, on CPU tensors."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from tests.gemm.cases import UNTOUCHED, Case, gated
from weft.gemm import Gated, GatedQuant, Push, grouped_gemm
from weft.gemm.config import FP8
from weft.moe.models import CLAMPED_SWIGLU, SWIGLU, Gating
from weft.reference import quantize

DTYPES = [FP8, torch.bfloat16, torch.float16]
SHAPES = {
    "contiguous": Case(),
    "masked": Case(masked=True),
    "packed": Case(align=1, slack=0, counts=(3, 1, 7, 0, 2)),
    "one expert": Case(counts=(9,)),
    "no rows": Case(counts=(0, 0)),
    "bias": Case(bias=True),
    "k-major scales": Case(k_major=True),
    "k-major, masked": Case(k_major=True, masked=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_meets_its_experts_weights(name: str, dtype: torch.dtype) -> None:
    made = replace(SHAPES[name], dtype=dtype).make()
    made.call().agrees(made.oracle())


@pytest.mark.parametrize(
    "gating", [Gated(), Gated(1.702, 1.0, 7.0), Gated(limit=0.5), Gated(beta=0.5, linear_beta=3.0)]
)
def test_gating_is_the_layers(gating: Gated) -> None:
    made = Case(dtype=torch.bfloat16, bias=True).make()
    got = made.call(gating)
    got.agrees(gated(gating, made.oracle()))


def test_the_numbers_of_gating_are_those_of_the_layer() -> None:
    from weft.gemm.reference import gate

    y = torch.randn(7, 64) * 5
    for theirs in (SWIGLU, CLAMPED_SWIGLU, Gating(beta=0.5, linear_beta=3.0)):
        ours = gate(Gated(**asdict(theirs)), y)
        torch.testing.assert_close(ours, theirs.apply(y.clone()), rtol=1e-6, atol=1e-6)


def test_quantised_gating_has_the_bits_of_the_quantiser() -> None:
    made = Case(counts=(6, 0, 3), n=512).make()
    live = made.case.live()
    wide = torch.full((made.case.rows, 256), torch.nan)
    grouped_gemm(made.a, made.b, epilogue=Gated(), out=wide, **made.given)
    numbers, scales = quantize(wide[live], "fp8")
    got = made.call(GatedQuant())
    assert got.scales is not None
    assert torch.equal(got.numbers[live].view(torch.uint8), numbers.view(torch.uint8))
    assert torch.equal(got.scales[live], scales)
    got.agrees(gated(Gated(), made.oracle()), tolerance=0.08)


@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_pushed_to_dst_addr_and_rows_without_one_are_not(masked: bool) -> None:
    made = Case(masked=masked).make()
    stored, came = made.pushed()
    assert torch.equal(stored[came], made.call().numbers.reshape(made.case.rows, -1)[came])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("aborted", [0, 1])
def test_rows_with_flag_in_data_have_no_sentinel(dtype: torch.dtype, aborted: int) -> None:
    """A NaN with all bits set loses its sign; with the abort flag set, nothing is stored."""
    made = Case(counts=(3, 2), dtype=torch.bfloat16, n=256).make()
    case, live = made.case, made.case.live()
    made.a.view(torch.int16)[live.nonzero()[0]] = -1  # a NaN of all ones
    stored = made.call().numbers.reshape(case.rows, -1)
    remote = torch.full((case.rows, case.n), -1.0).to(dtype)
    remote.view(torch.int32).fill_(-1)
    dst_addr = remote.data_ptr() + torch.arange(case.rows) * case.n * remote.element_size()
    dst_addr[live.nonzero()[1]] = 0
    abort_flag = torch.tensor([aborted], dtype=torch.int32)
    made.call(Push(dst_addr, dtype, flag_in_data=True, abort_flag=abort_flag))
    came = live & (dst_addr != 0) & (aborted == 0)
    words = remote.view(torch.int32)
    assert bool((words[came] != -1).all())
    assert bool((words[~came] == -1).all())
    assert torch.equal(remote[came].isnan(), stored[came].isnan())
    kept, wanted = remote[came].float(), stored[came].float()
    torch.testing.assert_close(kept, wanted, rtol=2.0**-7, atol=0.02, equal_nan=True)


def test_counts_are_held_to_the_rows_there_are() -> None:
    made = Case(masked=True, counts=(4, 2), slack=0, dtype=torch.bfloat16).make()
    whole = made.call().numbers
    made.given["counts"].copy_(torch.tensor([1000, 0]))
    got = made.call().numbers
    assert torch.equal(got[0], whole[0])
    assert bool((got[1] == UNTOUCHED).all())


def test_results_may_be_of_any_width() -> None:
    made = Case(dtype=torch.float16).make()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.full((made.case.rows, made.case.n), UNTOUCHED, dtype=dtype)
        back = grouped_gemm(made.a, made.b, out=out, **made.given)
        assert back is out
        assert torch.equal(out[~made.case.live()].float().unique(), torch.tensor([UNTOUCHED]))
    assert grouped_gemm(made.a, made.b, **made.given).dtype == torch.float16  # type: ignore[union-attr]


@pytest.mark.parametrize("masked", [False, True])
def test_no_experts_make_nothing(masked: bool):
    a = torch.empty((0, 4, 128) if masked else (0, 128), dtype=torch.bfloat16)
    b = torch.empty((0, 256, 128), dtype=torch.bfloat16)
    counts = torch.empty(0, dtype=torch.int32)
    offsets = None if masked else torch.zeros(1, dtype=torch.int32)
    out = grouped_gemm(a, b, counts=counts, offsets=offsets)
    assert isinstance(out, torch.Tensor)
    assert out.shape == ((0, 4, 256) if masked else (0, 256))
