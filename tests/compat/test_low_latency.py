# SPDX-License-Identifier: Apache-2.0
"""deep_ep's low-latency calls in the sequences of callers, compared with weft's reference."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import buffered, layer_of, refused, returned, settle
from tests.ranks import on_ranks
from tests.rounds import Round, bits
from weft.compat.deep_ep import Buffer, Config, topk_idx_t
from weft.errors import InvalidArgument, OutOfOrder
from weft.lowlatency import reference as low
from weft.reference import dequantize

MOST, HIDDEN, TOP_K, EXPERTS = 8, 512, 4, 8
LL: dict[str, Any] = {"low_latency_mode": True}
FORMATS: tuple[dict[str, Any], ...] = (
    {"use_fp8": False},
    {"use_fp8": False, "round_scale": True},  # which has no meaning for rows without scales
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
)


CASE = Round((5, 8) * 2, TOP_K, EXPERTS, HIDDEN, router="holes", ids_dtype=topk_idx_t)


def inputs(group: weft.Group, seed: int, rank: int | None = None) -> tuple[torch.Tensor, ...]:
    """Return rows, ids with holes, and weights, of this rank by default."""
    rank = group.rank if rank is None else rank
    return CASE.next(seed=seed).inputs_of(rank, group.device)[:3]


def check_rows(group, seed, fmt, numbers, counts, handle):
    """Compare with weft's reference; scales are column-major as for TMA."""
    every = [inputs(group, seed, rank) for rank in range(group.size)]
    want = low.dispatch(
        [x for x, _, _ in every], [ids for _, ids, _ in every],
        weft.Placement.blocks(EXPERTS, group.size), rank=group.rank, max_tokens=MOST,
        quantize="fp8" if fmt["use_fp8"] else None, scale=scale_of(fmt), recipe="deep_ep",
    )  # fmt: skip
    source, ranges, *sizes = handle
    assert sizes == [MOST, HIDDEN, EXPERTS]
    assert torch.equal(counts, want.counts)
    assert torch.equal(torch.stack((ranges >> 32, ranges & (2**32 - 1)), -1).int(), want.ranges)
    there = torch.arange(source.shape[1], device=counts.device)[None] < counts[:, None]
    assert torch.equal(source[there], want.source[there] % MOST)
    if fmt["use_fp8"]:
        numbers, scales = numbers
        assert scales.dtype == (torch.int32 if fmt.get("use_ue8m0") else torch.float32)
        assert scales.stride()[1] == 1
        assert want.scales is not None
        scales = low.unpack_scales(scales, HIDDEN // 128)
        assert torch.equal(scales[there], want.scales[there])
    assert torch.equal(bits(numbers[there]), bits(want.x[there]))


def scale_of(fmt: dict[str, Any]) -> str:
    return "ue8m0" if fmt.get("round_scale") else "fp32_row"


def dispatched(buffer: Buffer, seed: int, *, use_fp8: bool = False) -> tuple[Any, ...]:
    x, ids, weights = inputs(buffer._group, seed)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=use_fp8)
    return rows, ids, weights, handle


def widened(numbers: Any) -> torch.Tensor:
    """Return the result of identity experts, in bfloat16."""
    if isinstance(numbers, torch.Tensor):
        return numbers.clone()
    x, scales = numbers
    return dequantize(x, low.unpack_scales(scales, HIDDEN // 128)).bfloat16()


def expected(group: weft.Group, seed: int, weights: torch.Tensor, **fmt: Any) -> torch.Tensor:
    x, ids, _ = (t.cpu() for t in inputs(group, seed))
    quantize = "fp8" if fmt.get("use_fp8") else None
    return returned((x, ids, weights.cpu()), EXPERTS, group.size, quantize, scale=scale_of(fmt))


@on_ranks(2, "cpu", "threads", "cuda")
def test_the_originals_own_sequence(group):
    """Every form in one buffer, both ways to hand rows back, and some results dropped."""
    size = Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, group.size, EXPERTS)
    buffer = Buffer(
        group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=EXPERTS // group.size,
        allow_nvlink_for_low_latency_mode=True, explicitly_destroy=True, allow_mnnvl=False,
        enable_shrink=False,
    )  # fmt: skip
    forms = itertools.product((0, 1), (False, True), FORMATS)
    for times, (seed, hooks, fmt) in enumerate(forms):
        x, ids, weights = inputs(group, seed)
        mode: dict[str, Any] = {"async_finish": not hooks, "return_recv_hook": hooks}
        stats = torch.zeros(EXPERTS // group.size, dtype=torch.int, device=group.device)
        for _ in range(2 - times % 2):
            numbers, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, ids, MOST, EXPERTS, cumulative_local_expert_recv_stats=stats, **fmt, **mode
            )
            settle(event, hook)
        assert torch.equal(stats, counts * (2 - times % 2)), "added up"
        check_rows(group, seed, fmt, numbers, counts, handle)
        y, want = widened(numbers), expected(group, seed, weights, **fmt)
        for zero_copy in (False, True):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = y
            out = torch.empty(x.shape, dtype=torch.bfloat16, device=group.device)
            combined, event, hook = buffer.low_latency_combine(
                y, ids, weights, handle, use_logfmt=False, zero_copy=zero_copy, out=out, **mode
            )
            settle(event, hook)
            assert combined.data_ptr() == out.data_ptr()
            assert torch.equal(combined.cpu(), want)
    buffer.check()
    group.barrier()
    buffer.destroy()


@on_ranks(2)
@buffered(**LL)
def test_two_handles_are_combined_in_turn_from_buffers_of_their_own(group, buffer):
    """zero_copy reads the handle's buffer, whatever x is."""
    results = []
    for seed in (0, 1):
        rows, ids, weights, handle = dispatched(buffer, seed)
        buffer_of_handle = buffer.get_next_low_latency_combine_buffer(handle)
        buffer_of_handle.copy_(rows)
        assert buffer.get_next_low_latency_combine_buffer(handle) is buffer_of_handle
        results.append((rows.clone(), ids, weights, handle))
    for seed in (1, 0, 1):
        y, *arguments = results[seed]
        want = expected(group, seed, arguments[1])
        other = torch.full_like(y, float("nan"))
        with pytest.raises(InvalidArgument, match="x has shape"):
            buffer.low_latency_combine(other[:, 1:], *arguments, zero_copy=True)
        out = buffer.low_latency_combine(other, *arguments, zero_copy=True)[0]
        assert torch.equal(out.cpu(), want)
        out = buffer.low_latency_combine(y * 2, *arguments)[0]  # exact in bfloat16
        assert torch.equal(out.cpu().float(), want.float() * 2)


@on_ranks(2)
@buffered(**LL)
def test_a_handle_whose_slot_a_third_result_reuses_is_refused(group, buffer):
    results = [dispatched(buffer, 0) for _ in range(3)]
    with pytest.raises(OutOfOrder, match="dispatch 1: a later dispatch has reused its memory"):
        buffer.low_latency_combine(*results[0])
    with pytest.raises(OutOfOrder, match="a later dispatch has reused the memory"):
        buffer.get_next_low_latency_combine_buffer(results[0][3])
    for result in results[1:]:
        out = buffer.low_latency_combine(*result)[0]
        assert torch.equal(out.cpu(), expected(group, 0, result[2]))


@on_ranks(2)
@buffered(**LL)
def test_a_result_does_not_outlive_a_sleep(group, buffer):
    rows, ids, weights, handle = dispatched(buffer, 0)
    calls = (
        partial(buffer.get_next_low_latency_combine_buffer, handle),
        partial(buffer.low_latency_combine, rows, ids, weights, handle),
    )
    for method in (group.sleep, group.wake):
        method()
        for call in calls:
            with pytest.raises(OutOfOrder, match="asleep|reused"):
                call()
    out = buffer.low_latency_combine(*dispatched(buffer, 0))[0]
    assert torch.equal(out.cpu(), expected(group, 0, weights))


@on_ranks(2)
@buffered(**LL)
def test_a_sent_result_keeps_its_slot_until_the_hook_has_run(group, buffer):
    first, _ = (dispatched(buffer, 0) for _ in range(2))
    for _ in range(2):  # a handle that is combined again is protected, too
        rows, ids, weights, handle = first
        out, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True)
        with pytest.raises(OutOfOrder, match="2 results are alive, the oldest of dispatch 1"):
            dispatched(buffer, 0)
        assert hook is not None
        hook()
        assert torch.equal(out.cpu(), expected(group, 0, first[2]))
    dispatched(buffer, 0)


@on_ranks(2, "cpu")
def test_a_process_group_is_kept_and_stays_the_callers(group):
    process_group = group.process_group()
    for options in ({}, {"explicitly_destroy": True}):
        buffer = Buffer(process_group, num_rdma_bytes=1 << 20, low_latency_mode=True, **options)
        assert buffer.group is process_group
        assert (buffer.rank, buffer.group_size) == (group.rank, group.size)
        result = dispatched(buffer, 0)
        out = buffer.low_latency_combine(*result)[0]
        assert torch.equal(out.cpu(), expected(buffer._group, 0, result[2]))
        buffer.check()
        buffer.destroy()
        assert group.process_group() is process_group
        group.barrier()


@on_ranks(2, "threads")
def test_calls_that_the_original_allows_are_refused(group):
    """In addition to test_arguments.py. A refusal asks nothing of the peers."""
    buffer, other = (Buffer(group, **LL) for _ in range(2))
    rows, ids, weights, handle = result = dispatched(buffer, 0)
    send, combine = buffer.low_latency_dispatch, buffer.low_latency_combine
    other_buffer = partial(other.get_next_low_latency_combine_buffer, handle)
    early = partial(combine, rows, ids, weights, handle, zero_copy=True)
    packed = partial(send, rows[0], ids, 8, 8, use_ue8m0=True)
    calls: list[tuple[type[Exception], Any, str]] = [
        (OutOfOrder, lambda: other.low_latency_combine(*result), "belongs to another buffer"),
        (OutOfOrder, other_buffer, "belongs to another buffer"),
        (OutOfOrder, early, "zero_copy=True before get_next_low_latency"),
        (InvalidArgument, buffer.low_latency_clean_mask_buffer, "enable_shrink is False; it must"),
        (InvalidArgument, packed, "use_ue8m0 with use_fp8=True, round_scale=False"),
        (InvalidArgument, lambda: layer_of(group, local_world_size=8), "8 and world_size 2"),
        (InvalidArgument, lambda: layer_of(group, rank=1 - group.rank), "but group is rank"),
    ]
    for error, call, words in calls:
        refused(error, call, words)
    combine(*result)
    buffer.clean_low_latency_buffer(8, HIDDEN, 8)
    buffer.destroy()
    refused(OutOfOrder, lambda: dispatched(buffer, 0), "destroyed")
    other.destroy()


def test_sizes_are_what_callers_compute_with(monkeypatch):
    hint = Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
    used = weft.LowLatencyAllToAll.memory_bytes(
        ranks=8, max_tokens=128, hidden=7168, top_k=8, num_experts=256, reduce="receiver"
    )
    assert used.shared <= hint < 64e6
    few, many = (Config(sms).get_nvl_buffer_size_hint(14336, 8) for sms in (2, 20))
    assert 9 * 256 * 14336 < few < many < 10.2 * few
    with pytest.raises(InvalidArgument):
        Config().get_nvl_buffer_size_hint(100, 8)
    assert topk_idx_t is torch.int64
    monkeypatch.setattr(Buffer, "num_sms", Buffer.num_sms)
    Buffer.set_num_sms(24)
    for config in (Buffer.get_dispatch_config(8), Buffer.get_combine_config(8)):
        assert config.num_sms == Buffer.num_sms == 24
        assert config.get_rdma_buffer_size_hint(14336, 8) == 0
