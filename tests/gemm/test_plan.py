# SPDX-License-Identifier: Apache-2.0
"""Plans: the existing ones, and their numbers of tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import InvalidArgument
from weft.gemm import GemmPlan, WgmmaPlan, config, fastest_plan, plan
from weft.gemm.config import BLOCK_MS, FP8


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
def test_every_number_of_rows_has_a_plan(dtype: torch.dtype, gated: bool):
    for rows in (0, 1, 16, 17, 32, 33, 64, 65, 128, 4096):
        made = plan(32, rows, 4096, 7168, dtype, gated=gated)
        assert made.block_k == (128 if dtype == FP8 else 64)
        assert gated or made.block_m >= min(rows, 64)
        assert made.block_n == 256 or not gated


def test_another_dtype_is_refused():
    with pytest.raises(InvalidArgument, match="float32"):
        plan(32, 1, 4096, 7168, torch.float32)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_m", 48),
        ("block_n", 64),
        ("block_k", 32),
        ("stages", 0),
        ("warps", 3),
        ("ctas_per_sm", 0),
    ],
)
def test_fields_out_of_range_are_refused(field: str, value: Any):
    with pytest.raises(InvalidArgument, match=field):
        replace(GemmPlan(64), **{field: value})


def test_small_tiles_are_swapped():
    with pytest.raises(InvalidArgument, match="swap=True"):
        GemmPlan(32)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=40),
    st.sampled_from([16, 32, 64, 128]),
    st.integers(0, 200),
)
def test_no_counts_exceed_the_maximum_of_m_blocks(counts: list[int], rows: int, slack: int):
    made = GemmPlan(rows, swap=rows < 64)
    blocks = sum(-(-count // rows) for count in counts)
    assert blocks <= made.max_m_blocks(sum(counts) + slack, len(counts))


def test_n_blocks_cover_the_columns():
    assert GemmPlan(64).n_blocks(7168) == 56
    assert GemmPlan(64, 256).n_blocks(7168) == 28
    assert GemmPlan(64, 256).n_blocks(2880) == 12  # the last is not full
    assert GemmPlan(64, 256).n_blocks(4096, gated=True) == 16
    assert GemmPlan(64, 256).n_blocks(5760, gated=True) == 23


def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(config, "is_hopper", lambda device: device is not None)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("rows", [0, 1, 8, 20, 33, 64, 72, 80, 124])
def test_on_hopper_most_experts_are_one_tile(rows: int, monkeypatch: pytest.MonkeyPatch):
    device = hopper(monkeypatch)
    best = fastest_plan(32, rows, 4096, 7168, FP8, gated=True, device=device)
    assert isinstance(best, WgmmaPlan)
    assert best.block_m >= rows + 2.9 * rows**0.5
    assert best.block_m == 32 or best.block_m <= 3 * (rows + 3 * rows**0.5)


def test_wide_tiles_are_chosen_where_they_fill_rounds_of_clusters(monkeypatch: pytest.MonkeyPatch):
    device = hopper(monkeypatch)
    # 256 and 64 tiles of 512 weight rows are 3.9 and 1 rounds of 66 clusters; 96 are 1.5 rounds.
    for experts, n, block_m in ((32, 4096, 128), (8, 4096, 128), (16, 3072, 96), (32, 1536, 96)):
        assert fastest_plan(experts, 64, n, 4096, FP8, device=device) == WgmmaPlan(block_m)


def test_one_expert_fills_the_gpu(monkeypatch: pytest.MonkeyPatch):
    device = hopper(monkeypatch)
    for rows in (1, 64, 128, 256, 512):
        best = fastest_plan(1, rows, 4096, 7168, FP8, gated=True, device=device)
        assert isinstance(best, WgmmaPlan)
        clusters = -(-rows // best.block_m) * 16
        assert clusters >= 60 or best.block_m == 32


def test_many_rows_are_split(monkeypatch: pytest.MonkeyPatch):
    device = hopper(monkeypatch)
    means = {100: 128, 120: 128, 121: 160, 144: 160, 145: 256, 4096: 256}
    for rows, most in means.items():
        best = fastest_plan(32, rows, 4096, 7168, FP8, gated=True, device=device)
        assert best == WgmmaPlan(most)
    one = fastest_plan(1, 4096, 4096, 7168, FP8, gated=True, device=device)
    assert one == WgmmaPlan(128)


@settings(deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=20), st.sampled_from(BLOCK_MS))
def test_hopper_tiles_do_not_exceed_the_maximum(counts: list[int], rows: int):
    made = WgmmaPlan(rows)
    full = min(rows, 128)
    cut = sum(-(-max(count - (rows - full), 1) // full) for count in counts if count)
    equal = sum(-(-count // rows) for count in counts)
    assert max(cut, equal) <= made.max_m_blocks(sum(counts), len(counts))


@pytest.mark.parametrize("rows", [1, 32, 64, 128, 180, 256, 4096])
@pytest.mark.parametrize("given", [{"gated": True}, {"biased": True}, {"n": 2880, "k": 200}])
def test_16_bit_dtypes_have_higher_tiles(
    rows: int, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    sizes: dict[str, Any] = {"n": 4096, "k": 7168, "device": hopper(monkeypatch)} | given
    for dtype in (torch.bfloat16, torch.float16):
        best = fastest_plan(16, rows, dtype=dtype, **sizes)
        assert isinstance(best, WgmmaPlan)
        fullest = rows + 3 * rows**0.5
        assert best.block_m >= min(fullest - 0.1 * rows**0.5, 256)
        assert best.block_m == 32 or best.block_m <= max(2 * fullest, 64)
        assert best.block_m - fullest < 64, "heights are at most 64 rows apart"


def test_other_problems_use_the_other_kernel(monkeypatch: pytest.MonkeyPatch):
    device = hopper(monkeypatch)
    sizes: dict[str, Any] = {"experts": 32, "rows_per_expert": 8, "n": 4096, "k": 7168}
    assert isinstance(fastest_plan(**sizes, dtype=FP8, device=device), WgmmaPlan)
    for change in (
        {"dtype": torch.bfloat16, "experts": 1},
        {"dtype": torch.bfloat16, "out": torch.float32},
        {"biased": True},
        {"n": 4096 + 128},
        {"experts": 1025},
        {"out": torch.float32},
        {"device": None},
    ):
        given: dict[str, Any] = {"dtype": FP8, "device": device, **sizes, **change}
        assert isinstance(fastest_plan(**given), GemmPlan), change
