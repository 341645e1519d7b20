# SPDX-License-Identifier: Apache-2.0
"""triton_dist's low-latency layer on weft: the documented use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import weft
from tests.compat.buffers import KINDS, layer_of
from tests.compat.test_recipes import original
from weft.errors import OutOfOrder
from weft.lowlatency import reference as low
from weft.placement import Placement
from weft.reference import dequantize

MOST, HIDDEN, TOP_K, EXPERTS = 16, 256, 4, 8


def sent_as(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, scales = original(x, ("triton_dist", False, 128, False))
    return numbers.view(torch.float8_e4m3fn), scales


def measured(group: weft.Group) -> None:
    """Loop over dispatches, then over combines of the last one's rows, as triton_dist's benchmark.

    Ranks have different numbers of tokens; ids from EXPERTS on are of none.
    """
    layer = layer_of(group)
    generator = torch.Generator().manual_seed(group.rank)
    tokens = MOST // 2 + 3 * group.rank
    x = torch.rand((tokens, HIDDEN), generator=generator).bfloat16().to(group.device)
    ids = torch.rand((tokens, EXPERTS), generator=generator).topk(TOP_K, dim=1).indices.int()
    ids[::3, 1] = EXPERTS
    ids, weights = ids.to(group.device), torch.rand((tokens, TOP_K), generator=generator)
    weights = weights.softmax(dim=1).to(group.device)
    for _ in range(7):
        token, scale, counts, meta = layer.dispatch(x, None, ids)
    assert token.shape == (EXPERTS // group.size, group.size * MOST, HIDDEN)
    assert scale.shape == (*token.shape[:2], HIDDEN // 128)
    assert scale.is_contiguous()
    packed = meta.recv_token_source_count_and_start
    assert torch.equal((packed & (2**32 - 1)).sum(dim=1).int(), counts)
    for local, ranges in enumerate(packed.tolist()):
        for each in ranges:
            start, count = each >> 32, each & (2**32 - 1)
            source = meta.recv_token_source_indices[local, start : start + count]
            assert torch.equal(source, source.sort().values)
    y = dequantize(token, scale).bfloat16()
    outs = [layer.combine(y, ids, weights, meta) for _ in range(7)]
    rows = dequantize(*sent_as(x)).bfloat16().cpu()
    placement = Placement.blocks(EXPERTS, group.size)
    every = rows[:, None].expand(-1, TOP_K, -1)
    expected = low.combine(every, ids.cpu(), weights.cpu(), placement, reduce="receiver")
    for out in outs:
        assert torch.equal(out.cpu(), expected)
    older = meta
    for _ in range(2):
        layer.dispatch(x, None, ids)
    with pytest.raises(OutOfOrder, match="dispatch 7: a later dispatch has reused its memory"):
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


def traced(group: weft.Group) -> None:
    layer = layer_of(group, enable_profiling=True)
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


def test_traces_are_written_to_the_originals_path(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks(2, "threads")(traced)
    for phase in ("dispatch", "combine"):
        for rank in range(2):
            document = json.loads(Path(f"prof/ll_{phase}_RANK_{rank}.json").read_text())
            assert any(event["ph"] == "X" for event in document["traceEvents"])
