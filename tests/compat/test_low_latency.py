# SPDX-License-Identifier: Apache-2.0
"""deep_ep's low-latency calls: rows that name rank and token, and the sequences of callers."""

import itertools
from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import buffered, layer_of, returned, settle
from tests.kinds import CPU, CUDA, THREADS, on_ranks
from weft.compat.deep_ep import Buffer, Config, topk_idx_t
from weft.errors import GeometryMismatch, InvalidArgument, OutOfOrder
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


def inputs(group: weft.Group, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows of rank and token, ids with holes, and weights."""
    generator = torch.Generator().manual_seed(seed * 64 + group.rank)
    tokens = (5, 8)[group.rank % 2]
    x = torch.full((tokens, HIDDEN), group.rank + 1.0).bfloat16()
    x[:, -128:] = torch.arange(tokens).bfloat16()[:, None]
    ids = torch.rand((tokens, EXPERTS), generator=generator).topk(TOP_K, dim=1).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    weights = torch.rand((tokens, TOP_K), generator=generator)
    return x.to(group.device), ids.to(group.device), weights.to(group.device)


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
        chosen = [
            torch.tensor([t for t, row in enumerate(ids) if expert in row], dtype=torch.int64)
            for ids in ids_of_rank
        ]
        assert int(counts[local]) == sum(len(tokens) for tokens in chosen)
        for rank, tokens in enumerate(chosen):
            begin, count = int(ranges[local, rank]) >> 32, int(ranges[local, rank]) & (2**32 - 1)
            assert count == len(tokens)
            rows = numbers[local, begin : begin + count].float().cpu()
            assert torch.equal(source[local, begin : begin + count].cpu().long(), tokens)
            assert torch.allclose(rows[:, :-128], torch.full_like(rows[:, :-128], rank + 1.0))
            assert torch.allclose(rows[:, -128:], tokens[:, None].float().expand(-1, 128))


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
    scale = "ue8m0" if fmt.get("round_scale") else "fp32_row"
    quantize = "fp8" if fmt.get("use_fp8") else None
    return returned((x, ids, weights.cpu()), EXPERTS, group.size, quantize, scale=scale)


def check_scales(scales: torch.Tensor, counts: torch.Tensor, fmt: dict[str, Any]) -> None:
    """Check the original's layout: column-major for TMA, and powers of two in round_scale."""
    packed = fmt.get("use_ue8m0", False)
    assert scales.dtype == (torch.int32 if packed else torch.float32)
    assert scales.shape[2] == HIDDEN // (512 if packed else 128)
    assert scales.stride()[1] == 1
    if fmt.get("round_scale") and not packed:
        powers = torch.log2(scales[0, : int(counts[0])])
        assert torch.equal(powers, powers.round())


@on_ranks(2, [CPU, THREADS, CUDA])
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
        ids, everyone = ids.to(topk_idx_t), group.all_gather(ids.tolist())
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
    buffer.check()
    group.barrier()
    buffer.destroy()


@on_ranks(2)
@buffered(**LL)
def test_two_handles_are_combined_in_turn(group, buffer):
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


@on_ranks(2)
@buffered(**LL)
def test_zero_copy_reads_the_buffer_whatever_x_is(group, buffer):
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


@on_ranks(2, [CPU])
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


@on_ranks(2, [THREADS])
def test_a_handle_of_another_buffer_is_refused(group):
    one, other = (Buffer(group, **LL) for _ in range(2))
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


@on_ranks(2, [THREADS])
def test_ranks_that_quantise_differently_raise(group):
    """Rank 1 makes weft's own all-to-all with the sizes and layout of rank 0's buffer."""
    text = "rank 0 has recipe='deep_ep' and rank 1 has recipe='weft'"
    sizes: dict[str, Any] = {"max_tokens": MOST, "top_k": TOP_K, "num_experts": EXPERTS}
    sizes |= {"hidden": HIDDEN, "split_phase": True, "scale": "fp32_col", "reduce": "receiver"}
    makes: Any = (
        lambda: dispatched(Buffer(group, **LL, timeout=2.0), 0, use_fp8=True),
        lambda: weft.LowLatencyAllToAll(group, **sizes),
    )
    with pytest.raises(GeometryMismatch, match=text):
        makes[group.rank]()


@on_ranks(2, [THREADS])
@buffered(**LL)
def test_calls_that_the_original_allows_are_refused(group, buffer):
    """In addition to test_arguments.py."""
    x, ids = torch.zeros((1, HIDDEN), dtype=torch.bfloat16), torch.zeros((1, 1), dtype=torch.int64)
    with pytest.raises(InvalidArgument, match="enable_shrink is False; it must be True"):
        buffer.low_latency_clean_mask_buffer()
    with pytest.raises(InvalidArgument, match="use_ue8m0 with use_fp8=True, round_scale=False"):
        buffer.low_latency_dispatch(x, ids, 8, 8, use_ue8m0=True)
    buffer.clean_low_latency_buffer(8, HIDDEN, 8)
    with pytest.raises(InvalidArgument, match="local_world_size is 8 and world_size 2"):
        layer_of(group, local_world_size=8)
    with pytest.raises(InvalidArgument, match=f"but group is rank {group.rank} of 2"):
        layer_of(group, rank=1 - group.rank)


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
