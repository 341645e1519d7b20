# SPDX-License-Identifier: Apache-2.0
"""flashinfer.comm's all-to-all: rounds exact to the byte, as documented and as engines call it."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import (
    EXPERTS,
    HIDDEN,
    MAX,
    MXFP8,
    NVFP4,
    PLAIN,
    QUANTISED,
    RANKS,
    TOP_K,
    Backend,
    Mapping,
    experts_of,
    held,
    make,
    play,
    refused,
    routing,
    workspace_of,
)
from weft import reference
from weft.compat.flashinfer import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank
from weft.errors import InvalidArgument

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def rounds(group: weft.Group) -> None:
    sizes = [((3, 1, 5), 5), ((8, 8, 8), 8), ((0, 2, 0), 2), ((0, 0, 0), 1), ((1, 6, 2), MAX)]
    for changes in ({}, {"hidden_size": None, "workspace_size_per_rank": 1 << 20}):
        with make(group, **changes) as a2a:
            for seed, (tokens, runtime_max) in enumerate(sizes):
                for way in ("in place", "copied", "in place, unsaid"):
                    for kinds in (PLAIN, QUANTISED):  # lists alternate, as layers of a model do
                        play(a2a, kinds, tokens, runtime_max, way, seed)


# Layers of one model: what each dispatches, and the tokens of each rank.
LAYERS = [(MXFP8, (2, 0, 3)), (PLAIN, (2, 0, 3)), (NVFP4, (5, 8, 1)), (MXFP8, (0, 0, 1))]


def as_engines(group: weft.Group, padding: int = 0) -> MoeAlltoAll:
    """Construct the object as SGLang 0.5.17, 0.5.23 and vLLM do."""
    size = moe_a2a_get_workspace_size_per_rank(
        ep_size=RANKS,
        max_num_tokens=MAX,
        total_dispatch_payload_size_per_token=HIDDEN * 2 + TOP_K * 4 + TOP_K * 4,
        combine_payload_size_per_token=HIDDEN * 2,
    )
    return MoeAlltoAll(
        mapping=Mapping(group.rank, group.size),
        max_num_tokens=MAX,
        top_k=TOP_K,
        num_experts=EXPERTS,
        workspace_size_per_rank=size + padding,
        mnnvl_config=SimpleNamespace(comm_backend=Backend(group)),
    )


def sglang(group: weft.Group) -> None:
    """Make the calls of SGLang: one object per layer, and in 0.5.23 a larger one for prefill."""
    a2as = [as_engines(group) for _ in LAYERS]
    prefill = as_engines(group, padding=2 * 128)
    for step in range(3):
        for layer, (a2a, (kinds, tokens)) in enumerate(zip(a2as, LAYERS, strict=True)):
            own: dict[str, Any] = {"way": "copied", "invalid": -1} if layer % 2 else {}
            own = {"way": "in place", "seed": 10 * step + layer, **own}
            play(a2a, kinds, tokens, max(tokens), **own)
    # A round of decode may be open while prefill has its own.
    ids, weights = (t.to(group.device) for t in routing(0, group.rank, 2))
    x = torch.ones((2, HIDDEN), dtype=torch.bfloat16, device=group.device)
    a2as[0].dispatch(ids, [x, ids, weights], 2)
    play(prefill, PLAIN, (8, 8, 8), 8, invalid=-1)
    a2as[0].combine(torch.zeros((RANKS, 2, HIDDEN), dtype=x.dtype, device=x.device), 2)
    for a2a in (*a2as, prefill):
        a2a.check()
        a2a.close()


def vllm(group: weft.Group) -> None:
    """Make the calls of vLLM: one object for all layers, replaced if a later layer needs more."""
    for padding in (0, 4096):
        a2a = as_engines(group, padding)
        group.barrier()
        for seed, (kinds, tokens) in enumerate(LAYERS):
            play(a2a, kinds, tokens, max(tokens), seed=seed, invalid=-1)
        if padding:
            a2a.close()
        del a2a


def untouched(group: weft.Group) -> None:
    """Without an invalid_token_expert_id, ids arrive as sent."""
    ids, weights = routing(0, group.rank, 4)
    x = torch.ones((4, HIDDEN), dtype=torch.bfloat16)
    with make(group) as a2a:
        received = a2a.dispatch(ids, [x, ids, weights], 4, expert_id_payload_index=1)
        own = torch.isin(ids, experts_of(group.rank)).any(dim=1)
        assert torch.equal(received[1][group.rank][own], ids[own])
        a2a.combine(received[0].clone(), 4)


def statistics(group: weft.Group) -> None:
    """Gather every rank's numbers in some rounds, in symmetric memory until combine."""
    local = torch.zeros(EXPERTS, dtype=torch.int32)
    with make(group) as a2a:
        assert not a2a.enable_eplb
        assert a2a.eplb_stats_num_experts == 0
        play(a2a, PLAIN)
    with make(group, eplb_stats_num_experts=EXPERTS) as a2a:
        assert a2a.enable_eplb
        assert a2a.eplb_stats_num_experts == EXPERTS
        for seed, gathers in enumerate((True, False, True)):
            ids, weights = routing(seed, group.rank, seed * group.rank)
            local += reference.expert_load(ids, EXPERTS)
            x = torch.ones((len(ids), HIDDEN), dtype=torch.bfloat16)
            assert a2a.eplb_gathered_stats is None
            inputs = local if gathers else None
            a2a.dispatch(ids, [x, ids, weights], MAX, eplb_local_stats=inputs)
            gathered = a2a.eplb_gathered_stats
            assert (gathered is not None) == gathers
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


def bytes_held(a2a: MoeAlltoAll) -> int:
    """Return the symmetric memory of a workspace that has made one all-to-all."""
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


@pytest.mark.parametrize("body", [rounds, sglang, vllm])
@pytest.mark.parametrize("kind", ["cpu", "threads", CUDA])
def test_rounds_are_right_to_the_byte(ranks, kind, body):
    ranks(RANKS, kind)(body)
    gc.collect()
    assert not held()


@pytest.mark.parametrize("body", [untouched, statistics, sizes])
def test_three_ranks(ranks, body):
    ranks(RANKS, "threads")(body)
