# SPDX-License-Identifier: Apache-2.0
"""CPU versions of the rounds that tests/gpu/test_overlap_graphs.py runs on GPUs."""

from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import Case
from tests.moe.overlapping import CONFIG, MODES, Layers, Step, replay, run_odd_rounds
from weft.moe import Expert

TILED: dict[str, Any] = {"gemm": "grouped"}
SOUND = dict.fromkeys(MODES, 0)


def test_rounds_of_every_overlap_in_any_order(ranks):
    assert ranks(2, "threads")(replay, 14, {**TILED, "fp8": True}) == [SOUND] * 2


def test_late_ranks_and_odd_routing(ranks):
    assert ranks(3, "threads")(run_odd_rounds, 12, 3, 48, TILED) == [SOUND] * 3


def spoiled(group: weft.Group, how: str) -> dict[str, int]:
    """With a fault in a round, the counter must not be zero."""
    case = Case(CONFIG, (4,) * group.size)
    with Layers(group, case, ("gemm_push",), TILED) as layers:
        step = Step(layers, "gemm_push", 4, poison=True)
        other = layers.others["gemm_push"]
        if how == "another shared expert":
            other._shared = Expert.seeded(CONFIG, 98, shared=True)
        elif how == "a product that stores nothing":
            vars(other.workspace.experts)["run_push"] = lambda weights: None
        else:
            for layer in (layers.plain, other):
                layer._shared = lambda x: torch.full_like(x, torch.nan)
        step.draw()
        step.count.fill_(4)
        step.compare()
        return layers.check()


@pytest.mark.parametrize(
    "how", ["another shared expert", "a product that stores nothing", "NaN in both"]
)
def test_wrong_words_are_counted(ranks, how):
    assert all(reported["gemm_push"] > 0 for reported in ranks(2, "threads")(spoiled, how))
