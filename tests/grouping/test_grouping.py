# SPDX-License-Identifier: Apache-2.0
"""Grouping of inboxes that are filled by hand, and in whole rounds: every row and position."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from tests.compat.calls import refused
from tests.groups import VARIANTS, check_round, empty_round, fill, host, make, random_ids
from tests.headers import Header
from tests.operators import capture_body
from tests.ranks import on_ranks
from tests.rounds import Round, bits, synchronize
from weft.errors import InvalidArgument, OutOfOrder
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


@on_ranks(3, "cpu", "threads", "cuda")
def test_whole_rounds(group):
    case = Round(tokens=(16, 5, 0)[: group.size], top_k=4, experts=10, router="holes", add=True)
    options = {"max_tokens": 16, "top_k": 4, "num_experts": 10, "hidden": case.hidden}
    with weft.AllToAll(group, **options) as a2a:  # type: ignore[arg-type]
        groups = ExpertGroups(a2a, align=8)
        for seed in range(6):
            now = case.next(seed=seed, tokens=case.tokens[seed % 3 :] + case.tokens[: seed % 3])
            x, ids, _, add = now.inputs_of(group.rank, group.device)
            received = a2a.dispatch(x, ids)
            a2a.output().fill_(float("nan"))
            groups.scatter(groups.gather(received).x)
            out = a2a.combine(add=add)
            expected = weft.reference.identity_round_trip(
                x, ids, None, a2a.placement, ranks=group.size, add=add
            )
            assert torch.equal(bits(out), bits(expected))
            synchronize(group.device)
            a2a.check()


@on_ranks(2)
def test_invalid_input_is_refused_on_the_host(group):
    with make(group) as a2a, make(group) as other:
        for options, words in (
            ({"align": 0}, "align is 0"),
            ({"align": 16, "max_rows": 40}, "max_rows is 40"),
            ({"max_rows": 0}, "max_rows is 0"),
            ({"layout": "sparse"}, "'sparse'"),
            ({"layout": "masked", "max_rows": 2**30}, "exceeds the limit"),
        ):
            refused(InvalidArgument, lambda: ExpertGroups(a2a, **options), words)  # noqa: B023
        groups = ExpertGroups(a2a)
        y = torch.zeros(groups.y_shape, dtype=a2a.dtype, device=group.device)
        foreign = other.latest_received
        refused(OutOfOrder, lambda: groups.gather(foreign), "gather outside of a round")
        received = empty_round(a2a)
        refused(InvalidArgument, lambda: groups.gather(foreign), "result of its own dispatch")
        refused(OutOfOrder, lambda: groups.scatter(y), "scatter without a gather")
        groups.gather(received)
        refused(InvalidArgument, lambda: groups.scatter(y[1:]), "y has shape")
        refused(InvalidArgument, lambda: groups.scatter(y.float()), "y has dtype")
        groups.scatter(y)
        refused(OutOfOrder, lambda: groups.scatter(y), "scatter without a gather")
        groups.gather(received)
        a2a.combine()
        empty_round(a2a)  # the rows are those of the round before
        refused(OutOfOrder, lambda: groups.scatter(y), "scatter without a gather")
        groups.close()
        groups.close()
        refused(OutOfOrder, lambda: groups.gather(received), "after close")


@on_ranks(2)
def test_memory_bytes_is_exact(group):
    with make(group) as a2a:
        for options in VARIANTS.values():
            groups = ExpertGroups(a2a, **options)  # type: ignore[arg-type]
            reported = ExpertGroups.memory_bytes(a2a, **options)  # type: ignore[arg-type]
            assert reported == groups.buffers.bytes()
            assert reported > sum(rows.nbytes for rows in groups.buffers.rows)
        assert ExpertGroups(a2a).max_rows == group.size * 150 * 3
        assert ExpertGroups(a2a, align=16).max_rows == (group.size * 450 + 5 * 15) // 16 * 16


@on_ranks(2)
def test_a_captured_round_replays_with_any_routing(group):
    with make(group) as a2a:
        received, groups = empty_round(a2a), ExpertGroups(a2a, align=16)
        y = torch.zeros(groups.y_shape, dtype=a2a.dtype, device=group.device)

        def double() -> None:
            y.copy_(groups.gather(received).x * 2)
            groups.scatter(y)

        replay = capture_body(group, double)
        for seed, counts in enumerate(([150, 3], [0, 0], [77, 150])):
            ids = random_ids(received.ids.shape, a2a.num_local_experts, seed, 0.3, 0.0)
            fill(received, ids, counts, seed)
            received.payloads[0].copy_(torch.rand(received.payloads[0].shape))
            replay()
            synchronize(group.device)
            inputs, out = host(received), a2a.output().cpu()
            total, y_of_x = torch.zeros(inputs.x.shape), (inputs.x * 2).float()
            for k in range(3):
                more = total + inputs.weights[..., k, None] * y_of_x
                total = torch.where(inputs.ids[..., k, None] >= 0, more, total)
            for source, count in enumerate(counts):
                used = (inputs.ids[source, :count] >= 0).any(dim=1)
                expected = total.bfloat16()[source, :count]
                assert torch.equal(out[source, :count][used], expected[used])
        a2a.check()
