# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts: every placement is valid and balanced."""

import math
import random
import re
from pathlib import Path

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft import Placement
from weft.moe import Replicas, balance

CPU = torch.device("cpu")


def zipf(experts: int, exponent: float, seed: int) -> list[float]:
    """Return loads that fall as `1 / k^exponent`, assigned to experts at random."""
    loads = [1 / k**exponent for k in range(1, experts + 1)]
    random.Random(seed).shuffle(loads)
    return loads


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], int, int]:
    ranks = draw(st.integers(1, 8))
    load = st.one_of(st.just(0.0), st.floats(1e-6, 1e9), st.integers(0, 5).map(float))
    loads = draw(st.lists(load, min_size=1, max_size=24))
    lack = -len(loads) % ranks
    most = len(loads) * (ranks - 1)
    replicas = lack + ranks * draw(st.integers(0, (most - lack) // ranks))
    return loads, ranks, replicas


@settings(max_examples=150, deadline=None)
@given(cases())
@example(([0.0] * 3, 3, 3))  # both replicas of expert 2 would be left with rank 2
def test_every_placement_holds_each_expert_and_none_twice_on_a_rank(case):
    loads, ranks, replicas = case
    result = balance(loads, ranks, replicas)
    assert len(result.logical) == len(loads) + replicas
    assert result.num_experts == len(loads)
    counts = [len(physical) for physical in result.physical_on()]
    assert min(counts) >= 1
    assert sum(counts) == len(result.logical)
    for rank in range(ranks):
        local = result.logical_experts(rank)
        assert len(local) == len(result.logical) // ranks
        assert len(set(local)) == len(local), "a second replica takes no load off its rank"
    # Greedy replicas: no expert is left with more load per replica than another gave up for its
    # last one, except where it is on every rank already.
    share = [load / count for load, count in zip(loads, counts, strict=True)]
    given_up = [load / (n - 1) for load, n in zip(loads, counts, strict=True) if n > 1]
    still = [s for s, n in zip(share, counts, strict=True) if n < ranks]
    assert max(still, default=0.0) <= min(given_up, default=math.inf)
    mean = math.fsum(loads) / ranks
    assert result.imbalance(loads) >= 1 - 1e-9
    assert result.imbalance(loads) * mean >= max(share) * (1 - 1e-9)
    assert balance(torch.tensor(loads, dtype=torch.float64), ranks, replicas) == result
    assert balance(list(np.array(loads)), ranks, replicas) == result
    sizes, physical = result.table(CPU)
    assert sizes.dtype == physical.dtype == torch.int32
    assert sizes.tolist() == counts
    for own, row in zip(result.physical_on(), physical.tolist(), strict=True):
        assert row == [*own] + [-1] * (max(counts) - len(own))
    placement = Placement.blocks(len(result.logical), ranks)
    for expert, own in enumerate(result.physical_on()):
        assert all(result.logical[slot] == expert for slot in own)
    for rank in range(ranks):
        slots = [*placement.experts_of(rank)]
        assert tuple(result.logical[slot] for slot in slots) == result.logical_experts(rank)


def test_the_table_of_the_docs():
    text = (Path(__file__).parents[2] / "docs/user/eplb.md").read_text()
    reported = re.findall(r"^\| (\d+), ([\d.]+) \|(.*)\|$", text, re.M)
    result = []
    for ranks, exponent, _ in reported:
        orders = [zipf(256, float(exponent), seed) for seed in range(5)]
        placed = [[Replicas(tuple(range(256)), int(ranks))] * 5]
        placed += [[balance(loads, int(ranks), n) for loads in orders] for n in (0, 16, 64)]
        means = [sum(map(Replicas.imbalance, column, orders)) / 5 for column in placed]
        cells = [f" {means[0]:.2f} ", *(f" {mean:.3f} " for mean in means[1:])]
        result.append((ranks, exponent, "|".join(cells)))
    assert len(reported) == 3
    assert reported == result


def test_loads_are_balanced():
    # 8 is halved first, then 2: both ranks hold 4 + 1 and one of the ones.
    assert balance([8, 1, 1, 2], ranks=2, replicas=2).imbalance([8, 1, 1, 2]) == 1.0
    assert balance([1, 0], 1).imbalance([0, 0]) == 1.0
    assert balance([0.0] * 4, 4, 4).table(CPU).counts.tolist() == [2, 2, 2, 2]
