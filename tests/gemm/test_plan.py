# SPDX-License-Identifier: Apache-2.0
"""Plans: the existing ones, and their numbers of tiles."""

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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stages": 0}, "stages"),
        ({"ctas_per_sm": 0}, "ctas_per_sm"),
        ({"block_m": 32}, "swap=True"),
    ],
)
def test_invalid_plans_are_refused(fields: dict[str, Any], words: str):
    """Other fields are in tests/moe/test_arguments.py."""
    with pytest.raises(InvalidArgument, match=words):
        GemmPlan(**{"block_m": 64, **fields})


def test_n_blocks_cover_the_columns():
    assert GemmPlan(64).n_blocks(7168) == 56
    assert GemmPlan(64, 256).n_blocks(7168) == 28
    assert GemmPlan(64, 256).n_blocks(2880) == 12  # the last is not full
    assert GemmPlan(64, 256).n_blocks(4096, gated=True) == 16
    assert GemmPlan(64, 256).n_blocks(5760, gated=True) == 23


def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(config, "is_hopper", lambda device: device is not None)
    return torch.device("cuda", 0)


def test_hopper_tiles_fit_the_experts_rows(monkeypatch: pytest.MonkeyPatch):
    """Most experts are one tile, many rows are split, and one expert fills the GPU."""
    device = hopper(monkeypatch)

    def block_m(experts: int, rows: int) -> int:
        best = fastest_plan(experts, rows, 4096, 7168, FP8, gated=True, device=device)
        assert isinstance(best, WgmmaPlan)
        return best.block_m

    for rows in (0, 1, 8, 20, 33, 64, 72, 80, 124):
        assert block_m(32, rows) >= rows + 2.9 * rows**0.5
        assert block_m(32, rows) == 32 or block_m(32, rows) <= 3 * (rows + 3 * rows**0.5)
    means = {100: 128, 120: 128, 121: 160, 144: 160, 145: 256, 4096: 256}
    assert {rows: block_m(32, rows) for rows in means} == means
    assert block_m(1, 4096) == 128
    # 256 and 64 tiles of 512 weight rows are 3.9 and 1 rounds of 66 clusters; 96 are 1.5 rounds.
    for experts, n, most in ((32, 4096, 128), (8, 4096, 128), (16, 3072, 96), (32, 1536, 96)):
        assert fastest_plan(experts, 64, n, 4096, FP8, device=device) == WgmmaPlan(most)
    for rows in (1, 64, 128, 256, 512):
        assert -(-rows // block_m(1, rows)) * 16 >= 60 or block_m(1, rows) == 32


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
def test_16_bit_dtypes_have_higher_tiles(rows, given, monkeypatch):
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
