# SPDX-License-Identifier: Apache-2.0
"""deep_ep's low-latency calls: rows that name rank and token, and the sequences of callers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import weft
from tests.compat.buffers import KINDS, buffered, returned
from weft.compat.deep_ep import Buffer, Config, EventOverlap, topk_idx_t
from weft.errors import GeometryMismatch, InvalidArgument, OutOfOrder
from weft.lowlatency import reference as low
from weft.reference import dequantize

MOST, HIDDEN, TOP_K, EXPERTS = 8, 512, 4, 8
FORMATS: tuple[dict[str, Any], ...] = (
    {"use_fp8": False},
    {"use_fp8": False, "round_scale": True},  # which has no meaning for rows without scales
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
)


def inputs(group: weft.Group, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows of rank and token, ids with holes, and weights, whatever torch's defaults are."""
    generator = torch.Generator("cpu").manual_seed(seed * 64 + group.rank)
    drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    tokens = (5, 8)[group.rank % 2]
    x = torch.full((tokens, HIDDEN), float(group.rank + 1), dtype=torch.bfloat16, device="cpu")
    x[:, -128:] = torch.arange(tokens, device="cpu").bfloat16()[:, None]
    ids = torch.rand((tokens, EXPERTS), **drawn).topk(TOP_K, dim=1).indices
    ids[torch.rand(ids.shape, **drawn) < 0.2] = -1
    weights = torch.rand((tokens, TOP_K), **drawn)
    return x.to(group.device), ids.to(group.device), weights.to(group.device)


def all_ids(group: weft.Group, seed: int) -> list[torch.Tensor]:
    local = inputs(group, seed)[1].tolist()
    return [torch.tensor(each, device="cpu") for each in group.all_gather(local)]


def check_rows(group, numbers, counts, handle, ids_of_rank):
    """Check what deep_ep's own test checks, and that every row is its source's."""
    if not isinstance(numbers, torch.Tensor):
        x, scales = numbers
        numbers = dequantize(x, low.unpack_scales(scales, HIDDEN // 128))
    per_rank = EXPERTS // group.size
    source, ranges, most, hidden, experts = handle
    assert (most, hidden, experts) == (MOST, HIDDEN, EXPERTS)
    for local in range(per_rank):
        expert = group.rank * per_rank + local
        chosen = [(ids == expert).any(dim=1).nonzero()[:, 0] for ids in ids_of_rank]
        assert int(counts[local]) == sum(len(tokens) for tokens in chosen)
        for rank, tokens in enumerate(chosen):
            begin, count = int(ranges[local, rank]) >> 32, int(ranges[local, rank]) & (2**32 - 1)
            assert count == len(tokens)
            rows = numbers[local, begin : begin + count].float().cpu()
            assert torch.equal(source[local, begin : begin + count].cpu().long(), tokens)
            assert torch.allclose(rows[:, :-128], torch.full_like(rows[:, :-128], rank + 1.0))
            assert torch.allclose(rows[:, -128:], tokens[:, None].float().expand(-1, 128))


def whole(numbers: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return rows that have no scales."""
    assert isinstance(numbers, torch.Tensor)
    return numbers


def dispatched(buffer: Buffer, seed: int) -> tuple[Any, ...]:
    """Dispatch in bfloat16; return (rows, ids, weights, handle)."""
    x, ids, weights = inputs(buffer._group, seed)
    numbers, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
    return whole(numbers), ids, weights, handle


def widened(numbers: Any) -> torch.Tensor:
    """Return the result of identity experts, in bfloat16."""
    if isinstance(numbers, torch.Tensor):
        return numbers.clone()
    x, scales = numbers
    return dequantize(x, low.unpack_scales(scales, HIDDEN // 128)).bfloat16()


def expected(group: weft.Group, seed: int, weights: torch.Tensor, **fmt: Any) -> torch.Tensor:
    """Return what identity experts return, by the specification."""
    x, ids, _ = (t.cpu() for t in inputs(group, seed))
    scale = "ue8m0" if fmt.get("round_scale") else "fp32_row"
    quantize = "fp8" if fmt.get("use_fp8") else None
    return returned((x, ids, weights.cpu()), EXPERTS, group.size, quantize, scale=scale)


def settle(event: EventOverlap, hook: Any) -> None:
    hook() if hook is not None else event.current_stream_wait()


def check_scales(scales: torch.Tensor, counts: torch.Tensor, fmt: dict[str, Any]) -> None:
    """Check the original's layout: column-major for TMA, and powers of two in round_scale."""
    packed = fmt.get("use_ue8m0", False)
    assert scales.dtype == (torch.int32 if packed else torch.float32)
    assert scales.shape[2] == HIDDEN // (512 if packed else 128)
    assert scales.stride()[1] == 1
    if fmt.get("round_scale") and not packed:
        powers = torch.log2(scales[0, : int(counts[0])])
        assert torch.equal(powers, powers.round())


def own_test(group: weft.Group) -> None:
    """Make the calls of deep_ep's own test, in its order.

    Every form in one buffer, each second one dispatched twice with its first result dropped, and
    both ways to hand rows back with one handle.
    """
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
    # And the loop that it measures: FP8, whatever was combined before.
    for hooks in (False, True, True):
        mode = {"async_finish": False, "return_recv_hook": hooks}
        _, _, handle, event, hook = buffer.low_latency_dispatch(
            x, ids, MOST, EXPERTS, stats, use_fp8=True, **mode
        )
        settle(event, hook)
        combined, event, hook = buffer.low_latency_combine(
            y, ids, weights, handle, use_logfmt=False, **mode
        )
        settle(event, hook)
    buffer.check()
    group.barrier()
    buffer.destroy()


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_originals_own_sequence(ranks, kind):
    ranks(2, kind)(own_test)


@buffered(low_latency_mode=True)
def in_turn(group: weft.Group, buffer: Buffer) -> None:
    """Combine two handles in turn, with other rows and weights, and from both buffers."""
    made = []
    for seed in (0, 1):
        rows, ids, weights, handle = dispatched(buffer, seed)
        place = buffer.get_next_low_latency_combine_buffer(handle)
        place.copy_(rows)
        assert buffer.get_next_low_latency_combine_buffer(handle) is place
        made.append((rows, ids, weights, handle))
    for turn, seed in itertools.product(range(3), (1, 0)):
        y, ids, weights, handle = made[seed]
        factor = float(2**turn)  # exact in bfloat16
        out = buffer.low_latency_combine(y * factor, ids, weights / 2, handle)[0]
        want = expected(group, seed, weights / 2).float() * factor
        assert torch.equal(out.cpu().float(), want)
        out = buffer.low_latency_combine(y, ids, weights, handle, zero_copy=True)[0]
        assert torch.equal(out.cpu(), expected(group, seed, weights))


@buffered(low_latency_mode=True)
def reuse_slot(group: weft.Group, buffer: Buffer) -> None:
    """The third result reuses the slot of the first, whose handle is then refused."""
    results = [dispatched(buffer, 0) for _ in range(3)]
    with pytest.raises(OutOfOrder, match="dispatch 1: a later dispatch has reused its memory"):
        buffer.low_latency_combine(*results[0])
    with pytest.raises(OutOfOrder, match="a later dispatch has reused the memory"):
        buffer.get_next_low_latency_combine_buffer(results[0][3])
    for result in results[1:]:
        out = buffer.low_latency_combine(*result)[0]
        assert torch.equal(out.cpu(), expected(group, 0, result[2]))


@buffered(low_latency_mode=True)
def protected(group: weft.Group, buffer: Buffer) -> None:
    """A result whose combine has been sent keeps its slot until the hook has run."""
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


@buffered(low_latency_mode=True)
def zero_copies(group: weft.Group, buffer: Buffer) -> None:
    """With zero_copy the buffer is read, whatever x is; unrequested zero_copy is refused."""
    rows, ids, weights, handle = dispatched(buffer, 0)
    rows = rows.clone()
    with pytest.raises(OutOfOrder, match="zero_copy=True before get_next_low_latency"):
        buffer.low_latency_combine(rows, ids, weights, handle, zero_copy=True)
    buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
    other = torch.full_like(rows, float("nan"))
    with pytest.raises(InvalidArgument, match="x has shape"):
        buffer.low_latency_combine(other[:, 1:], ids, weights, handle, zero_copy=True)
    out = buffer.low_latency_combine(other, ids, weights, handle, zero_copy=True)[0]
    assert torch.equal(out.cpu(), expected(group, 0, weights))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [in_turn, protected, reuse_slot, zero_copies])
def test_results_are_kept_and_combined_in_any_order(ranks, kind, body):
    ranks(2, kind)(body)


def of_a_process_group(group: weft.Group) -> None:
    """The process group is kept as an attribute, and stays the caller's."""
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


def test_a_process_group_as_callers_pass_it(ranks):
    ranks(2, "cpu")(of_a_process_group)


def others_handle(group: weft.Group) -> None:
    one, other = (Buffer(group, low_latency_mode=True) for _ in range(2))
    result = dispatched(one, 0)
    if group.rank == 0:  # alone: a refusal asks nothing of the peers
        with pytest.raises(OutOfOrder, match="belongs to another buffer"):
            other.low_latency_combine(*result)
        with pytest.raises(OutOfOrder, match="belongs to another buffer"):
            other.get_next_low_latency_combine_buffer(result[3])
    one.low_latency_combine(*result)
    one.destroy()
    with pytest.raises(OutOfOrder, match="destroyed"):
        dispatched(one, 0)
    other.destroy()


def test_a_handle_of_another_buffer_is_refused(ranks):
    ranks(2, "threads")(others_handle)


def beside_weft(group: weft.Group) -> None:
    """Rank 1 makes weft's own all-to-all with the sizes and layout of rank 0's buffer."""
    if group.rank == 0:
        buffer = Buffer(group, low_latency_mode=True, timeout=2.0)
        buffer.low_latency_dispatch(*inputs(group, 0)[:2], MOST, EXPERTS)
    else:
        sizes: dict[str, Any] = {
            "max_tokens": MOST,
            "top_k": TOP_K,
            "num_experts": EXPERTS,
            "hidden": HIDDEN,
        }
        weft.LowLatencyAllToAll(
            group, **sizes, split_phase=True, scale="fp32_col", reduce="receiver"
        )


def test_ranks_that_quantise_differently_raise(ranks):
    def body(group: weft.Group) -> None:
        text = "rank 0 has recipe='deep_ep' and rank 1 has recipe='weft'"
        with pytest.raises(GeometryMismatch, match=text):
            beside_weft(group)

    ranks(2, "threads")(body)


def test_sizes_and_numbers_of_sms_are_what_callers_compute_with(monkeypatch):
    hint = Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
    used = weft.LowLatencyAllToAll.memory_bytes(
        ranks=8, max_tokens=128, hidden=7168, top_k=8, num_experts=256, reduce="receiver"
    )
    assert used.shared <= hint < 64e6
    assert topk_idx_t is torch.int64
    assert Config(24, 8, 256).num_max_nvl_chunked_send_tokens == 8
    monkeypatch.setattr(Buffer, "num_sms", Buffer.num_sms)
    Buffer.set_num_sms(24)
    assert Buffer.num_sms == 24
