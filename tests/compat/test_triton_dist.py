# SPDX-License-Identifier: Apache-2.0
"""triton_dist's low-latency layer on weft: the documented use, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import weft
from weft.compat.triton_dist import EPLowLatencyAllToAllLayer
from weft.errors import InvalidArgument, OutOfOrder
from weft.lowlatency import reference as low
from weft.placement import Placement
from weft.reference import dequantize, quantize

KINDS = ["threads", pytest.param("cuda", marks=pytest.mark.gpu)]
MOST, HIDDEN, TOP_K, EXPERTS = 16, 256, 4, 8


def make(group: weft.Group, **changes: object) -> EPLowLatencyAllToAllLayer:
    options: dict[str, object] = {
        "max_m": MOST,
        "hidden": HIDDEN,
        "topk": TOP_K,
        "online_quant_fp8": True,
        "rank": group.rank,
        "num_experts": EXPERTS,
        "local_world_size": group.size,
        "world_size": group.size,
        "group": group,
    }
    return EPLowLatencyAllToAllLayer(**{**options, **changes})  # type: ignore[arg-type]


def rounds(group: weft.Group) -> None:
    layer = make(group)
    placement = Placement.blocks(EXPERTS, group.size)
    for seed, tokens in enumerate((7, 0, 16, 1)):
        generator = torch.Generator().manual_seed(seed * 8 + group.rank)
        x = torch.randn((tokens, HIDDEN), generator=generator).bfloat16().to(group.device)
        scores = torch.rand((tokens, EXPERTS), generator=generator)
        ids = scores.topk(TOP_K, dim=1).indices.int().to(group.device)
        weights = torch.rand((tokens, TOP_K), generator=generator).to(group.device)
        token, scale, counts, meta = layer.dispatch(x, None, ids)
        assert token.shape == (EXPERTS // group.size, group.size * MOST, HIDDEN)
        assert scale.shape == (EXPERTS // group.size, group.size * MOST, HIDDEN // 128)
        assert scale.is_contiguous()
        packed = meta.recv_token_source_count_and_start
        assert torch.equal((packed & (2**32 - 1)).sum(dim=1).int(), counts)
        for local in range(len(counts)):
            for rank in range(group.size):
                count, start = (
                    int(packed[local, rank]) & (2**32 - 1),
                    int(packed[local, rank]) >> 32,
                )
                where = meta.recv_token_source_indices[local, start : start + count]
                assert torch.equal(where, where.sort().values)
        y = dequantize(token, scale).bfloat16()
        out = layer.combine(y, ids, weights, meta)
        rows = dequantize(*theirs(x)).bfloat16()
        wanted = low.combine(rows[:, None].expand(-1, TOP_K, -1), ids, weights, placement)
        assert torch.equal(out, wanted)
    layer.check()
    layer.finalize()


@pytest.mark.parametrize("kind", KINDS)
def test_the_documented_use(ranks, kind):
    ranks(2, kind)(rounds)


def measured(group: weft.Group) -> None:
    """A loop of dispatches, the last one's rows, a loop of combines: as the original's bench has
    it, with as many tokens as each rank happens to have and ids behind the last for none."""
    layer = make(group)
    generator = torch.Generator().manual_seed(group.rank)
    tokens = MOST // 2 + 3 * group.rank
    x = torch.rand((tokens, HIDDEN), generator=generator).bfloat16().to(group.device)
    ids = torch.rand((tokens, EXPERTS), generator=generator).topk(TOP_K, dim=1).indices.int()
    ids[::3, 1] = EXPERTS
    ids, weights = ids.to(group.device), torch.rand((tokens, TOP_K), generator=generator)
    weights = weights.softmax(dim=1).to(group.device)
    for _ in range(7):
        token, scale, _, meta = layer.dispatch(x, None, ids)
    y = dequantize(token, scale).bfloat16()
    outs = [layer.combine(y, ids, weights, meta) for _ in range(7)]
    rows = dequantize(*theirs(x)).bfloat16().cpu()
    placement = Placement.blocks(EXPERTS, group.size)
    every = rows[:, None].expand(-1, TOP_K, -1)
    wanted = low.combine(every, ids.cpu(), weights.cpu(), placement)
    for out in outs:
        assert torch.equal(out.cpu(), wanted)
    older = meta
    for _ in range(2):
        layer.dispatch(x, None, ids)
    with pytest.raises(OutOfOrder, match="dispatch 7: a later dispatch has taken its slot"):
        layer.combine(y, ids, weights, older)
    layer.dump_dispatch_trace()
    layer.dump_combine_trace()
    group.barrier()
    layer.finalize()


@pytest.mark.parametrize("kind", KINDS)
def test_loops_of_one_call_and_no_traces_without_profiling(ranks, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks(2, kind)(measured)
    assert not Path("prof").exists()


def theirs(x: torch.Tensor, group_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """The original's arithmetic: amax times the rounded 1 / 448, and each number divided by it, on
    a GPU as Triton divides there. Weft's own are blocks of zeros, which stay zeros, and those that
    hold an Inf or a NaN, all of which is NaN."""
    blocks = x.float().unflatten(-1, (-1, group_size))
    reciprocal = (torch.tensor(1.0, dtype=torch.float64) / 448).float().to(x.device)
    amax = blocks.abs().amax(dim=-1)
    scales = amax * reciprocal
    every = scales[..., None].expand_as(blocks)
    if x.device.type == "cuda":
        from tests.compat.triton_quotient import divided

        quotients = divided(blocks, every)
    else:
        quotients = blocks / every
    numbers = quotients.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    signs = blocks.signbit().to(torch.uint8) << 7
    numbers = torch.where(amax[..., None] == 0, signs, numbers)
    whole = blocks.isfinite().all(dim=-1)
    numbers = torch.where(whole[..., None], numbers, 0x7F).flatten(-2)
    return numbers.view(torch.float8_e4m3fn), torch.where(whole, scales, torch.nan)


def edged(seed: int) -> torch.Tensor:
    """bf16 `[MOST, HIDDEN]` of many sizes: also zeros, tiny numbers, an Inf and a NaN, and blocks
    in which x / amax * 448 lies half way between two e4m3 numbers."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-40, 20, (MOST, 1), generator=generator).double()
    x = (torch.randn((MOST, HIDDEN), generator=generator).double() * 2**powers).bfloat16()
    x[0] = 0
    x[1] = x[1].sign() * 1e-40
    x[2] *= 2.0**-100
    x[3, 5], x[4, 200] = float("nan"), -float("inf")
    halves = torch.arange(1, HIDDEN // 2, 2) % 32
    for row, power in ((5, -20), (6, 0), (7, 30)):
        x[row, : len(halves)] = (7 * halves * 2.0**power).bfloat16()
        x[row, ::128] = 7 * 32 * 2.0**power * (1.0, 1.125, 1.25)[row - 5]
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_numbers_and_scales_are_the_originals(dtype, group_size):
    x = torch.cat([edged(seed) for seed in range(32)]).to(dtype)
    numbers, scales = low.sent(x, "fp8", group_size, "fp32_row", "triton_dist")
    wanted, their_scales = theirs(x, group_size)
    assert scales is not None
    assert torch.equal(scales.nan_to_num(7.0), their_scales.nan_to_num(7.0))
    assert torch.equal(numbers.view(torch.uint8), wanted.view(torch.uint8))
    own, _ = quantize(x, "fp8", group_size)  # and the cases are those in which the two differ
    assert int((own.view(torch.uint8) != wanted.view(torch.uint8)).sum()) > 0


def delivered(group: weft.Group, group_size: int) -> None:
    layer = make(group, fp8_gsize=group_size)
    x = [edged(rank) for rank in range(group.size)]
    ids = torch.arange(MOST)[:, None] % EXPERTS + torch.arange(TOP_K)
    ids = (ids % EXPERTS).int().to(group.device)
    token, scale, counts, meta = layer.dispatch(x[group.rank].to(group.device), None, ids)
    assert counts.tolist() == [MOST * TOP_K // EXPERTS * group.size] * (EXPERTS // group.size)
    for local in range(len(counts)):
        for rank in range(group.size):
            packed = int(meta.recv_token_source_count_and_start[local, rank])
            there = slice(packed >> 32, (packed >> 32) + (packed & (2**32 - 1)))
            source = meta.recv_token_source_indices[local, there].cpu().long()
            wanted, scales = theirs(x[rank][source].to(group.device), group_size)
            found = scale[local, there].nan_to_num(7.0)
            assert torch.equal(found, scales.nan_to_num(7.0))
            found = token[local, there].view(torch.uint8)
            assert torch.equal(found, wanted.view(torch.uint8))
    y = torch.zeros(token.shape, dtype=torch.bfloat16, device=group.device)
    layer.combine(y, ids, torch.ones(ids.shape, device=group.device), meta)
    layer.check()
    layer.finalize()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [32, 128])
def test_rows_arrive_with_the_originals_bytes(ranks, kind, group_size):
    ranks(2, kind)(delivered, group_size)


def traced(group: weft.Group) -> None:
    layer = make(group, enable_profiling=True)
    x = torch.zeros((2, HIDDEN), dtype=torch.bfloat16, device=group.device)
    ids = torch.zeros((2, TOP_K), dtype=torch.int32, device=group.device)
    ids += torch.arange(TOP_K, dtype=torch.int32, device=group.device)
    token, _, _, meta = layer.dispatch(x, topk_indices=ids)
    layer.combine(token.bfloat16(), ids, torch.ones((2, TOP_K), device=group.device), meta)
    group.barrier()
    layer.dump_dispatch_trace()
    layer.dump_combine_trace()
    group.barrier()
    layer.finalize()


def test_traces_go_where_the_original_puts_them(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks(2, "threads")(traced)
    for phase in ("dispatch", "combine"):
        for rank in range(2):
            document = json.loads(Path(f"prof/ll_{phase}_RANK_{rank}.json").read_text())
            assert any(event["ph"] == "X" for event in document["traceEvents"])


def refused(group: weft.Group) -> None:
    for changes, text in (
        ({"online_quant_fp8": False}, "online_quant_fp8 is False"),
        ({"local_world_size": 8}, "local_world_size is 8 and world_size 1"),
        ({"rank": 3}, r"rank is 3; it must be an integer in 0\.\.0"),
        (
            {"rank": 1, "world_size": 2, "local_world_size": 2},
            "rank 1 of 2, but group is rank 0 of 1",
        ),
    ):
        with pytest.raises(InvalidArgument, match=text):
            make(group, **changes)
    layer = make(group)
    x = torch.zeros((1, HIDDEN), dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="send_scales is a tensor"):
        layer.dispatch(x, torch.ones(1), torch.zeros((1, TOP_K), dtype=torch.int32))
    with pytest.raises(InvalidArgument, match="topk_indices is None"):
        layer.dispatch(x)
    layer.finalize()


def test_what_weft_does_not_do_is_refused(ranks):
    ranks(1, "threads")(refused)
