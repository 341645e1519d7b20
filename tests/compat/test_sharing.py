# SPDX-License-Identifier: Apache-2.0
"""Payload lists, workspaces that layers share, and the groups of their ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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
    Backend,
    Mapping,
    experts_of,
    held,
    make,
    play,
    refused,
    routing,
    rows,
    workspace_of,
)
from weft.compat import checks, fusion_workspace, moe_alltoall, triton_dist
from weft.compat import ranks as places
from weft.compat.flashinfer import MoeAlltoAll
from weft.compat.fusion_workspace import AllReduceFusionWorkspace
from weft.compat.triton_dist import EPLowLatencyAllToAllLayer
from weft.errors import GeometryMismatch, InvalidArgument, OutOfOrder, PeerLeft


def lists(group: weft.Group) -> None:
    """Each payload list has its own memory from its first round on, by sizes, not dtypes."""
    with make(group) as a2a:
        workspace = workspace_of(a2a)
        for seed, kinds in enumerate((PLAIN, QUANTISED, PLAIN, QUANTISED)):
            play(a2a, kinds, seed=seed)
            assert len(workspace._operators) == min(seed + 1, 2)
        # A rank without tokens may know them by another dtype of the same size.
        ids, weights = routing(7, group.rank, 2 if group.rank else 0)
        kind = torch.float8_e4m3fn if group.rank else torch.uint8
        x = torch.ones((len(ids), HIDDEN), dtype=torch.uint8).view(kind)
        scales = torch.ones((len(ids), 3), dtype=torch.uint8)
        received = a2a.dispatch(ids, [x, scales, ids, weights], 2)
        assert received[0].dtype == kind
        a2a.combine(torch.zeros((RANKS, 2, HIDDEN)).bfloat16(), 2)
        assert len(workspace._operators) == 2


def no_lists(group: weft.Group) -> None:
    """A list that is missing on a rank, or invalid, raises on all ranks, which stay usable."""
    quantised = rows(0, group.rank, 2, QUANTISED)
    ids = quantised[-2]
    with make(group) as a2a:
        mixed = quantised if group.rank else quantised[1:]
        refused(GeometryMismatch, lambda: a2a.dispatch(ids, mixed, 2), "payloads", "rank 1")
        refused(InvalidArgument, lambda: a2a.dispatch(ids, [ids] * 9, 2), "9 payload")
        play(a2a, QUANTISED)


def captured(group: weft.Group, capturing: list[bool]) -> None:
    """A capture cannot allocate memory, but can use existing memory."""
    with make(group) as a2a:
        play(a2a, PLAIN)
        group.barrier()
        capturing[0] = True
        quantised = rows(0, group.rank, 2, QUANTISED)
        call = lambda: a2a.dispatch(quantised[-2], quantised, 2)  # noqa: E731
        refused(InvalidArgument, call, "graph capture", "64, 3, 8, 8", "one such round")
        play(a2a, PLAIN, seed=1)
        group.barrier()
        capturing[0] = False
        group.barrier()
        play(a2a, QUANTISED)


def test_a_capture_makes_no_workspace(ranks, monkeypatch):
    capturing = [False]
    monkeypatch.setattr(checks, "is_capturing", lambda device: capturing[0])
    ranks(RANKS, "threads")(captured, capturing)


def other_rows(group: weft.Group) -> None:
    """Combine determines the returned rows, also if a first round was built for others."""
    ids, weights = routing(3, group.rank, 2 + group.rank)
    x = torch.ones((len(ids), HIDDEN), dtype=torch.bfloat16)
    limit, narrow, half = 2 + RANKS, HIDDEN // 2, torch.float16
    reached = [0.0] * len(ids)
    for rank in range(RANKS):
        for token, hit in enumerate(torch.isin(ids, experts_of(rank)).any(dim=1).tolist()):
            reached[token] += hit * (rank + 1)
    right = torch.tensor(reached)[:, None].expand(-1, narrow)
    for inside in (False, True):
        with make(group) as a2a:
            for _ in range(3):
                weights_seen = a2a.dispatch(ids, [x, ids, weights], limit)[2]
                own = torch.isin(ids, experts_of(group.rank)).any(dim=1)
                y = torch.full((RANKS, limit, narrow), group.rank + 1.0, dtype=half)
                if inside:
                    y = a2a.get_combine_payload_tensor_in_workspace(limit, narrow, half)
                    y.fill_(group.rank + 1.0)
                seen = weights_seen[group.rank, : len(ids)][own]
                assert torch.equal(seen, weights[own])  # also when another carrier takes y
                sent = ids.clone()
                ids.fill_(-1)  # the caller's again: combine does not read it
                out = a2a.combine(y, limit, payload_in_workspace=inside)
                ids.copy_(sent)
                assert out.dtype == half
                assert torch.equal(out.float(), right)
                assert len(workspace_of(a2a)._operators) == 1  # the guess is given back
            a2a.dispatch(ids, [x, ids, weights], limit)
            wide = torch.ones((RANKS, limit, HIDDEN), dtype=torch.bfloat16)
            words = (
                f"{HIDDEN}, dtype torch.bfloat16",
                f"[{narrow}] torch.float16",
                "another MoeAlltoAll",
            )
            refused(InvalidArgument, lambda wide=wide: a2a.combine(wide, limit), *words)  # type: ignore[misc]
            a2a.combine(y.clone(), limit)


def low_precision(group: weft.Group) -> None:
    """FP8 rows of numbers that FP8 holds with a power of two as scale return exactly."""
    ids = torch.tensor([[0, 3], [5, -1]], dtype=torch.int32)
    hidden = 128
    x, weights = torch.ones((2, hidden), dtype=torch.bfloat16), torch.ones((2, TOP_K))
    with make(group, hidden_size=None, workspace_size_per_rank=99) as a2a:
        for inside in (True, False, True):
            a2a.dispatch(ids, [x, ids, weights], 2)
            y = torch.empty((RANKS, 2, hidden), dtype=torch.bfloat16)
            if inside:
                y = a2a.get_combine_payload_tensor_in_workspace(2, hidden, torch.bfloat16)
            y.copy_(torch.tensor([448.0, 224.0]).repeat(hidden // 2))
            out = a2a.combine(y, 2, payload_in_workspace=inside, use_low_precision=True)
            assert out.dtype == torch.bfloat16
            assert torch.equal(out, torch.stack([2 * y[0, 0], y[0, 0]]))
        # What FP8 cannot hold is rounded.
        a2a.dispatch(ids, [x, ids, weights], 2)
        y = torch.randn((RANKS, 2, hidden)).bfloat16()
        out = a2a.combine(y, 2, use_low_precision=True)
        assert not torch.equal(out[1], y[2, 1])


def leave_open_round(group: weft.Group) -> None:
    """An object that dispatches and never combines leaves no open round to others."""
    a2a, other = make(group), make(group)
    play(other, PLAIN)
    for seed, closes in enumerate((True, False, True, False)):
        sent = rows(seed, group.rank, 1, PLAIN)
        a2a.dispatch(sent[-2], sent, 1)
        if closes:
            a2a.close()
        del a2a
        gc.collect()
        play(other, PLAIN, seed=seed)
        a2a = make(group)
        play(a2a, PLAIN, seed=seed)
    other.close()
    a2a.close()


def leave_mid_round(group: weft.Group) -> None:
    """A rank leaves between dispatch and combine: the peer raises before the deadline."""
    patient = {"timeout": 600.0, "first_timeout": 600.0}
    a2a, other = make(group, **patient), make(group, **patient)
    play(other, PLAIN)
    sent = rows(0, group.rank, 1, PLAIN)
    y = a2a.dispatch(sent[-2], sent, 1)[0].clone()
    if group.rank == 1:
        a2a.close()
    else:
        refused(PeerLeft, lambda: a2a.combine(y, 1), "rank 1 closed its all-to-all")
        a2a.close()  # a broken all-to-all stays, so that those that share it get the reason
        refused(PeerLeft, lambda: other.dispatch(sent[-2], sent, 1), "rank 1 closed")
    group.barrier()


def layers(group: weft.Group) -> None:
    """Layers of equal sizes share one workspace."""
    first, second = make(group), make(group)
    assert workspace_of(first) is workspace_of(second)
    ids, weights = routing(0, group.rank, 2)
    plain = [torch.ones((2, HIDDEN), dtype=torch.bfloat16), ids, weights]
    y = torch.zeros((RANKS, 2, HIDDEN), dtype=torch.bfloat16)
    first.dispatch(ids, plain, 2)
    refused(OutOfOrder, lambda: second.dispatch(ids, plain, 2), "2 tokens are dispatched")
    refused(OutOfOrder, lambda: second.combine(y, 2), "without a dispatch")
    first.combine(y, 2)
    play(second, PLAIN)
    first.close()
    first.close()
    refused(OutOfOrder, lambda: first.dispatch(ids, plain, 2), "closed")
    play(second, PLAIN)
    third, fourth = make(group), make(group)
    play(third, QUANTISED)
    play(fourth, QUANTISED)
    assert workspace_of(third) is workspace_of(fourth) is workspace_of(second)
    play(second, PLAIN)
    assert len([each for each in held() if each.group is group]) == 1
    for a2a in (second, third, fourth):
        a2a.close()


def meeting(group: weft.Group) -> None:
    """The ranks meet through the backend of the configuration."""
    place, wrong = Mapping(group.rank, group.size), Mapping(group.rank, group.size + 1)
    configs = [SimpleNamespace(comm_backend=Backend(group)) for _ in range(2)]
    first, second = (
        MoeAlltoAll(place, MAX, TOP_K, EXPERTS, hidden_size=HIDDEN, mnnvl_config=config)
        for config in configs
    )
    assert first.group is second.group
    assert first.group is not group
    play(first, PLAIN)
    first.close()
    assert second.group.all_gather(group.rank) == list(range(RANKS))
    second.close()
    sizes: dict[str, Any] = {"max_num_tokens": MAX, "top_k": TOP_K, "num_experts": EXPERTS}
    sizes["hidden_size"] = HIDDEN
    refused(
        InvalidArgument,
        lambda: MoeAlltoAll(wrong, **sizes, mnnvl_config=configs[0]),
        *(f"of {RANKS + 1}", f"comm_backend is rank {group.rank} of {RANKS}", "from_torch"),
    )
    words = f"group is rank {group.rank} of {RANKS}"
    refused(InvalidArgument, lambda: MoeAlltoAll(wrong, **sizes, group=group), words)


@pytest.mark.parametrize(
    "body",
    [
        lists,
        no_lists,
        other_rows,
        low_precision,
        leave_open_round,
        layers,
        meeting,
    ],
)
def test_three_ranks(ranks, body):
    ranks(RANKS, "threads")(body)
    assert not held()
    assert not places._shared_groups


def test_ranks_name_the_rank_that_left_a_round(ranks):
    ranks(RANKS, "threads")(leave_mid_round)


def from_torch(group: weft.Group) -> None:
    group.process_group()
    mapping = Mapping(group.rank, group.size)
    with MoeAlltoAll(mapping, MAX, TOP_K, EXPERTS, hidden_size=HIDDEN) as a2a:
        assert a2a.group is not group
        play(a2a, PLAIN)
    if group.rank == 0:  # alone: it waits for no rank
        wrong = Mapping(0, 2)
        refused(
            InvalidArgument,
            lambda: MoeAlltoAll(wrong, MAX, TOP_K, EXPERTS, hidden_size=HIDDEN),
            "0 of 2",
            "the world of torch.distributed",
        )
        refused(
            InvalidArgument,
            lambda: AllReduceFusionWorkspace(2, 1, MAX, HIDDEN, group=group.process_group()),
            "1 of 2",
            f"group is rank 0 of {RANKS}",
        )
    group.barrier()


def test_the_default_group_is_torch_distributeds(ranks):
    ranks(RANKS, "cpu")(from_torch)


def test_without_torch_distributed_a_group_is_required():
    with pytest.raises(InvalidArgument, match="torch.distributed is not initialised: call init_pr"):
        places.lease_group(0, 3)
    assert not places._shared_groups


def test_one_rank_needs_no_group():
    with MoeAlltoAll(Mapping(0, 1), MAX, TOP_K, EXPERTS, hidden_size=HIDDEN) as a2a:
        assert a2a.group.size == 1
    assert not places._shared_groups


CONSTRUCTORS: dict[Any, Callable[[], object]] = {
    moe_alltoall: lambda: MoeAlltoAll(Mapping(0, 1), MAX, TOP_K, EXPERTS, hidden_size=HIDDEN),
    triton_dist: lambda: EPLowLatencyAllToAllLayer(MAX, HIDDEN, TOP_K, True, 0, EXPERTS, 1, 1),
    fusion_workspace: lambda: AllReduceFusionWorkspace(1, 0, MAX, HIDDEN),
}


@pytest.mark.parametrize("module", CONSTRUCTORS)
def test_a_constructor_that_fails_keeps_no_group(module, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no operator today")

    for name in {"lease", "LowLatencyAllToAll", "AllReduce"} & set(vars(module)):
        monkeypatch.setattr(module, name, fail)
    with pytest.raises(MemoryError, match="no operator today"):
        CONSTRUCTORS[module]()
    assert not places._shared_groups
