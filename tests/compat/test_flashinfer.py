# SPDX-License-Identifier: Apache-2.0
"""flashinfer.comm's calls on weft: the documented use, right to the byte."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.compat.calls import (
    EXPERTS,
    HIDDEN,
    MAX,
    PLAIN,
    QUANTISED,
    RANKS,
    TOP_K,
    Mapping,
    experts_of,
    make,
    play,
    refused,
    routing,
    workspace_of,
)
from weft import reference
from weft.compat.flashinfer import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank
from weft.errors import InvalidArgument


def rounds(group: weft.Group) -> None:
    sizes = [((3, 1, 5), 5), ((8, 8, 8), 8), ((0, 2, 0), 2), ((0, 0, 0), 1), ((1, 6, 2), MAX)]
    for changes in ({}, {"hidden_size": None, "workspace_size_per_rank": 1 << 20}):
        with make(group, **changes) as a2a:
            for seed, (tokens, runtime_max) in enumerate(sizes):
                for way in ("in place", "copied", "in place, unsaid"):
                    for wanted in (PLAIN, QUANTISED):  # lists alternate, as layers of a model do
                        play(a2a, wanted, tokens, runtime_max, way, seed)


@pytest.mark.parametrize("kind", ["cpu", "threads"])
def test_rounds_of_uneven_sizes_are_right_to_the_byte(ranks, kind):
    ranks(RANKS, kind)(rounds)


def one_rank(group: weft.Group) -> None:
    """The documented use, with payloads of several types and ids that are no payload."""
    kinds = (torch.bfloat16, torch.float16, torch.int32, torch.uint8)
    wanted = [weft.Payload((16 * (i + 1),), kind) for i, kind in enumerate(kinds)]
    mapping = Mapping(0, 1)
    with MoeAlltoAll(mapping, 10, 2, 8, hidden_size=16, group=group) as a2a:
        sent = [torch.arange(10 * p.shape[0]).view(10, -1).to(p.dtype) for p in wanted]
        ids = torch.arange(20, dtype=torch.int32).view(10, 2) % 8
        received = a2a.dispatch(ids, sent, 10)
        assert all(torch.equal(r[0], s) for r, s in zip(received, sent, strict=True))
        y = a2a.get_combine_payload_tensor_in_workspace(10, 16, torch.bfloat16)
        y.copy_(received[0])
        assert torch.equal(a2a.combine(y, 10, payload_in_workspace=True), sent[0])


def test_payloads_of_any_type_come_back_in_order(ranks):
    ranks(1, "threads")(one_rank)


def untouched(group: weft.Group) -> None:
    """Without an id for them, ids arrive as they were sent."""
    ids, weights = routing(0, group.rank, 4)
    x = torch.ones((4, HIDDEN), dtype=torch.bfloat16)
    with make(group) as a2a:
        received = a2a.dispatch(ids, [x, ids, weights], 4, expert_id_payload_index=1)
        mine = torch.isin(ids, experts_of(group.rank)).any(dim=1)
        assert torch.equal(received[1][group.rank][mine], ids[mine])
        a2a.combine(received[0].clone(), 4)


def test_ids_stay_as_sent_when_none_is_to_be_replaced(ranks):
    ranks(RANKS, "threads")(untouched)


def statistics(group: weft.Group) -> None:
    """Every rank's numbers, in some rounds, in symmetric memory until combine."""
    local = torch.zeros(EXPERTS, dtype=torch.int32)
    with make(group) as a2a:
        assert not a2a.enable_eplb
        assert a2a.eplb_stats_num_experts == 0
        play(a2a, PLAIN)
    with make(group, eplb_stats_num_experts=EXPERTS) as a2a:
        assert a2a.enable_eplb
        assert a2a.eplb_stats_num_experts == EXPERTS
        for seed, told in enumerate((True, False, True)):
            ids, weights = routing(seed, group.rank, seed * group.rank)
            local += reference.expert_load(ids, EXPERTS)
            x = torch.ones((len(ids), HIDDEN), dtype=torch.bfloat16)
            assert a2a.eplb_gathered_stats is None
            given = local if told else None
            a2a.dispatch(ids, [x, ids, weights], MAX, eplb_local_stats=given)
            gathered = a2a.eplb_gathered_stats
            assert (gathered is not None) == told
            if gathered is not None:
                assert gathered.shape == (RANKS, EXPERTS)
                assert gathered.dtype == torch.int32
                assert gathered.tolist() == group.all_gather(local.tolist())
            group.barrier()
            a2a.combine(torch.zeros((RANKS, MAX, HIDDEN)).bfloat16(), MAX)
        assert a2a.eplb_gathered_stats is None
        # A rank that sends nothing counts as zeros.
        ids, weights = routing(9, group.rank, 1)
        x, only = torch.ones((1, HIDDEN), dtype=torch.bfloat16), group.rank == 1
        a2a.dispatch(ids, [x, ids, weights], MAX, eplb_local_stats=local + 1 if only else None)
        if a2a.eplb_gathered_stats is not None:
            zeros = [0] * EXPERTS
            assert a2a.eplb_gathered_stats.tolist() == [zeros, (local + 1).tolist(), zeros]
        a2a.combine(torch.zeros((RANKS, MAX, HIDDEN)).bfloat16(), MAX)
        for wrong, *words in ((local[1:], "[6]", "[7]"), (local.long(), "int64", "int32")):
            refused(
                InvalidArgument,
                lambda wrong=wrong: a2a.dispatch(ids, [x], 1, eplb_local_stats=wrong),  # type: ignore[misc]
                "eplb_local_stats",
                *words,
            )
        play(a2a, PLAIN)


@pytest.mark.parametrize("kind", ["cpu", "threads"])
def test_statistics_of_all_ranks_come_with_the_tokens(ranks, kind):
    ranks(RANKS, kind)(statistics)


def bytes_held(a2a: MoeAlltoAll) -> int:
    """Symmetric memory of a workspace that has made one all-to-all."""
    (operator,) = workspace_of(a2a)._operators.values()
    return operator.heap.size


def sizes(group: weft.Group) -> None:
    with make(group) as a2a:
        size = MoeAlltoAll.get_moe_workspace_size_per_rank(RANKS, TOP_K, MAX, HIDDEN)
        assert a2a.workspace_size_per_rank == size
        play(a2a, PLAIN)
        assert bytes_held(a2a) == size
        assert MoeAlltoAll.get_moe_workspace_size_per_rank(RANKS, TOP_K, MAX, HIDDEN, 16) > size
        row = HIDDEN * 2 + TOP_K * 8
        estimate = moe_a2a_get_workspace_size_per_rank(RANKS, MAX, row, HIDDEN * 2)
        assert estimate >= size
    for count in (1, 100):
        with make(group, eplb_stats_num_experts=count) as a2a:
            told = MoeAlltoAll.get_moe_workspace_size_per_rank(RANKS, TOP_K, MAX, HIDDEN, 0, count)
            assert a2a.workspace_size_per_rank == told
            play(a2a, PLAIN)
            assert bytes_held(a2a) == told
            assert told - size == -(-4 * RANKS * count // 128) * 128
            more = moe_a2a_get_workspace_size_per_rank(RANKS, MAX, row, HIDDEN * 2, count)
            assert more - estimate == told - size


def test_sizes_are_what_is_allocated(ranks):
    ranks(RANKS, "threads")(sizes)
    refused(
        InvalidArgument,
        lambda: MoeAlltoAll.get_moe_workspace_size_per_rank(3, 2, 8, 64, 0, -7),
        "eplb_stats_num_experts is -7",
    )
