# SPDX-License-Identifier: Apache-2.0
"""Calls of a low-latency all-to-all: orders, refusals beside test_arguments.py, and false words."""

from functools import partial
from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import refused
from tests.headers import HEADER_BYTES
from tests.lowlatency_rounds import Mode, expert_results, store_at_owners
from tests.ranks import on_ranks
from tests.rounds import Round, synchronize
from weft.errors import GeometryMismatch, InvalidArgument, OutOfOrder, PeerTimeout, TokenOverflow
from weft.lowlatency.config import CHUNK_TOKENS, LowLatencyShape
from weft.lowlatency.kernels import plan_launch
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows
from weft.runtime.layout import LINE

SIZES: dict[str, Any] = {"max_tokens": 16, "hidden": 128, "top_k": 4, "num_experts": 16}


def make(group: weft.Group, **options: Any) -> LowLatencyAllToAll:
    return LowLatencyAllToAll(group, **{**SIZES, **options})


def inputs(group: weft.Group, tokens: int = 3) -> tuple[torch.Tensor, ...]:
    return Round((tokens,) * group.size, hidden=128).inputs_of(group.rank, group.device)


CHOICES: dict[str, Any] = {"combine": "gemm_push"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hidden": 144, "group_size": 32}, "hidden is 144; it must be a multiple of 32"),
        ({"hidden": 96, "group_size": 32, "combine_dtype": "fp8"}, "a multiple of 128"),
        (CHOICES, "use reduce='receiver' and slots=1"),
        ({**CHOICES, "slots": 1, "reduce": "sender"}, "reduce 'sender'"),
        ({**CHOICES, "slots": 1, "split_phase": True}, "leave split_phase out"),
        (
            {"num_experts": 3000, "top_k": 1, "expert_map": [0] * 3000},
            "3000 experts on one rank exceed the limit of 1024",
        ),
    ],
)
@on_ranks(1, "threads")
def test_invalid_sizes_are_refused(group, options, text):
    refused(InvalidArgument, lambda: make(group, **options), text)


@on_ranks(2, "threads")
def test_ranks_that_differ_raise_with_both_values(group):
    refused(GeometryMismatch, lambda: make(group, slots=1 + group.rank), "slots=1", "slots=2")
    both = "rank 0 has reduce='sender'", "rank 1 has reduce='receiver'"
    refused(GeometryMismatch, lambda: make(group, reduce=(None, "receiver")[group.rank]), *both)
    options = {"reduce": "receiver", "_recipe": ("deep_ep", "weft")[group.rank]}
    both = "rank 0 has recipe='deep_ep'", "rank 1 has recipe='weft'"
    refused(GeometryMismatch, lambda: make(group, **options), *both)
    # The first dispatches of two layers have equal numbers; each needs its own object.
    x, ids, weights, _ = inputs(group)
    with make(group) as one, make(group) as other:
        own, theirs = one.dispatch(x, ids, weights), other.dispatch(x, ids, weights)
        y = expert_results(one, own)
        call = lambda: one.combine(y, ids, weights, theirs.handle)  # noqa: E731
        refused(OutOfOrder, call, "by the all-to-all that created it")
        one.combine(y, ids, weights, own.handle)
        other.combine(y, ids, weights, theirs.handle)


@on_ranks(2)
def test_wrong_tensors_are_refused_before_anything_is_sent(group):
    x, ids, weights, _ = inputs(group)
    big, many, _, _ = inputs(group, 17)
    with make(group, **CHOICES, slots=1) as pushed:
        assert pushed.reduce == "receiver"
    with make(group) as a2a:
        assert a2a.reduce == "sender"
        send, combine = a2a.dispatch, a2a.combine
        refused(InvalidArgument, lambda: send(x[:2], ids, weights), "x has shape [2, 128]")
        words = "pass topk_weights to dispatch, or ", "='receiver'"
        refused(InvalidArgument, lambda: send(x, ids), *words)
        refused(InvalidArgument, lambda: a2a.dispatch_send(x, ids), "split_phase=True")
        refused(InvalidArgument, lambda: a2a.dump_trace("trace.json"), "profile=True")
        refused(TokenOverflow, lambda: send(big, many), "17 tokens in one call")
        got = send(x, ids, weights)
        y, handle = expert_results(a2a, got), got.handle
        refused(InvalidArgument, lambda: combine(y, ids[:2], None, handle), "topk_ids has 2 rows")
        for other in (None, weights.clone()):
            again = partial(combine, y, ids, other, handle)
            refused(InvalidArgument, again, "the same tensor to both")
        send_back = partial(a2a.combine_send, y, ids, weights, handle)
        refused(InvalidArgument, send_back, "split_phase=True")
        combine(y, ids, weights, handle)  # nothing of the above has reached a peer
        got = send(x, ids, weights)
        weights.mul_(2)
        again = partial(combine, expert_results(a2a, got), ids, weights, got.handle)
        refused(InvalidArgument, again, "modified between dispatch and combine")
    refused(OutOfOrder, lambda: send(x, ids, weights), "was closed")


@on_ranks(2)
def test_calls_out_of_order_are_refused(group):
    x, ids, weights, _ = inputs(group)
    with make(group, split_phase=True) as a2a:
        dispatch = lambda: a2a.dispatch(x, ids, weights)  # noqa: E731
        y = torch.zeros_like(a2a.result_buffers[0].x, dtype=x.dtype)

        def wrong(handle: Any, text: str) -> None:
            refused(OutOfOrder, lambda: a2a.combine(y, ids, weights, handle), text)

        refused(OutOfOrder, a2a.dispatch_recv, "without a dispatch_send")
        refused(OutOfOrder, a2a.combine_recv, "without a combine_send")
        early = a2a.dispatch_send(x, ids, weights)[0].handle
        refused(OutOfOrder, dispatch, "dispatch 1 is in flight")
        wrong(early, "it has not been received")
        first = a2a.dispatch_recv()
        second = dispatch()
        refused(OutOfOrder, dispatch, "2 results are alive, the oldest of dispatch 1")
        a2a.combine_send(y, ids, weights, first.handle)
        wrong(second.handle, "the combine of dispatch 1 is in flight")
        a2a.combine_recv()
        wrong(first.handle, "dispatch 1: it is not alive")
        a2a.combine(y, ids, weights, second.handle)
        a2a.check()


@on_ranks(2)
def test_results_may_be_combined_in_any_order(group):
    x, ids, weights, _ = inputs(group)
    with make(group) as a2a:
        kept = a2a.dispatch(x, ids, weights)
        counts, rows = kept.counts.tolist(), kept.x.view(torch.uint8).clone()
        for _ in range(3):
            got = a2a.dispatch(-x, ids.flip(0), weights)
            assert got.handle.slot == 1
            a2a.combine(expert_results(a2a, got), ids.flip(0), weights, got.handle)
        assert kept.counts.tolist() == counts
        assert torch.equal(kept.x.view(torch.uint8), rows)
        a2a.combine(expert_results(a2a, kept), ids, weights, kept.handle)
        a2a.check()


@pytest.mark.parametrize("split_phase", [False, True])
@on_ranks(2)
def test_ranks_that_combine_different_results_raise(group, split_phase):
    """Rank 1 combines its two results in reverse order."""
    x, ids, weights, _ = inputs(group)
    own, peer = group.rank, 1 - group.rank
    with make(group, split_phase=split_phase) as a2a:
        got = [a2a.dispatch(x, ids, weights), a2a.dispatch(x, ids, weights)][own]
        y = expert_results(a2a, got)

        def combine() -> None:
            if split_phase:
                a2a.combine_send(y, ids, weights, got.handle)[1]()
            else:
                a2a.combine(y, ids, weights, got.handle)
            synchronize(group.device)
            a2a.check()

        words = f"rank {own}, combine: rank {peer} combined result {peer + 1} of those alive"
        refused(GeometryMismatch, combine, f"{words}, this rank result {own + 1}")
        group.barrier()


@on_ranks(2)
def test_ranks_need_not_have_counted_the_same_dispatches(group):
    """One rank's graph replayed a dispatch that its host did not count; the other's host did."""
    x, ids, weights, _ = inputs(group)
    outs = []
    with make(group) as a2a:
        for uncounted in (0, group.rank):
            a2a._number -= uncounted
            got = a2a.dispatch(x, ids, weights)
            outs.append(a2a.combine(expert_results(a2a, got), ids, weights, got.handle))
        synchronize(group.device)
        a2a.check()
    assert torch.equal(*outs)


@on_ranks(2, "threads")
def test_scales_are_laid_out_for_grouped_gemms(group):
    """Two ranks of 5 tokens: 10 rows, padded to 12 in columns."""
    case = Round((5,) * group.size, hidden=256)
    expected = {"fp32_row": (20, 2, 1), "fp32_col": (24, 1, 12), "ue8m0": (12, 1, 12)}
    for scale, strides in expected.items():
        with Mode(scale=scale).make(group, case, 5) as a2a:
            x, ids, weights, _ = case.inputs_of(group.rank, group.device)
            got = a2a.dispatch(x, ids, weights)
            assert got.scales is not None
            assert got.scales.stride() == strides
            a2a.combine(expert_results(a2a, got), ids, weights, got.handle)


@on_ranks(2, "threads")
def test_memory_bytes_is_exact(group):
    sizes = {"ranks": group.size, **SIZES}
    with make(group) as a2a:
        tensors = [t for slot in a2a.result_buffers for t in slot.tensors.values()]
        reported = LowLatencyAllToAll.memory_bytes(**sizes)
        assert reported == a2a.memory
        assert reported.shared == a2a.heap.size == reported.total - reported.ordinary
        assert reported.ordinary == sum(t.numel() * t.element_size() for t in tensors)
    uneven = LowLatencyAllToAll.memory_bytes(**sizes, expert_map=[0] * 15 + [1])
    assert uneven.ordinary > 1.5 * reported.ordinary


@pytest.mark.parametrize("tokens", [0, 1, 8, 32, 33, 128, 512, 8192])
@pytest.mark.parametrize("name", ["dispatch", "combine"])
@pytest.mark.parametrize("part", ["", "_send", "_receive"])
def test_plans_fit_on_the_gpu_and_cover_every_rank(tokens, name, part):
    shape = LowLatencyShape(8, 8192, 8, 256, 32, 7168, "bf16")
    threads = 128 if tokens <= 32 else 256
    resident = 132 * 3 * (256 // threads)
    plan = plan_launch(shape, name + part, tokens, threads, 132, resident)
    assert plan.ctas >= 1
    assert plan.senders + plan.receivers <= max(resident, 2)
    if part != "_send":
        assert plan.receivers >= 1  # peers' tokens come even where there are none of one's own
    if part != "_receive":
        assert plan.metadata + plan.senders >= 1  # one CTA sends credits
        assert plan.metadata * CHUNK_TOKENS >= tokens or name == "combine"
    else:
        assert plan.metadata == plan.senders == 0


MOST, HIDDEN, EPOCH = 8, 128, 2
TAGGED_BITS = 24  # of value in a tagged word: tagged_bits in lowlatency/layout.cuh
CASE = Round(tokens=(8, 8), hidden=HIDDEN)
LIES = {
    "tokens": {"tokens": 1 << 20, "chosen": (1 << 24) - 1},
    "more chosen than tokens": {"chosen": (1 << 24) - 1},
    "an expert that is none": {"choice": 2000},
    "a choice that was not told": {"choice": 1},
    "some choices that were not told": {"choice": 1, "chosen": 0b10100110},
}


def words(a2a: LowLatencyAllToAll, offset: int, count: int) -> torch.Tensor:
    return a2a.heap.tensor((count,), torch.int64, offset=offset, rank=0)


def rows_out(a2a: LowLatencyAllToAll) -> torch.Tensor:
    shape, layout = a2a.config.shape, a2a.config.offsets
    return words(a2a, layout.rows, shape.rows * shape.sent_bytes // 8)


def forge_dispatch(
    a2a: LowLatencyAllToAll, *, tokens: int = MOST, chosen: int = 0, choice: int = 0
) -> None:
    """Write what rank 1 sends to rank 0 in its second dispatch."""
    shape, layout = a2a.config.shape, a2a.config.offsets
    tag = EPOCH << TAGGED_BITS
    flags = HEADER_BYTES + LINE
    rows_out(a2a)[MOST * shape.sent_bytes // 8 :] = 0
    words(a2a, layout.choices, shape.rows * shape.top_k)[MOST * shape.top_k :] = tag | choice
    words(a2a, layout.token_masks, 2 * shape.local)[shape.local :] = tag | chosen
    words(a2a, layout.tokens, 2)[1] = tag | tokens
    words(a2a, flags, 2)[1] += 1  # dispatch_begun
    words(a2a, flags + 2 * LINE, 2)[1] += 1  # combined
    synchronize(a2a.group.device)


@pytest.mark.parametrize("combine", ["push", "gemm_push"])
@pytest.mark.parametrize("name", LIES)
@on_ranks(2)
def test_no_word_of_a_peer_causes_a_stray_access(group, name, combine):
    lie, mode = LIES[name], Mode(combine=combine, more={"timeout": 5.0})
    with mode.make(group, CASE, MOST) as a2a:
        x, ids, weights, _ = CASE.inputs_of(group.rank, group.device)
        got = a2a.dispatch(x, ids, weights)
        y = torch.zeros_like(got.x, dtype=x.dtype)
        if got.dst_addr is not None:
            store_at_owners(a2a, got, y)
        a2a.combine(y if got.dst_addr is None else None, ids, weights, got.handle)
        group.barrier()
        if group.rank == 1:
            forge_dispatch(a2a, **lie)
        group.barrier()
        if group.rank == 0:
            nobody = torch.full_like(ids, -1)
            got = a2a.dispatch(x, nobody, weights)
            synchronize(group.device)
            a2a.check()
            check_bounds(a2a, got)
            if "choice" in lie:  # a row that is refused is taken out all the same
                assert bool((rows_out(a2a) == -1).all())
        group.barrier()


def check_bounds(a2a: LowLatencyAllToAll, got: ExpertRows) -> None:
    tensors = a2a.result_buffers[got.handle.slot].tensors
    rows = a2a.config.shape.rows
    assert tensors["source_tokens"].tolist() == [MOST, MOST]
    assert bool((got.counts <= rows).all()), got.counts
    assert bool((got.ranges.sum(dim=-1) <= rows).all()), got.ranges
    if got.dst_addr is not None:
        check_addresses(a2a, got, got.dst_addr)
        return
    taken = tensors["position"][tensors["position"] >= 0]
    assert bool((taken < got.counts[taken // rows] + taken // rows * rows).all())
    # No two tokens share a row, whatever was told of them.
    by_token = tensors["position"][1].unique(dim=1)
    seats = by_token[by_token >= 0]
    assert len(seats) == len(seats.unique())


def check_addresses(a2a: LowLatencyAllToAll, got: ExpertRows, address: torch.Tensor) -> None:
    """Every address is a slot of the token's owner, and no two are equal."""
    shape, heap = a2a.config.shape, a2a.heap
    behind = torch.arange(shape.rows, device=address.device)[None] >= got.counts[:, None]
    assert not address[behind].any()
    used = address[address != 0]
    assert len(used) == len(used.unique())
    for rank in range(a2a.ep_size):
        ours = address[(address != 0) & (got.source // MOST == rank)]
        place = ours - heap.address(rank) - a2a.config.offsets.back
        assert not (place % shape.back_bytes).any()
        assert bool(((place >= 0) & (place < MOST * shape.top_k * shape.back_bytes)).all())


@pytest.mark.parametrize("what", ["row", "choice"])
@on_ranks(2, "threads", "cuda", "emulated")
def test_a_missing_row_is_named_with_what_arrived(group, what):
    """Rank 1 announces rows to rank 0 but withholds one word."""
    mode = Mode(more={"timeout": 0.6, "first_timeout": 600.0})
    with mode.make(group, CASE, MOST) as a2a:
        x, ids, weights, _ = CASE.inputs_of(group.rank, group.device)
        got = a2a.dispatch(x, ids, weights)
        a2a.combine(torch.zeros_like(got.x, dtype=x.dtype), ids, weights, got.handle)
        group.barrier()
        if group.rank == 1:
            forge_dispatch(a2a, chosen=(1 << MOST) - 1, choice=1)
            shape, layout = a2a.config.shape, a2a.config.offsets
            if what == "row":
                rows_out(a2a)[-1:] = -1
            else:
                words(a2a, layout.choices, shape.rows * shape.top_k)[-2:-1] = -1
            synchronize(group.device)
        group.barrier()

        def dispatch() -> None:
            a2a.dispatch(x, torch.full_like(ids, -1), weights)
            synchronize(group.device)
            a2a.check()

        if group.rank == 0:
            named = "rank 0, dispatch: rank 1 did not publish epoch 2", "(its flag shows epoch 1)"
            refused(PeerTimeout, dispatch, *named)
        group.barrier()
