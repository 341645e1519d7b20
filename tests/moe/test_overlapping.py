# SPDX-License-Identifier: Apache-2.0
"""CPU versions of the rounds that tests/gpu/test_overlap_graphs.py runs on GPUs."""

from __future__ import annotations

from typing import Any

from tests.moe.overlapping import MODES, replay, run_odd_rounds

TILED: dict[str, Any] = {"gemm": "grouped"}
SOUND = dict.fromkeys(MODES, 0)


def test_rounds_of_every_overlap_in_any_order(ranks):
    assert ranks(2, "threads")(replay, 14, {**TILED, "fp8": True}) == [SOUND] * 2


def test_late_ranks_and_odd_routing(ranks):
    assert ranks(3, "threads")(run_odd_rounds, 12, 3, 48, TILED) == [SOUND] * 3
