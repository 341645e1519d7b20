# SPDX-License-Identifier: Apache-2.0
"""The all-to-all over several hosts: every byte as in `weft.reference`."""

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import weft
from tests import rounds
from tests.hosts.spanning import across, campaign, on_hosts, play, tamper_with_rail
from tests.rounds import Round, bits
from weft import errors, reference
from weft.hosts.buffers import RailViews

TOKENS = 8
FOUR = Round(tokens=(5, 0, 8, 2))
LESS = Round(tokens=(8, 1, 0, 4), hidden=256)
WIDE = Round(tokens=(8,) * 4, router="holes", ids_dtype=torch.int64, options={"combine": "push"})
CASES: dict[str, Round] = {
    "pull": FOUR.next(add=True),
    "push": WIDE,
    "fp8 back": LESS.next(tokens=(1, 2, 3, 7), add=True, options={"combine_dtype": "fp8"}),
    "fp8": LESS.next(options={"quantize": "fp8"}),
    "mxfp8": LESS.next(hidden=128, dtype=torch.float16, options={"quantize": "mxfp8"}),
    "nothing": Round(tokens=(0, 0, 0, 0)),
    "three hosts": Round(tokens=(3, 8, 0, 5, 1, 2), experts=13),
    "one rank a host": Round(tokens=(3, 8)),
    "ranks in turn": FOUR.next(weighted=False),
    "a host without experts": FOUR.next(experts=4, top_k=2, options={"expert_map": [1, 0, 0, 1]}),
    "experts in turn": FOUR.next(
        experts=5, dtype=torch.float32, options={"expert_map": [3, 0, 3, 1, 2]}
    ),
    "more choices than experts on a host": Round(tokens=(8,) * 4, experts=4, top_k=4),
    "halves": FOUR.next(add=True, options={"split_phase": True}),
    "counts on the device": FOUR.next(add=True),
    "statistics": FOUR.next(options={"stats": 3}),
    "rows of any width": FOUR.next(extra=(3, 40)),
}
# Where they differ from the default: the hosts, of which there are two, and how a round is played.
HOSTS: dict[str, int | list[int]] = {"three hosts": 3, "ranks in turn": [0, 1, 0, 1]}
HOW: dict[str, Any] = {"halves": {"halves": True}, "counts on the device": {"counts": [3, 0, 8, 0]}}
BY_SHAPE: dict[str, list[str]] = {}
for each, case in CASES.items():
    BY_SHAPE.setdefault(f"{len(case.tokens)} ranks, {HOSTS.get(each, 2)}", []).append(each)


def play_cases(group: weft.Group, *names: str) -> None:
    for name in names:
        case, how = CASES[name], HOW.get(name, {})
        with case.open(group, TOKENS) as a2a:
            for seed in range(3):
                rounds.play(a2a, case.next(seed=seed), **how)
            rounds.play(a2a, case, rows=max(1, *case.tokens), **how)
            a2a.check()


@across([0, 1, 1, 0])
def test_two_hosts_with_interleaved_ranks_match_the_reference(group: weft.Group) -> None:
    play_cases(group, "pull", "fp8", "halves", "statistics", "rows of any width")
    ranks = ((0, 3), (1, 2))
    assert (group.hosts, group.host_ranks) == (2, ranks)
    assert ranks[group.host][group.local.rank] == group.rank
    assert (group.local.size, group.local.hosts) == (2, 1)
    assert group.local.all_gather(group.rank) == list(ranks[group.host])


@campaign
@pytest.mark.parametrize("names", BY_SHAPE.values(), ids=list(BY_SHAPE))
def test_hosts_match_the_reference(ranks, names):
    count, hosts = len(CASES[names[0]].tokens), HOSTS.get(names[0], 2)
    ranks(count, "cpu")(on_hosts, hosts, play_cases, *names)


@campaign
@pytest.mark.parametrize("combine", ["push", "gemm_push"])
@across(2)
def test_rows_by_expert_are_combined(group: weft.Group, combine: str) -> None:
    """As on one host, except for the order of the sums."""
    case = Round(tokens=(5, 0, 8, 2), add=True)
    with case.open(group, TOKENS, combine=combine, split_phase=True) as a2a:
        groups = weft.ExpertGroups(a2a)
        for seed in range(2):
            x, ids, weights, add = case.next(seed=seed).inputs_of(group.rank, group.device)
            rows = groups.gather(a2a.dispatch(x, ids, weights))
            groups.send(rows.x.clone())
            out = a2a.combine_recv(add=add)
            wanted = reference.identity_round_trip(
                x, ids, weights, a2a.placement, ranks=4, hosts=group.host_ranks, add=add
            )
            torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
        groups.close()


@across(2)
def test_bad_ids_are_refused_where_they_were_sent(group: weft.Group) -> None:
    """An invalid id is dropped, and a repeated one is served."""
    case = Round(tokens=(2, 2, 2, 2), top_k=2, experts=4)
    x = torch.ones((2, case.hidden), dtype=torch.bfloat16)
    good = torch.tensor([[0, 1], [2, 3]])
    with case.open(group, TOKENS) as a2a:

        def call(x: torch.Tensor, ids: Any, **options: Any) -> torch.Tensor:
            ids = torch.tensor(ids) if group.rank == 0 else good
            received = a2a.dispatch(x, ids, **options)
            return a2a.combine(reference.identity_experts(received, torch.bfloat16))

        for wrong, text in (
            ([[0, 4], [2, 3]], r"^rank 0: topk_ids\[0, 1\] is 4; expert ids are 0\.\.3"),
            ([[0, 1], [-7, 1 << 40]], r"^rank 0: topk_ids\[1, 0\] is -7.*2 reports since the last"),
            ([[3, 3], [2, 0]], r"^rank 0: topk_ids\[0, 1\] repeats expert 3"),
            ([[0, 1], [1, 1]], r"^rank 0: topk_ids\[1, 1\] repeats expert 1"),
        ):
            call(x, wrong)
            with (
                pytest.raises(errors.BadExpertId, match=text) if group.rank == 0 else nullcontext()
            ):
                a2a.check()
        out = call(3 * x, [[0, 4], [-1, -1]])
        assert out.tolist() == ([[3.0] * 64, [0.0] * 64] if group.rank == 0 else [[6.0] * 64] * 2)
        call(3 * x, [[0, 1], [2, 3]], num_tokens=torch.tensor([9], dtype=torch.int32))
        with pytest.raises(
            errors.TokenOverflow, match=r"num_tokens on the device is 9; .* 0\.\.2 tokens"
        ):
            a2a.check()


@across(2)
def test_invalid_data_of_another_host_is_attributed_to_it(group: weft.Group) -> None:
    """Rank 2, on host 1, sends ids that index a table of 16 experts from either end, and counts."""
    case = Round(tokens=(3, 3, 3, 3))
    ids_of_token, counts = "topk_ids[1, 2]", "num_tokens on the device"
    lies: list[tuple[type[errors.WeftError], str, int]]
    lies = [(errors.BadExpertId, ids_of_token, wrong) for wrong in (16, -2, 1 << 30, -(1 << 31))]
    lies += [(errors.TokenOverflow, counts, wrong) for wrong in (-1, 1 << 30)]
    with case.open(group, 3) as a2a:
        play(a2a, case)
        for seed, (kind, what, wrong) in enumerate(lies):

            def tell(slots: RailViews, own: int, what: str = what, wrong: int = wrong) -> None:
                place = slots.counts[own, :1] if what == counts else slots.ids[own, 1, 2:3]
                place.fill_(wrong)

            x, ids, weights, _ = case.next(seed=seed).inputs_of(group.rank, group.device)
            with tamper_with_rail(a2a, tell) if group.rank == 2 else nullcontext():
                received = a2a.dispatch(x, ids, weights)
            assert 0 <= received.counts.min() <= received.counts.max() <= 3
            assert -1 <= received.ids.min() <= received.ids.max() < a2a.num_local_experts
            a2a.combine(reference.identity_experts(received, torch.bfloat16))
            text = rf"^rank 2: {re.escape(what)} is {wrong} \(reported by rank 0\); "
            with pytest.raises(kind, match=text) if group.rank == 0 else nullcontext():
                a2a.check()
        play(a2a, case)
        a2a.check()


@across(2)
def test_several_hosts_refuse_what_one_host_refuses(group: weft.Group) -> None:
    case = Round(tokens=(2, 2, 2, 2))
    wrong = {"expert_map": list(range(16))} if group.rank == 3 else {}
    kind: type[errors.WeftError]
    for kind, text, options in (
        (errors.InvalidArgument, "top_k is 17, but the layer has 16 experts", {"top_k": 17}),
        (errors.GeometryMismatch, "rank 2 has max_tokens=9", {"max_tokens": TOKENS + group.host}),
        (errors.CreationFailed, r"failed on rank 3 of 4: InvalidArgument: expert_map", wrong),
    ):
        with pytest.raises(kind, match=text):
            weft.AllToAll(group, **case.sizes(TOKENS) | options)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    a2a, many = case.open(group, TOKENS), [t.repeat(5, 1) for t in (x, ids)]
    calls: tuple[tuple[type[errors.WeftError], str, Any], ...] = (
        (errors.TokenOverflow, "exceed max_tokens=8", lambda: a2a.dispatch(*many)),
        (errors.OutOfOrder, "", a2a.combine),
        (errors.InvalidArgument, "rows is 9", lambda: a2a.dispatch(x, ids, weights, rows=9)),
        (errors.InvalidArgument, r"group\.local", lambda: group.exchange_fds(0)),
    )
    for kind, text, call in calls:
        with pytest.raises(kind, match=text):
            call()
    play(a2a, case)  # nothing of it was sent
    a2a.close()
    with pytest.raises(errors.OutOfOrder, match="closed"):
        a2a.dispatch(x, ids, weights)


def as_one_host(group: weft.Group) -> bytes:
    case = Round(tokens=(5, 3, 8, 2), dtype=torch.float32, seed=5)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    with case.open(group, TOKENS) as a2a:
        received = a2a.dispatch(x, ids, weights)
        out = a2a.combine(reference.identity_experts(received, torch.float32))
    return bits(out).numpy().tobytes()


@campaign
def test_one_rank_a_host_sums_as_one_host_does(ranks):
    """With one rank a host the order of hosts is that of ranks, and float32 is not rounded."""
    assert ranks(4, "cpu")(on_hosts, 4, as_one_host) == ranks(4, "cpu")(as_one_host)
