# SPDX-License-Identifier: Apache-2.0
"""Results that one kernel sums and sends have the bits of scatter."""

import contextlib
from functools import partial

import pytest
import torch

import weft
from tests.compat.calls import refused
from tests.faults import COMBINE_ENTER, JITTER, STAY_AWAY, plan_fault
from tests.groups import random_ids
from tests.patience import hurry
from tests.ranks import ANY, on_ranks
from tests.rounds import Round, bits, combine_options, synchronize
from tests.sending import (
    make,
    results,
    return_by_scatter,
    return_by_send,
    return_by_store,
    round_trip,
)
from weft.errors import InvalidArgument, OutOfOrder, PeerTimeout, TokenOverflow
from weft.grouping.operator import ExpertGroups

GROUPS: dict[str, dict[str, object]] = {
    "contiguous": {"align": 16},
    "masked": {"layout": "masked"},
    "too few rows": {"max_rows": 24},
    "too few masked rows": {"layout": "masked", "max_rows": 2},
}
# Three shapes: of each, rounds that differ in what nothing is compiled for. The first, which is
# compiled for every layout, has as many experts on each rank; of the others some ranks have more.
BF16 = Round(tokens=(16, 5, 0), experts=15, hidden=640, add=True)
ROUNDS = (
    BF16.next(router="holes"),
    BF16.next(router="one-hot", tokens=(7, 1, 16)),
    BF16.next(tokens=(0, 0, 0), add=False),
)
HALF = Round(tokens=(16, 16, 16), top_k=16, experts=40, hidden=1152, dtype=torch.float16, add=True)
OTHERS = (
    (HALF, "contiguous"),
    (Round(tokens=(3, 16, 9), top_k=1, hidden=7168, dtype=torch.float32), "masked"),
    (Round(tokens=(9, 16, 0), hidden=264), "contiguous"),  # no multiple of a warp's width
    (BF16.next(experts=16, options={"expert_map": [2, 0, 0, 1] * 4}), "contiguous"),
    # A rank without experts has nothing to send, and reports so.
    (BF16.next(experts=16, options={"expert_map": [0, 2] * 8}), "contiguous"),
)


def same_bits(group, way, rounds, layouts, options):
    """Compare rounds of one shape that are sent with those of another all-to-all that scatters."""
    returns = {"sent": return_by_send}
    if way == "choices" and group.device.type == "cpu":
        returns["stored"] = return_by_store
    beside = "fp8" if way == "fp8" else "pull"
    with (
        make(group, rounds[0], **combine_options(way), **options) as a2a,
        make(group, rounds[0], **combine_options(beside), **options) as plain,
    ):
        for layout in layouts:
            option = GROUPS[layout]
            groups, others = ExpertGroups(a2a, **option), ExpertGroups(plain, **option)  # type: ignore[arg-type]
            for seed, case in enumerate(rounds):
                now = case.next(seed=seed, tokens=case.tokens[seed:] + case.tokens[:seed])
                expected = round_trip(plain, others, now, return_by_scatter)
                for name, give_back in returns.items():
                    got = round_trip(a2a, groups, now, give_back)
                    assert torch.equal(bits(got), bits(expected)), (now, layout, name)
            groups.close()
            others.close()
            synchronize(group.device)
            same_refusals(a2a, plain)


def same_refusals(*exchanges: weft.AllToAll) -> None:
    """Missing rows are reported on both or on neither."""
    texts = []
    for a2a in exchanges:
        texts.append("")
        try:
            a2a.check()
        except TokenOverflow as error:
            texts[-1] = str(error).split(" (")[0]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("way", ["push", "fp8", "choices"])
def test_sums_that_are_sent_have_the_bits_of_scatter(ranks, kind, way):
    ranks(3, kind)(same_bits, way, ROUNDS, list(GROUPS), {})
    for case, layout in OTHERS:
        if way != "fp8" or case.hidden % 128 == 0:
            ranks(3, kind)(same_bits, way, (case,), [layout], dict(case.options))


@on_ranks(2)
def test_a_send_is_in_the_timeline(group):
    """A send appears as the first half of a combine."""
    case = Round(tokens=(4, 9), hidden=512)
    with make(group, case, combine="push", profile=True) as a2a:
        round_trip(a2a, ExpertGroups(a2a), case, return_by_send)
        synchronize(group.device)
        (span,) = (s for s in a2a.timeline() if s.phase == "combine")
        assert span.start_ns <= span.sent_ns <= span.published_ns <= span.end_ns


@on_ranks(2)
def test_invalid_input_is_refused_on_the_host(group):
    case = Round(tokens=(4, 4), hidden=512)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    for options, words in (
        ({"combine": "pull"}, "combine='push' or 'gemm_push'"),
        ({"combine": "push", "split_phase": False}, "split_phase=True"),
    ):
        with make(group, case, **options) as a2a:
            groups = ExpertGroups(a2a)
            grouped = groups.gather(a2a.dispatch(x, ids, weights))
            refused(InvalidArgument, partial(groups.send, grouped.x), words)
            groups.scatter(grouped.x)
            a2a.combine()
    with make(group, case, combine="push") as a2a:
        groups, other = ExpertGroups(a2a), ExpertGroups(a2a)
        y = torch.zeros(groups.y_shape, dtype=a2a.dtype, device=group.device)
        refused(OutOfOrder, lambda: groups.send(y), "expects dispatch")
        received = a2a.dispatch(x, ids, weights)
        refused(OutOfOrder, lambda: groups.send(y), "send without a gather")
        y = results(groups, groups.gather(received), 1, a2a.dtype)
        refused(InvalidArgument, partial(groups.send, y[:, :128].contiguous()), "y has shape")
        groups.send(y)
        for call in (a2a.combine, a2a.combine_send, lambda: other.send(y), lambda: groups.send(y)):
            refused(OutOfOrder, call, "expects combine_recv")
        refused(OutOfOrder, lambda: groups.scatter(y), "outside of a round")
        refused(OutOfOrder, lambda: groups.gather(received), "outside of a round")
        a2a.combine_recv()
        received = a2a.dispatch(x, ids, weights)
        refused(OutOfOrder, lambda: groups.send(y), "send without a gather")
        groups.gather(received)
        groups.send(y)
        a2a.combine_recv()
        groups.close()
        refused(OutOfOrder, lambda: groups.send(y), "after close")


@on_ranks(3)
def test_late_and_absent_sums(group):
    """Late sums change no byte, and an absent rank is named."""
    case = Round(tokens=(8, 16, 3), hidden=512)
    options = {"combine": "push", "_defines": ("WEFT_FAULTS=1",)}
    with make(group, case, **options) as a2a:
        groups = ExpertGroups(a2a)
        expected = round_trip(a2a, groups, case, return_by_scatter)
        if group.rank == 1:
            plan_fault(a2a, COMBINE_ENTER, JITTER, argument=400_000)
        for _ in range(8):
            assert torch.equal(bits(round_trip(a2a, groups, case, return_by_send)), bits(expected))
        hurry(a2a, 2.0)
        if group.rank == 1:
            plan_fault(a2a, COMBINE_ENTER, STAY_AWAY)
            with contextlib.suppress(PeerTimeout):  # on a GPU it stays away from its own wait, too
                finished(a2a, groups, case)
        else:
            with pytest.raises(PeerTimeout, match="rank 1 (did not publish|timed out)|for rank 1"):
                finished(a2a, groups, case)
        group.barrier()  # a rank that leaves is named at once


def finished(a2a: weft.AllToAll, groups: ExpertGroups, case: Round) -> None:
    round_trip(a2a, groups, case, return_by_send)
    synchronize(a2a.group.device)
    a2a.check()


def received_and_checked(a2a: weft.AllToAll) -> None:
    a2a.combine_recv()
    synchronize(a2a.group.device)
    a2a.check()


def receive_invalid_data(group: weft.Group, way: str, values: tuple[int, ...]) -> None:
    """Invalid counts and ids of a peer reach no memory except the inboxes' own slots."""
    case = Round(tokens=(16, 9), hidden=256, top_k=3, experts=10)
    with (
        make(group, case, **combine_options(way)) as a2a,
        make(group, case, combine_dtype="fp8" if way == "fp8" else None) as plain,
    ):
        groups, others = ExpertGroups(a2a, align=4), ExpertGroups(plain, align=4)
        x, ids, weights, _ = case.inputs_of(group.rank, group.device)
        size, shape = a2a.heap.size, a2a.config.shape
        heap = a2a.heap.tensor((size,), torch.uint8)
        begin = a2a.config.offsets.returned
        end = begin + shape.returned_rows * shape.returned_bytes
        behind = slice(end, size)
        for seed, lie in enumerate(values):
            received = a2a.dispatch(x, ids, weights)
            synchronize(group.device)
            group.barrier()  # all have dispatched: no rank stores after the inbox now
            kept = heap[behind].clone()
            received.counts.fill_(lie)
            wild = random_ids(received.ids.shape, a2a.num_local_experts, seed, 0.1, 0.5)
            received.ids.copy_(wild)
            grouped = groups.gather(received)
            synchronize(group.device)
            if way == "choices":
                assert grouped.dst_addr is not None
                assert torch.equal(grouped.dst_addr != 0, grouped.slot >= 0)
            groups.send(results(groups, grouped, seed, a2a.dtype))
            synchronize(group.device)
            group.barrier()
            assert torch.equal(heap[behind], kept)
            if way == "fp8":  # whose owners wait for each row that they are owed: it ends the group
                hurry(a2a, 2.0)
                with pytest.raises(PeerTimeout):
                    received_and_checked(a2a)
                return
            a2a.combine_recv()
        synchronize(group.device)
        group.barrier()
        expected = round_trip(plain, others, case, return_by_scatter)
        assert torch.equal(bits(round_trip(a2a, groups, case, return_by_send)), bits(expected))


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("way", ["push", "fp8", "choices"])
def test_invalid_peer_data_stays_in_its_slots(ranks, kind, way):
    values = (-1, 2**31 - 1, 17)
    for some in [(lie,) for lie in values] if way == "fp8" else [values]:
        ranks(2, kind)(receive_invalid_data, way, some)
