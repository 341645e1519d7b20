# SPDX-License-Identifier: Apache-2.0
"""Grouping of inboxes that are filled by hand: every row, position and untouched byte."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.groups import VARIANTS, check_round, empty_round, fill, make, random_ids
from tests.headers import Header
from tests.ranks import on_ranks
from tests.rounds import synchronize
from weft.grouping.operator import ExpertGroups, Grouped


@pytest.mark.parametrize("name", VARIANTS)
@on_ranks(2)
def test_chosen_ids(group, name):
    with make(group) as a2a:
        received, experts = empty_round(a2a), a2a.num_local_experts
        groups = ExpertGroups(a2a, **VARIANTS[name])  # type: ignore[arg-type]
        full, shape = [a2a.max_tokens] * group.size, received.ids.shape
        none = torch.full(shape, -1, dtype=torch.int32)
        to_one = none.clone()
        to_one[..., 1] = experts - 1
        rounds = [(none, full), (to_one, full), (random_ids(shape, experts, 3, 0.3, 0.0), [0, 0])]
        for seed, counts in enumerate(([7, 128], [150, 0], full), 10):
            rounds.append((random_ids(shape, experts, seed, 0.2, 0.1), counts))
        for seed, (ids, counts) in enumerate(rounds):
            fill(received, ids, counts, seed)
            check_round(a2a, groups, received)
        groups.close()


@on_ranks(3)
def test_any_routing(group):
    with make(group, max_tokens=9, num_experts=4 * group.size) as a2a:
        received, experts = empty_round(a2a), a2a.num_local_experts
        names = ("contiguous", "aligned", "masked")
        options = [VARIANTS[name] for name in names] + [{"max_rows": 5}]
        made = [ExpertGroups(a2a, **option) for option in options]  # type: ignore[arg-type]
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
            for groups in made:
                check_round(a2a, groups, received)

        if group.rank == 0:
            check()


@on_ranks(2)
def test_other_sizes(group):
    for changes in (
        {"num_experts": 4, "expert_map": [0, 0, 0, 0]},  # a rank without experts
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
