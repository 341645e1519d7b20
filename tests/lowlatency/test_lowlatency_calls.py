# SPDX-License-Identifier: Apache-2.0
"""Calls of a low-latency all-to-all: allowed orders, refusals and their texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import weft
from tests.kinds import ANY, THREADS, on_ranks
from tests.lowlatency_rounds import Mode, expert_results
from tests.rounds import Round, synchronize
from weft.errors import (
    GeometryMismatch,
    InvalidArgument,
    OutOfOrder,
    TokenOverflow,
)
from weft.lowlatency.operator import LowLatencyAllToAll

SIZES = {"max_tokens": 16, "hidden": 128, "top_k": 4, "num_experts": 16}


def make(group: weft.Group, **options: object) -> LowLatencyAllToAll:
    return LowLatencyAllToAll(group, **{**SIZES, **options})  # type: ignore[arg-type]


def inputs(group: weft.Group, tokens: int = 3) -> tuple[torch.Tensor, ...]:
    return Round((tokens,) * group.size, hidden=128).inputs_of(group.rank, group.device)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hidden": 100}, "hidden is 100; it must be a multiple of 128"),
        ({"hidden": 144, "group_size": 32}, "hidden is 144; it must be a multiple of 32"),
        ({"hidden": 96, "group_size": 32, "combine_dtype": "fp8"}, "a multiple of 128"),
        ({"top_k": 17}, "top_k is 17, but the layer has 16 experts"),
        ({"combine": "gemm_push"}, "use reduce='receiver' and slots=1"),
        ({"combine": "gemm_push", "slots": 1, "reduce": "sender"}, "reduce 'sender'"),
        ({"combine": "gemm_push", "slots": 1, "split_phase": True}, "leave split_phase out"),
        ({"expert_map": [0]}, "expert_map has 1 entries"),
        (
            {"num_experts": 3000, "top_k": 1, "expert_map": [0] * 3000},
            "3000 experts on one rank exceed the limit of 1024",
        ),
    ],
)
def test_invalid_sizes_are_refused(ranks, options, text):
    def body(group: weft.Group) -> None:
        with pytest.raises(InvalidArgument, match=text.replace("[", r"\[")):
            make(group, **options)

    ranks(1, "threads")(body)


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("slots", (1, 2), r"slots=\d"),
        (
            "reduce",
            (None, "receiver"),
            "rank 0 has reduce='sender' and rank 1 has reduce='receiver'",
        ),
    ],
)
def test_ranks_that_differ_raise_with_both_values(ranks, name, values, text):
    def body(group: weft.Group) -> None:
        with pytest.raises(GeometryMismatch, match=text):
            make(group, **{name: values[group.rank]})

    ranks(2, "threads")(body)


@on_ranks(2)
def test_wrong_tensors_are_refused_before_anything_is_sent(group):
    x, ids, weights, _ = inputs(group)
    with make(group, combine="gemm_push", slots=1) as pushed:
        assert pushed.reduce == "receiver"
    with make(group) as a2a:
        assert a2a.reduce == "sender"
        wrong: list[tuple[Callable[[], object], str]] = [
            (lambda: a2a.dispatch(x[:2], ids, weights), r"x has shape \[2, 128\]"),
            (lambda: a2a.dispatch(x, ids), "pass topk_weights to dispatch, or .*='receiver'"),
            (lambda: a2a.dispatch_send(x, ids), "split_phase=True"),
            (lambda: a2a.dump_trace("trace.json"), "profile=True"),
        ]
        for call, text in wrong:
            with pytest.raises(InvalidArgument, match=text):
                call()
        big, many, _, _ = inputs(group, 17)
        with pytest.raises(TokenOverflow, match="17 tokens in one call"):
            a2a.dispatch(big, many)
        got = a2a.dispatch(x, ids, weights)
        y = expert_results(a2a, got)
        combines: list[tuple[Callable[[], object], str]] = [
            (lambda: a2a.combine(y, ids[:2], None, got.handle), "topk_ids has 2 rows"),
            (lambda: a2a.combine(y, ids, None, got.handle), "the same tensor to both"),
            (lambda: a2a.combine(y, ids, weights.clone(), got.handle), "the same tensor to both"),
            (lambda: a2a.combine_send(y, ids, weights, got.handle), "split_phase=True"),
        ]
        for call, text in combines:
            with pytest.raises(InvalidArgument, match=text):
                call()
        a2a.combine(y, ids, weights, got.handle)  # nothing of the above has reached a peer
        got = a2a.dispatch(x, ids, weights)
        weights.mul_(2)
        with pytest.raises(InvalidArgument, match="modified between dispatch and combine"):
            a2a.combine(expert_results(a2a, got), ids, weights, got.handle)
    with pytest.raises(OutOfOrder, match="was closed"):
        a2a.dispatch(x, ids, weights)


@on_ranks(2)
def test_calls_out_of_order_are_refused(group):
    x, ids, weights, _ = inputs(group)
    with make(group, split_phase=True) as a2a:
        for call, text in (
            (a2a.dispatch_recv, "without a dispatch_send"),
            (a2a.combine_recv, "without a combine_send"),
        ):
            with pytest.raises(OutOfOrder, match=text):
                call()
        early = a2a.dispatch_send(x, ids, weights)[0].handle
        with pytest.raises(OutOfOrder, match="dispatch 1 is in flight"):
            a2a.dispatch(x, ids, weights)
        y = torch.zeros_like(a2a.result_buffers[0].x, dtype=x.dtype)
        with pytest.raises(OutOfOrder, match="it has not been received"):
            a2a.combine(y, ids, weights, early)
        first = a2a.dispatch_recv()
        second = a2a.dispatch(x, ids, weights)
        with pytest.raises(OutOfOrder, match="2 results are alive, the oldest of dispatch 1"):
            a2a.dispatch(x, ids, weights)
        a2a.combine_send(y, ids, weights, first.handle)
        with pytest.raises(OutOfOrder, match="the combine of dispatch 1 is in flight"):
            a2a.combine(y, ids, weights, second.handle)
        a2a.combine_recv()
        with pytest.raises(OutOfOrder, match="dispatch 1: it is not alive"):
            a2a.combine(y, ids, weights, first.handle)
        a2a.combine(y, ids, weights, second.handle)
        a2a.check()


@on_ranks(2, [THREADS])
def test_a_handle_of_another_all_to_all_is_refused(group):
    """The first dispatches of two layers have equal numbers; each needs its own object."""
    x, ids, weights, _ = inputs(group)
    with make(group) as one, make(group) as other:
        own, theirs = one.dispatch(x, ids, weights), other.dispatch(x, ids, weights)
        assert own.handle == theirs.handle
        y = expert_results(one, own)
        with pytest.raises(OutOfOrder, match="by the all-to-all that created it"):
            one.combine(y, ids, weights, theirs.handle)
        one.combine(y, ids, weights, own.handle)
        other.combine(y, ids, weights, theirs.handle)


def combined_in_any_order(group: weft.Group) -> list[int]:
    """A live result keeps its own slot only."""
    x, ids, weights, _ = inputs(group)
    with make(group) as a2a:
        kept = a2a.dispatch(x, ids, weights)
        counts, rows = kept.counts.tolist(), kept.x.view(torch.uint8).clone()
        slots = []
        for _ in range(3):
            got = a2a.dispatch(-x, ids.flip(0), weights)
            slots.append(got.handle.slot)
            a2a.combine(expert_results(a2a, got), ids.flip(0), weights, got.handle)
        assert kept.counts.tolist() == counts
        assert torch.equal(kept.x.view(torch.uint8), rows)
        a2a.combine(expert_results(a2a, kept), ids, weights, kept.handle)
        a2a.check()
        return slots


@pytest.mark.parametrize("kind", ANY)
def test_results_may_be_combined_in_any_order(ranks, kind):
    assert ranks(2, kind)(combined_in_any_order) == [[1, 1, 1]] * 2


def combine_crossed(group: weft.Group, split_phase: bool) -> str:
    """Rank 1 combines its two results in reverse order."""
    x, ids, weights, _ = inputs(group)
    with make(group, split_phase=split_phase) as a2a:
        both = [a2a.dispatch(x, ids, weights), a2a.dispatch(x, ids, weights)]
        got = both[group.rank]
        y = expert_results(a2a, got)
        try:
            if split_phase:
                a2a.combine_send(y, ids, weights, got.handle)[1]()
            else:
                a2a.combine(y, ids, weights, got.handle)
            synchronize(group.device)
            a2a.check()
        except GeometryMismatch as error:
            return str(error)
        finally:
            group.barrier()
        return ""


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("split_phase", [False, True])
def test_ranks_that_combine_different_results_raise(ranks, kind, split_phase):
    reported = ranks(2, kind)(combine_crossed, split_phase)
    assert (
        "rank 0, combine: rank 1 combined result 2 of those alive, this rank result 1"
        in reported[0]
    )
    assert (
        "rank 1, combine: rank 0 combined result 1 of those alive, this rank result 2"
        in reported[1]
    )


@on_ranks(2)
def test_ranks_need_not_have_counted_the_same_dispatches(group):
    """One rank's graph replayed a dispatch that its host did not count; the other's host did."""
    x, ids, weights, _ = inputs(group)
    with make(group) as a2a:
        got = a2a.dispatch(x, ids, weights)
        expected = a2a.combine(expert_results(a2a, got), ids, weights, got.handle)
        a2a._number -= group.rank
        got = a2a.dispatch(x, ids, weights)
        again = a2a.combine(expert_results(a2a, got), ids, weights, got.handle)
        synchronize(group.device)
        a2a.check()
        assert torch.equal(again, expected)


def results_of_modes(group: weft.Group) -> list[list[int]]:
    strides = []
    for mode in (Mode(), Mode(scale="fp32_col"), Mode(scale="ue8m0")):
        case = Round((5,) * group.size, hidden=256)
        with mode.make(group, case, 5) as a2a:
            x, ids, weights, _ = case.inputs_of(group.rank, group.device)
            got = a2a.dispatch(x, ids, weights)
            assert got.scales is not None
            strides.append(list(got.scales.stride()))
            a2a.combine(expert_results(a2a, got), ids, weights, got.handle)
    return strides


def test_scales_are_laid_out_for_grouped_gemms(ranks):
    # Two ranks of 5 tokens: 10 rows, padded to 12 in columns.
    assert ranks(2, "threads")(results_of_modes)[0] == [[20, 2, 1], [24, 1, 12], [12, 1, 12]]
