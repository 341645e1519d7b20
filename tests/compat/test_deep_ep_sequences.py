# SPDX-License-Identifier: Apache-2.0
"""Sequences of calls that deep_ep's callers make: loops, dropped results, handles used again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import weft
from tests.compat.buffers import buffered, returned
from tests.compat.test_deep_ep import (
    EXPERTS,
    HIDDEN,
    KINDS,
    MOST,
    all_ids,
    check_rows,
    inputs,
    whole,
)
from tests.test_defaults import defaults
from weft.compat.deep_ep import Buffer, Config, EventOverlap, topk_idx_t
from weft.errors import InvalidArgument, OutOfOrder
from weft.lowlatency import reference as low
from weft.reference import dequantize

FORMATS: tuple[dict[str, Any], ...] = (
    {"use_fp8": False},
    {"use_fp8": False, "round_scale": True},  # which says nothing of rows without scales
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
)


def widened(numbers: Any) -> torch.Tensor:
    """What identity experts make of received numbers, in bfloat16."""
    if isinstance(numbers, torch.Tensor):
        return numbers.clone()
    x, scales = numbers
    return dequantize(x, low.unpack_scales(scales, HIDDEN // 128)).bfloat16()


def expected(
    group: weft.Group, seed: int, fmt: dict[str, Any], weights: torch.Tensor
) -> torch.Tensor:
    """What identity experts return, by the specification."""
    x, ids, _ = (t.cpu() for t in inputs(group, seed))
    quantize, scale = "fp8" if fmt["use_fp8"] else None, "fp32_row"
    scale = "ue8m0" if fmt.get("round_scale") else scale
    return returned((x, ids, weights.cpu()), EXPERTS, group.size, quantize, scale=scale)


def settle(event: EventOverlap, hook: Any) -> None:
    if hook is not None:
        hook()
    else:
        event.current_stream_wait()


def check_scales(scales: torch.Tensor, counts: torch.Tensor, fmt: dict[str, Any]) -> None:
    """In the original's layout: column-major, as TMA wants them; powers of two where asked for."""
    packed = fmt.get("use_ue8m0", False)
    assert scales.dtype == (torch.int32 if packed else torch.float32)
    assert scales.shape[2] == HIDDEN // (512 if packed else 128)
    assert scales.stride()[1] == 1
    if fmt.get("round_scale") and not packed:
        powers = torch.log2(scales[0, : int(counts[0])])
        assert torch.equal(powers, powers.round())


def own_test(group: weft.Group) -> Iterator[torch.Tensor]:
    """Every form in one buffer, each second one dispatched twice, its first result dropped, and
    both ways to hand rows back with one handle: the order of calls of deep_ep's own test."""
    buffer = Buffer(
        group,
        num_rdma_bytes=Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, group.size, EXPERTS),
        low_latency_mode=True,
        num_qps_per_rank=EXPERTS // group.size,
        allow_nvlink_for_low_latency_mode=True,
        explicitly_destroy=True,
        allow_mnnvl=False,
        enable_shrink=False,
    )
    forms = itertools.product((0, 1), (False, True), FORMATS)
    for times, (seed, hooks, fmt) in enumerate(forms):
        x, ids, weights = inputs(group, seed)
        ids, everyone = ids.to(topk_idx_t), all_ids(group, seed)
        mode: dict[str, Any] = {"async_finish": not hooks, "return_recv_hook": hooks}
        stats = torch.zeros(EXPERTS // group.size, dtype=torch.int, device=group.device)
        for _ in range(2 - times % 2):
            numbers, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, ids, MOST, EXPERTS, cumulative_local_expert_recv_stats=stats, **fmt, **mode
            )
            settle(event, hook)
        assert torch.equal(stats, counts * (2 - times % 2)), "added up"
        if not isinstance(numbers, torch.Tensor):
            check_scales(numbers[1], counts, fmt)
            numbers = numbers[0], numbers[1].contiguous()
        check_rows(group, numbers, counts, handle, everyone)
        y = widened(numbers)
        want = expected(group, seed, fmt, weights)
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
        yield from (counts, combined)
    # And the loop that it measures: FP8, whatever was combined before.
    for hooks in (False, True, True):
        numbers, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, MOST, EXPERTS, stats, use_fp8=True, async_finish=False, return_recv_hook=hooks
        )
        if hook is not None:
            hook()
        combined, _, hook = buffer.low_latency_combine(
            y, ids, weights, handle, use_logfmt=False, return_recv_hook=hooks
        )
        if hook is not None:
            hook()
    yield combined
    buffer.check()
    group.barrier()
    buffer.destroy()


def own_test_of(group: weft.Group, dtype: torch.dtype) -> bool:
    """Are the results those under torch's own defaults?"""
    plain = [t.clone() for t in own_test(group)]
    with defaults(str(group.device), dtype):
        again = [t.clone() for t in own_test(group)]
    same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(plain, again, strict=True)]
    return all(same) and len(same) > 30


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_originals_own_sequence_under_any_defaults(ranks, kind, dtype):
    assert ranks(2, kind)(own_test_of, dtype) == [True, True]


@buffered(low_latency_mode=True)
def dropped(group: weft.Group, buffer: Buffer, hooks: bool) -> None:
    """Dispatches without end and no combine: of each the rows are right, and the last combines."""
    for round_ in range(9):
        x, ids, weights = inputs(group, round_ % 2)
        numbers, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, MOST, EXPERTS, use_fp8=False, return_recv_hook=hooks
        )
        if hook is not None:
            hook()
        check_rows(group, numbers, counts, handle, all_ids(group, round_ % 2))
    want = expected(group, 0, FORMATS[0], weights)
    for _ in range(5):
        out, _, hook = buffer.low_latency_combine(
            whole(numbers), ids, weights, handle, return_recv_hook=hooks
        )
        if hook is not None:
            hook()
        assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hooks", [False, True])
def test_results_may_be_dropped_and_one_handle_combined_often(ranks, kind, hooks):
    ranks(2, kind)(dropped, hooks)


@buffered(low_latency_mode=True)
def weighted_apart(group: weft.Group, buffer: Buffer) -> None:
    """One handle, other rows and weights each time; two handles in turn, and both their buffers."""
    made = []
    for seed in (0, 1):
        x, ids, weights = inputs(group, seed)
        numbers, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
        place = buffer.get_next_low_latency_combine_buffer(handle)
        place.copy_(whole(numbers))
        assert buffer.get_next_low_latency_combine_buffer(handle) is place
        made.append((whole(numbers), ids, weights, handle))
    for turn in range(3):
        for seed in (1, 0):
            y, ids, weights, handle = made[seed]
            factor = float(2**turn)  # exact in bfloat16
            out = buffer.low_latency_combine(y * factor, ids, weights / 2, handle)[0]
            want = expected(group, seed, FORMATS[0], weights / 2).float() * factor
            assert torch.equal(out.cpu().float(), want)
            out = buffer.low_latency_combine(y, ids, weights, handle, zero_copy=True)[0]
            assert torch.equal(out.cpu(), expected(group, seed, FORMATS[0], weights))


@pytest.mark.parametrize("kind", KINDS)
def test_two_handles_may_be_combined_in_turn(ranks, kind):
    ranks(2, kind)(weighted_apart)


@buffered(low_latency_mode=True)
def overtaken(group: weft.Group, buffer: Buffer) -> None:
    """The third result takes the place of the first, whose handle then says so."""
    x, ids, weights = inputs(group, 0)
    results = [
        buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)[::2] for _ in range(3)
    ]
    numbers, handle, _ = results[0]
    with pytest.raises(OutOfOrder, match="dispatch 1: a later dispatch has taken its slot"):
        buffer.low_latency_combine(whole(numbers), ids, weights, handle)
    with pytest.raises(OutOfOrder, match="slot a later dispatch has taken"):
        buffer.get_next_low_latency_combine_buffer(handle)
    want = expected(group, 0, FORMATS[0], weights)
    for numbers, handle, _ in results[1:]:
        out = buffer.low_latency_combine(whole(numbers), ids, weights, handle)[0]
        assert torch.equal(out.cpu(), want)


def test_a_handle_whose_slot_is_taken_is_refused(ranks):
    ranks(2, "threads")(overtaken)


@buffered(low_latency_mode=True)
def never_taken_on_its_way(group: weft.Group, buffer: Buffer) -> None:
    """A result whose combine has been sent keeps its slot until the hook has run."""
    x, ids, weights = inputs(group, 0)
    rounds = [buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False) for _ in range(2)]
    numbers, _, handle, _, _ = rounds[0]
    for _ in range(2):  # a handle that is combined again is protected, too
        out, _, hook = buffer.low_latency_combine(
            whole(numbers), ids, weights, handle, return_recv_hook=True
        )
        with pytest.raises(OutOfOrder, match="2 results are alive, the oldest of dispatch 1"):
            buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
        assert hook is not None
        hook()
        assert torch.equal(out.cpu(), expected(group, 0, FORMATS[0], weights))
    buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_combine_on_its_way_keeps_its_slot(ranks, kind):
    ranks(2, kind)(never_taken_on_its_way)


@buffered(low_latency_mode=True)
def zero_copies(group: weft.Group, buffer: Buffer) -> None:
    """With zero_copy the buffer is read, whatever x is; before it was asked for, refused."""
    x, ids, weights = inputs(group, 0)
    numbers, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
    rows = whole(numbers).clone()
    with pytest.raises(OutOfOrder, match="zero_copy=True before get_next_low_latency"):
        buffer.low_latency_combine(rows, ids, weights, handle, zero_copy=True)
    buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
    other = torch.full_like(rows, float("nan"))
    with pytest.raises(InvalidArgument, match="x has shape"):
        buffer.low_latency_combine(other[:, 1:], ids, weights, handle, zero_copy=True)
    out = buffer.low_latency_combine(other, ids, weights, handle, zero_copy=True)[0]
    assert torch.equal(out.cpu(), expected(group, 0, FORMATS[0], weights))


@pytest.mark.parametrize("kind", KINDS)
def test_zero_copy_reads_the_combine_buffer(ranks, kind):
    ranks(2, kind)(zero_copies)


def engines(group: weft.Group) -> None:
    """Two micro-batches over some layers, halves interleaved, as engines overlap them; one buffer
    for all layers, tokens that vary and may be none."""
    buffer = Buffer(
        group,
        0,
        1 << 20,
        low_latency_mode=True,
        num_qps_per_rank=EXPERTS // group.size,
        allow_mnnvl=True,
        use_fabric=True,
    )
    assert buffer.group_size == group.size
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.group) == (0, 1 << 20, group)
    event = Buffer.capture()
    for layer in range(3):
        going: Any = None
        for batch in (0, 1):
            x, ids, weights = inputs(group, batch)
            if layer == 1 and batch == group.rank % 2:
                x, ids, weights = x[:0], ids[:0], weights[:0]
            numbers, _, handle, event, hook = buffer.low_latency_dispatch(
                x, ids, MOST, EXPERTS, use_fp8=True, round_scale=False, use_ue8m0=False,
                async_finish=False, return_recv_hook=True,
            )  # fmt: skip
            if going is not None:
                finish(group, *going)
            assert hook is not None
            hook()
            source, ranges, most, hidden, experts = handle
            assert (most, hidden, experts) == (MOST, HIDDEN, EXPERTS)
            assert (source.dtype, ranges.dtype) == (torch.int32, torch.int64)
            combined, _, hook = buffer.low_latency_combine(
                x=widened(numbers),
                topk_idx=ids,
                topk_weights=weights,
                handle=handle,
                async_finish=False,
                zero_copy=False,
                return_recv_hook=True,
            )
            going = batch, len(x), weights, combined, hook
        finish(group, *going)
    with event:
        pass
    buffer.check()
    group.barrier()
    buffer.destroy()


def finish(group, batch, tokens, weights, combined, hook) -> None:
    hook()
    full = inputs(group, batch)[2]
    assert torch.equal(combined.cpu(), expected(group, batch, FORMATS[1], full)[:tokens])


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_overlap_as_engines_do_it(ranks, kind):
    ranks(2, kind)(engines)


def of_a_process_group(group: weft.Group) -> None:
    """What callers pass, and what they read back; the process group stays theirs."""
    process_group = group.process_group()
    for options in ({}, {"explicitly_destroy": True}):
        buffer = Buffer(process_group, num_rdma_bytes=1 << 20, low_latency_mode=True, **options)
        assert buffer.group is process_group
        assert (buffer.rank, buffer.group_size) == (group.rank, group.size)
        inside = buffer._group
        x, ids, weights = inputs(inside, 0)
        numbers, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
        out = buffer.low_latency_combine(whole(numbers), ids, weights, handle)[0]
        assert torch.equal(out.cpu(), expected(inside, 0, FORMATS[0], weights))
        buffer.check()
        buffer.destroy()
        assert group.process_group() is process_group
        group.barrier()


def test_a_process_group_as_callers_pass_it(ranks):
    ranks(2, "cpu")(of_a_process_group)


@buffered(low_latency_mode=True)
def names(group: weft.Group, buffer: Buffer) -> None:
    if group.device.type == "cuda":
        assert buffer.get_comm_stream() == torch.cuda.current_stream(group.device)
    else:
        with pytest.raises(InvalidArgument, match="they have no streams"):
            buffer.get_comm_stream()


@pytest.mark.parametrize("kind", KINDS)
def test_names_beside_the_low_latency_calls(ranks, kind, monkeypatch):
    ranks(2, kind)(names)
    assert topk_idx_t is torch.int64
    assert Config(24, 8, 256).num_max_nvl_chunked_send_tokens == 8
    monkeypatch.setattr(Buffer, "num_sms", Buffer.num_sms)
    Buffer.set_num_sms(24)
    assert Buffer.num_sms == 24
    with pytest.raises(InvalidArgument, match="new_num_sms is 3; it must be even"):
        Buffer.set_num_sms(3)
