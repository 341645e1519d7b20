# SPDX-License-Identifier: Apache-2.0
"""deep_ep's low-latency calls on weft: the documented use, with rank and token in the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.compat.buffers import buffered
from tests.headers import HEADER_BYTES, Header
from weft.compat.deep_ep import Buffer
from weft.errors import GeometryMismatch, InvalidArgument, OutOfOrder
from weft.lowlatency import reference as low
from weft.reference import dequantize

KINDS = ["threads", pytest.param("cuda", marks=pytest.mark.gpu)]
MOST, HIDDEN, TOP_K, EXPERTS = 8, 512, 4, 8
COUNT_BITS = (1 << 32) - 1


def inputs(group: weft.Group, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows that say whose they are, ids with holes, weights; whatever torch's defaults are."""
    generator = torch.Generator("cpu").manual_seed(seed * 64 + group.rank)
    drawn: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    tokens = (5, 8)[group.rank % 2]
    x = torch.full((tokens, HIDDEN), float(group.rank + 1), dtype=torch.bfloat16, device="cpu")
    x[:, -128:] = torch.arange(tokens, device="cpu").bfloat16()[:, None]
    scores = torch.rand((tokens, EXPERTS), **drawn)
    ids = scores.topk(TOP_K, dim=1).indices
    ids[torch.rand(ids.shape, **drawn) < 0.2] = -1
    weights = torch.rand((tokens, TOP_K), **drawn)
    device = group.device
    return x.to(device), ids.to(device), weights.to(device)


def all_ids(group: weft.Group, seed: int) -> list[torch.Tensor]:
    mine = inputs(group, seed)[1].tolist()
    return [torch.tensor(each, device="cpu") for each in group.all_gather(mine)]


def check_rows(group, numbers, counts, handle, ids_of_rank):
    """The checks that deep_ep's own test makes, and that every row is where its source says."""
    x = numbers if isinstance(numbers, torch.Tensor) else dequantize(*_plain(numbers))
    per_rank = EXPERTS // group.size
    source, ranges, most, hidden, experts = handle
    assert (most, hidden, experts) == (MOST, HIDDEN, EXPERTS)
    for local in range(per_rank):
        expert = group.rank * per_rank + local
        chosen = [(ids == expert).any(dim=1).nonzero()[:, 0] for ids in ids_of_rank]
        assert int(counts[local]) == sum(len(tokens) for tokens in chosen)
        for rank, tokens in enumerate(chosen):
            begin, count = int(ranges[local, rank]) >> 32, int(ranges[local, rank]) & COUNT_BITS
            assert count == len(tokens)
            rows = x[local, begin : begin + count].float().cpu()
            assert torch.equal(source[local, begin : begin + count].cpu().long(), tokens)
            assert torch.allclose(rows[:, :-128], torch.full_like(rows[:, :-128], rank + 1.0))
            assert torch.allclose(rows[:, -128:], tokens[:, None].float().expand(-1, 128))


def _plain(numbers):
    x, scales = numbers
    return x, low.unpack_scales(scales, HIDDEN // 128)


def whole(numbers: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rows that came without scales."""
    assert isinstance(numbers, torch.Tensor)
    return numbers


def with_options(group: weft.Group) -> tuple[int, int]:
    """Options of weft's own reach the exchange; returns the deadlines that its kernels read."""
    buffer = Buffer(group, low_latency_mode=True, timeout=40.0, first_timeout=55.0)
    x, ids, weights = inputs(group, 0)
    numbers, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
    buffer.low_latency_combine(whole(numbers), ids, weights, handle)
    (exchange,) = buffer._exchanges.values()
    raw = exchange.heap.tensor((HEADER_BYTES,), torch.uint8)
    header = Header.from_buffer_copy(raw.numpy().tobytes())
    group.barrier()
    buffer.destroy()
    return header.deadline_ns, header.first_deadline_ns


def test_options_of_wefts_own_are_those_of_the_exchange(ranks):
    deadlines = ranks(2, "threads")(with_options)
    assert deadlines == [(40 * 10**9, 55 * 10**9)] * 2


def others_handle(group: weft.Group) -> None:
    one, other = (Buffer(group, low_latency_mode=True) for _ in range(2))
    x, ids, weights = inputs(group, 0)
    numbers, _, handle, _, _ = one.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
    if group.rank == 0:  # alone: a refusal asks nothing of the peers
        with pytest.raises(OutOfOrder, match="not of a dispatch of this buffer"):
            other.low_latency_combine(whole(numbers), ids, weights, handle)
        with pytest.raises(OutOfOrder, match="not of a dispatch of this buffer"):
            other.get_next_low_latency_combine_buffer(handle)
    one.low_latency_combine(whole(numbers), ids, weights, handle)
    one.destroy()
    with pytest.raises(OutOfOrder, match="destroyed"):
        one.low_latency_dispatch(x, ids, MOST, EXPERTS)
    other.destroy()


def test_another_buffers_handle_is_refused(ranks):
    ranks(2, "threads")(others_handle)


@buffered(low_latency_mode=True)
def refused(group: weft.Group, buffer: Buffer) -> None:
    with pytest.raises(InvalidArgument, match="enable_shrink is False; it must be True"):
        buffer.low_latency_clean_mask_buffer()
    x, ids, weights = inputs(group, 0)
    with pytest.raises(InvalidArgument, match="weft counts no waits"):
        buffer.low_latency_dispatch(
            x, ids, MOST, EXPERTS, dispatch_wait_recv_cost_stats=torch.zeros(2)
        )
    with pytest.raises(InvalidArgument, match="use_ue8m0 with use_fp8=True, round_scale=False"):
        buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_ue8m0=True)
    numbers, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
    with pytest.raises(InvalidArgument, match="use_logfmt is True"):
        buffer.low_latency_combine(whole(numbers), ids, weights, handle, use_logfmt=True)
    buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
    buffer.low_latency_combine(whole(numbers), ids, weights, handle)


def test_what_weft_does_not_do_is_refused(ranks):
    ranks(1, "threads")(refused)


def test_the_size_hint_covers_what_is_allocated():
    hint = Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
    used = weft.LowLatencyAllToAll.memory_bytes(
        ranks=8, max_tokens=128, hidden=7168, top_k=8, num_experts=256
    )
    assert used.shared <= hint < 64e6


def theirs(x: torch.Tensor, *, rounded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The original's arithmetic: the scale is amax, at least 1e-4, times the rounded 1 / 448, or
    the power of two at or above; numbers are multiplied by 448 / amax, or the power's inverse. A
    block that holds an Inf or a NaN is weft's own: all of it is NaN."""
    blocks = x.float().unflatten(-1, (-1, 128))
    amax = blocks.abs().amax(dim=-1).clamp(min=1e-4)
    scales = amax * (torch.tensor(1.0, dtype=torch.float64) / 448).float()
    factors = torch.full_like(amax, 448.0) / amax
    if rounded:
        mantissa, exponent = torch.frexp(scales)
        powers = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scales = torch.ldexp(torch.ones_like(amax), powers)
        factors = torch.ldexp(torch.ones_like(amax), -powers)
    numbers = (blocks * factors[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    whole = blocks.isfinite().all(dim=-1)
    numbers = torch.where(whole[..., None], numbers, 0x7F)
    return numbers.flatten(-2), torch.where(whole, scales, torch.nan)


def with_edges(x: torch.Tensor) -> torch.Tensor:
    """x with rows of zeros, of tiny numbers, around 1e-4, and with an Inf and a NaN."""
    x = x.clone()
    for row, most in enumerate((0.0, 1e-40, 2.0**-117, 9.96e-5, 1e-4, 1.01e-4, 448.0, 450.0)):
        x[row] = x[row].sign() * most
    x[8, 5], x[9, 200] = float("nan"), -float("inf")
    return x


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_and_scales_are_the_originals(rounded, dtype):
    generator = torch.Generator().manual_seed(3)
    powers = torch.randint(-40, 20, (512, 1), generator=generator).double()
    x = (torch.randn((512, HIDDEN), generator=generator).double() * 2**powers).to(dtype)
    x = with_edges(x)
    numbers, scales = low.sent(x, "fp8", 128, "ue8m0" if rounded else "fp32_col", "deep_ep")
    wanted, their_scales = theirs(x, rounded=rounded)
    assert torch.equal(numbers.view(torch.uint8), wanted)
    assert scales is not None
    assert torch.equal(scales.nan_to_num(7.0), their_scales.nan_to_num(7.0))
    assert scales[0].max() == scales[3].max() <= scales[5].min()  # amax counts as 1e-4


def edged(rank: int) -> torch.Tensor:
    """bf16 `[16, HIDDEN]` of sizes around 1e-4, with the rows of `with_edges`."""
    generator = torch.Generator().manual_seed(rank)
    powers = torch.randint(-20, 4, (16, 1), generator=generator).double()
    x = torch.randn((16, HIDDEN), generator=generator).double() * 2**powers
    return with_edges(x.bfloat16())


@buffered(low_latency_mode=True)
def delivered(group: weft.Group, buffer: Buffer, rounded: bool, packed: bool) -> None:
    sources = [edged(rank) for rank in range(group.size)]
    x = sources[group.rank]
    ids = torch.arange(16).view(16, 1) % EXPERTS
    device = group.device
    (numbers, scales), counts, handle, _, _ = buffer.low_latency_dispatch(
        x.to(device), ids.to(device), 16, EXPERTS, round_scale=rounded, use_ue8m0=packed
    )
    per_rank = EXPERTS // group.size
    source, ranges = handle[0].cpu(), handle[1].cpu()
    scales = low.unpack_scales(scales, HIDDEN // 128).cpu()
    assert counts.tolist() == [16 // EXPERTS * group.size] * per_rank
    for local in range(per_rank):
        for rank, sent in enumerate(sources):
            begin, count = int(ranges[local, rank]) >> 32, int(ranges[local, rank]) & COUNT_BITS
            there = slice(begin, begin + count)
            wanted, their_scales = theirs(sent[source[local, there].long()], rounded=rounded)
            assert torch.equal(numbers[local, there].cpu().view(torch.uint8), wanted)
            found = scales[local, there].nan_to_num(7.0)
            assert torch.equal(found, their_scales.nan_to_num(7.0))
    y = torch.zeros(numbers.shape, dtype=torch.bfloat16, device=device)
    buffer.low_latency_combine(y, ids.to(device), torch.ones(16, 1, device=device), handle)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rounded", "packed"), [(False, False), (True, False), (True, True)])
def test_rows_arrive_with_the_originals_bytes(ranks, kind, rounded, packed):
    ranks(2, kind)(delivered, rounded, packed)


def beside_weft(group: weft.Group) -> str:
    """Rank 1 makes weft's own all-to-all of the sizes and the layout of rank 0's buffer."""
    x, ids, _ = inputs(group, 0)
    try:
        if group.rank == 0:
            buffer = Buffer(group, low_latency_mode=True, timeout=2.0)
            buffer.low_latency_dispatch(x, ids, MOST, EXPERTS)
        else:
            weft.LowLatencyAllToAll(
                group,
                max_tokens=MOST,
                top_k=TOP_K,
                num_experts=EXPERTS,
                hidden=HIDDEN,
                split_phase=True,
                scale="fp32_col",
            )
    except GeometryMismatch as error:
        return str(error)
    return ""


def test_ranks_that_quantise_differently_are_told(ranks):
    for said in ranks(2, "threads")(beside_weft):
        assert "rank 0 has recipe='deep_ep' and rank 1 has recipe='weft'" in said
