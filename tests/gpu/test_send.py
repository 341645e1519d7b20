# SPDX-License-Identifier: Apache-2.0
"""Rows that a caller's kernel stores at their owners, in replayed graphs."""

from typing import Any

import pytest
import torch

import weft
from tests.ranks import on_ranks
from tests.rounds import Round, bits
from tests.sending import make
from weft.bench.harness import capture
from weft.grouping.operator import ExpertGroups, Grouped

triton = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")
pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 16, 128
CASE = Round(tokens=(64, 64), hidden=7168, top_k=8, experts=32, router="holes")


@triton.jit
def store_at_owners(
    source, offsets, counts, dst_addr, hidden, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Copy the rows of each expert to their owners, tile by tile, as an epilogue does."""
    expert, block = tl.program_id(0), tl.program_id(2)
    count, start = tl.load(counts + expert), tl.load(offsets + expert)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(1) * ROWS < count:
        mask = (row[:, None] < count) & (column[None, :] < hidden)
        at = (start + row).to(tl.int64)[:, None] * hidden + column[None, :]
        value = tl.load(source + at, mask)
        address = tl.load(dst_addr + start + row, row < count, other=0)
        tl.store(address.to(tl.pointer_type(tl.bfloat16))[:, None] + column[None, :], value, mask)


class Layer:
    def __init__(self, group: weft.Group) -> None:
        self.a2a = make(group, CASE, combine="gemm_push", max_tokens=64, timeout=10.0)
        self.beside = make(group, CASE, combine="pull", max_tokens=64, timeout=10.0)
        self.groups, self.others = ExpertGroups(self.a2a), ExpertGroups(self.beside)
        self.source = torch.randn(self.groups.y_shape, device=group.device).bfloat16()
        self.inputs = tuple(t.clone() for t in CASE.inputs_of(group.rank, group.device)[:3])
        self.out = torch.empty_like(self.inputs[0])

    def product(self, grouped: Grouped) -> None:
        grid = (len(grouped.counts), -(-len(self.source) // ROWS), CASE.hidden // COLUMNS)
        store_at_owners[grid](
            self.source,
            grouped.offsets,
            grouped.counts,
            grouped.dst_addr,
            CASE.hidden,
            ROWS,
            COLUMNS,
        )

    def run(self) -> None:
        self.product(self.groups.gather(self.a2a.dispatch(*self.inputs)))
        self.groups.sent()
        self.a2a.combine_recv(out=self.out)

    def check(self) -> None:
        self.others.gather(self.beside.dispatch(*self.inputs))
        self.others.scatter(self.source)
        expected = self.beside.combine()
        torch.cuda.synchronize()
        self.a2a.check()
        assert torch.equal(bits(self.out), bits(expected))


@on_ranks(2, "cuda")
def test_rows_that_a_gemm_stores_are_combined(group):
    layer = Layer(group)
    for _ in range(3):
        layer.run()
        layer.check()
    graph = capture(layer.run)
    for seed in range(50):
        fresh = CASE.next(seed=seed).inputs_of(group.rank, group.device)
        for own, new in zip(layer.inputs, fresh[:3], strict=True):
            own.copy_(new)
        graph.replay()
        layer.check()
