"""Payload lists, workspaces that layers share, and the groups that are found for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
    make,
    play,
    refused,
    routing,
    rows,
    workspace_of,
)
from weft.compat import flashinfer, leases
from weft.compat import ranks as places
from weft.compat.flashinfer import MoeAlltoAll
from weft.errors import GeometryMismatch, InvalidArgument, OutOfOrder


def lists(group: weft.Group) -> None:
    quantised, plain = rows(0, group.rank, 2, QUANTISED), rows(0, group.rank, 2, PLAIN)
    ids = plain[-2]
    with make(group) as a2a:
        before = workspace_of(a2a)
        play(a2a, QUANTISED)
        assert workspace_of(a2a) is not before
        assert workspace_of(a2a).terms.payloads == QUANTISED
        refused(InvalidArgument, lambda: a2a.dispatch(ids, plain, 2), "[64] torch.bfloat16", "each")
        play(a2a, QUANTISED, seed=1)
    with make(group, payloads=QUANTISED) as a2a:
        refused(InvalidArgument, lambda: a2a.dispatch(ids, plain, 2), "float8_e4m3fn", "payloads=")
    with make(group) as a2a:
        play(a2a, PLAIN)
        refused(InvalidArgument, lambda: a2a.dispatch(ids, quantised, 2), "was built for")


def no_lists(group: weft.Group) -> None:
    """A list that not all ranks bring, or that cannot be: all ranks raise."""
    quantised = rows(0, group.rank, 2, QUANTISED)
    ids = quantised[-2]
    with make(group) as a2a:
        mixed = quantised if group.rank else quantised[1:]
        refused(GeometryMismatch, lambda: a2a.dispatch(ids, mixed, 2), "payloads", "rank 1")
        refused(OutOfOrder, lambda: a2a.dispatch(ids, quantised, 2), "closed")
    with make(group) as a2a:
        refused(InvalidArgument, lambda: a2a.dispatch(ids, [ids] * 9, 2), "9 payload")


def test_a_payload_list_that_fails_fails_on_every_rank(ranks):
    ranks(RANKS, "threads")(no_lists)
    assert not leases._shared


def test_the_first_dispatch_settles_the_payload_list(ranks):
    ranks(RANKS, "threads")(lists)


def captured(group: weft.Group) -> None:
    """A capture cannot make memory; it goes on with the list that is there."""
    quantised = rows(0, group.rank, 2, QUANTISED)
    with make(group) as a2a:
        call = lambda: a2a.dispatch(quantised[-2], quantised, 2)  # noqa: E731
        refused(InvalidArgument, call, "graph capture", "payloads=")
        play(a2a, PLAIN)


def test_a_capture_makes_no_workspace(ranks, monkeypatch):
    monkeypatch.setattr(flashinfer, "capturing", lambda device: True)
    ranks(RANKS, "threads")(captured)


def layers(group: weft.Group) -> None:
    first, second = make(group), make(group)
    assert workspace_of(first) is workspace_of(second)
    ids, weights = routing(0, group.rank, 2)
    plain = [torch.ones((2, HIDDEN), dtype=torch.bfloat16), ids, weights]
    y = torch.zeros((RANKS, 2, HIDDEN), dtype=torch.bfloat16)
    first.dispatch(ids, plain, 2)
    refused(OutOfOrder, lambda: second.dispatch(ids, plain, 2), "2 tokens are away")
    refused(OutOfOrder, lambda: second.combine(y, 2), "without a dispatch")
    first.combine(y, 2)
    play(second, PLAIN)
    first.close()
    first.close()
    refused(OutOfOrder, lambda: first.workspace_size_per_rank, "closed")
    play(second, PLAIN)
    third, fourth = make(group), make(group)
    play(third, QUANTISED)
    play(fourth, QUANTISED)
    assert workspace_of(third) is workspace_of(fourth)
    play(second, PLAIN)
    assert len([terms for terms in leases._shared if terms.group is group]) == 2
    for a2a in (second, third, fourth):
        a2a.close()


def test_layers_of_equal_sizes_share_one_workspace(ranks):
    ranks(RANKS, "threads")(layers)
    assert not leases._shared


class Backend:
    """A communication backend over a group's control messages."""

    def __init__(self, group: weft.Group) -> None:
        self.group = group

    def Get_rank(self) -> int:
        return self.group.rank

    def Get_size(self) -> int:
        return self.group.size

    def allgather(self, data: Any) -> list[Any]:
        return self.group.all_gather(data)


def meeting(group: weft.Group) -> None:
    mapping, sizes = Mapping(group.rank, group.size), (MAX, TOP_K, EXPERTS)
    config = SimpleNamespace(comm_backend=Backend(group))
    first = MoeAlltoAll(mapping, *sizes, hidden_size=HIDDEN, mnnvl_config=config)
    again = SimpleNamespace(comm_backend=Backend(group))
    second = MoeAlltoAll(mapping, *sizes, hidden_size=HIDDEN, mnnvl_config=again)
    assert first.group is second.group
    assert first.group is not group
    play(first, PLAIN)
    first.close()
    assert second.group.all_gather(group.rank) == list(range(RANKS))
    second.close()
    wrong = Mapping(group.rank, group.size + 1)
    refused(
        InvalidArgument,
        lambda: MoeAlltoAll(wrong, *sizes, hidden_size=HIDDEN, mnnvl_config=config),
        f"of {RANKS + 1}",
        f"comm_backend is rank {group.rank} of {RANKS}",
        "from_torch",
    )
    refused(
        InvalidArgument,
        lambda: MoeAlltoAll(wrong, *sizes, hidden_size=HIDDEN, group=group),
        f"group is rank {group.rank} of {RANKS}",
    )


def test_a_backend_in_the_configuration_is_how_ranks_meet(ranks):
    ranks(RANKS, "threads")(meeting)
    assert not places._made


def from_torch(group: weft.Group) -> None:
    group.process_group()
    mapping = Mapping(group.rank, group.size)
    with MoeAlltoAll(mapping, MAX, TOP_K, EXPERTS, hidden_size=HIDDEN) as a2a:
        assert a2a.group is not group
        play(a2a, PLAIN)
    wrong = Mapping(0, 2)
    refused(
        InvalidArgument,
        lambda: MoeAlltoAll(wrong, MAX, TOP_K, EXPERTS, hidden_size=HIDDEN),
        "0 of 2",
        "torch.distributed",
    )


def test_without_a_group_it_is_that_of_torch_distributed(ranks):
    ranks(RANKS, "cpu")(from_torch)


def test_without_torch_distributed_it_is_that_of_the_environment(monkeypatch):
    made = SimpleNamespace(rank=0, size=3, closed=False)
    made.close = lambda: setattr(made, "closed", True)
    monkeypatch.setattr(weft.Group, "from_env", lambda timeout: made)
    group = places.lease_group(Mapping(0, 3), None, None)
    assert group is made  # type: ignore[comparison-overlap]
    places.release_group(group)
    assert made.closed
    made.closed = False
    refused(InvalidArgument, lambda: places.lease_group(Mapping(1, 2), None, None), "1 of 2")
    assert made.closed


def test_one_rank_needs_no_group():
    with MoeAlltoAll(Mapping(0, 1), MAX, TOP_K, EXPERTS, hidden_size=HIDDEN) as a2a:
        assert a2a.group.size == 1
    assert not places._made
