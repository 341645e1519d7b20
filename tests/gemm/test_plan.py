# SPDX-License-Identifier: Apache-2.0
"""Plans: the existing ones, and their numbers of tiles."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import InvalidArgument
from weft.gemm import GemmPlan, WgmmaPlan, config, fastest_plan
from weft.gemm.config import BLOCK_MS, FP8, MXFP4

SWAPPED = [GemmPlan(rows, swap=rows < 64) for rows in (16, 32, 64, 128)]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=40),
    st.sampled_from([*SWAPPED, *map(WgmmaPlan, BLOCK_MS)]),
)
def test_no_counts_exceed_the_maximum_of_m_blocks(counts: list[int], made: GemmPlan | WgmmaPlan):
    """Hopper cuts an expert's rows into equal tiles, or full ones with a rest."""
    rows = made.block_m
    blocks = sum(-(-count // rows) for count in counts)
    if isinstance(made, WgmmaPlan):
        full = min(rows, 128)
        cut = [-(-max(count - (rows - full), 1) // full) for count in counts if count]
        blocks = max(blocks, sum(cut))
    assert blocks <= made.max_m_blocks(sum(counts), len(counts))


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
    means = {1: 32, 8: 32, 16: 32, 32: 64, 64: 96, 96: 128, 128: 160, 4096: 160}
    for rows, most in means.items():
        assert fastest_plan(32, rows, 4096, 7168, MXFP4, gated=True) == WgmmaPlan(most)
    assert block_m(1, 4096) == 128
    # 256 and 64 tiles of 512 weight rows are 3.9 and 1 rounds of 66 clusters; 96 are 1.5 rounds.
    for experts, n, most in ((32, 4096, 128), (8, 4096, 128), (16, 3072, 96), (32, 1536, 96)):
        assert fastest_plan(experts, 64, n, 4096, FP8, device=device) == WgmmaPlan(most)
    for rows in (1, 64, 128, 256, 512):
        assert -(-rows // block_m(1, rows)) * 16 >= 60 or block_m(1, rows) == 32


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
