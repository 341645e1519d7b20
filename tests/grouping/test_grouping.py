# SPDX-License-Identifier: Apache-2.0
"""Grouping of inboxes that are filled by hand: every row, position and untouched byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from tests.groups import VARIANTS, check_round, empty_round, fill, make, random_ids
from tests.headers import Header
from tests.kinds import ANY, on_ranks
from tests.rounds import synchronize
from weft.grouping.operator import ExpertGroups, Grouped


def chosen_ids(group: weft.Group, names: list[str]) -> None:
    with make(group) as a2a:
        received, experts = empty_round(a2a), a2a.num_local_experts
        full = [a2a.max_tokens] * group.size
        shape = received.ids.shape
        for name in names:
            groups = ExpertGroups(a2a, **VARIANTS[name])  # type: ignore[arg-type]
            none = torch.full(shape, -1, dtype=torch.int32)
            fill(received, none, full, 1)
            check_round(a2a, groups, received)
            to_one = none.clone()
            to_one[..., 1] = experts - 1
            fill(received, to_one, full, 2)
            check_round(a2a, groups, received)
            fill(received, random_ids(shape, experts, 3, 0.3, 0.0), [0] * group.size, 3)
            check_round(a2a, groups, received)
            for seed, counts in enumerate(([7, 128, 129], [150, 0, 1], full), 10):
                ids = random_ids(shape, experts, seed, 0.2, 0.1)
                fill(received, ids, counts[: group.size], seed)
                check_round(a2a, groups, received)
            groups.close()


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("name", VARIANTS)
def test_chosen_ids(ranks, kind, name):
    ranks(2, kind)(chosen_ids, [name])


def any_routing(group: weft.Group, names: list[str]) -> None:
    with make(group, max_tokens=9, num_experts=4 * group.size) as a2a:
        received, experts = empty_round(a2a), a2a.num_local_experts
        options = {name: dict(VARIANTS[name]) for name in names}
        for name, option in options.items():
            if "too few" in name:
                option["max_rows"] = 16 if "aligned" in name else 5
        made = {n: ExpertGroups(a2a, **o) for n, o in options.items()}  # type: ignore[arg-type]
        chance = st.sampled_from([0.0, 0.1, 0.5, 0.9])

        @settings(
            max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(
            seed=st.integers(0, 2**20),
            counts=st.lists(st.integers(-1, 11), min_size=group.size, max_size=group.size),
            holes=chance,
            wild=chance,
            repeats=st.booleans(),
        )
        def check(seed: int, counts: list[int], holes: float, wild: float, repeats: bool) -> None:
            ids = random_ids(received.ids.shape, experts, seed, holes, wild)
            if repeats:
                ids[..., 2] = ids[..., 0]
            fill(received, ids, counts, seed)
            for groups in made.values():
                check_round(a2a, groups, received)

        if group.rank == 0:
            check()


@pytest.mark.parametrize("kind", ANY)
def test_any_routing(ranks, kind):
    ranks(3, kind)(any_routing, ["contiguous", "aligned", "masked", "too few rows"])


@on_ranks(2)
def test_other_sizes(group):
    for changes in (
        {"top_k": 1, "max_tokens": 1, "num_experts": 4, "expert_map": [1, 1, 0, 1]},
        {"top_k": 9, "num_experts": 600, "hidden": 264, "dtype": torch.float16},
        {"top_k": 32, "num_experts": 500, "dtype": torch.float32, "max_tokens": 20},
        {"payloads": None, "hidden": 1280, "quantize": "fp8", "combine": "push"},
    ):
        with make(group, **changes) as a2a:
            received = empty_round(a2a)
            groups = ExpertGroups(a2a, align=2)
            for seed, holes in enumerate((0.0, 0.7)):
                ids = random_ids(received.ids.shape, a2a.num_local_experts, seed, holes, 0.0)
                fill(received, ids, [a2a.max_tokens] * group.size, seed)
                check_round(a2a, groups, received)


def no_experts(group: weft.Group) -> tuple[int, ...]:
    with make(group, num_experts=4, expert_map=[0, 0, 0, 0]) as a2a:
        groups = ExpertGroups(a2a)
        received = empty_round(a2a)
        grouped = groups.gather(received)
        synchronize(group.device)
        assert grouped.offsets.tolist() == [0] * (a2a.num_local_experts + 1)
        groups.scatter(torch.zeros(groups.y_shape, dtype=a2a.dtype, device=group.device))
        a2a.combine()
        a2a.check()
        return tuple(grouped.x.shape)


@pytest.mark.parametrize("kind", ANY)
def test_a_rank_without_experts(ranks, kind):
    assert ranks(2, kind)(no_experts) == [(2 * 150 * 3, 24), (0, 24)]


@on_ranks(2)
def test_a_broken_group_writes_nothing(group):
    """After a group broke, the device writes nothing and the host raises."""
    with make(group) as a2a:
        received, groups = empty_round(a2a), ExpertGroups(a2a)
        ids = random_ids(received.ids.shape, a2a.num_local_experts, 1, 0.0, 0.0)
        fill(received, ids, [150] * group.size, 1)
        header = a2a.heap.tensor((8192,), torch.uint8)
        failed = Header.failed.offset
        header[failed] = 4
        grouped: Grouped = groups.gather(received)
        synchronize(group.device)
        assert not bool(grouped.counts.any())
        assert not bool(grouped.x.any())
        header[failed] = 0
        check_round(a2a, groups, received)
