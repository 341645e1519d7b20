# SPDX-License-Identifier: Apache-2.0
"""One-shot kernels with a resident grid on CPUs: more tokens than CTAs, ranks with other grids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import weft
from tests.allreduce.test_allreduce import every_call, make
from tests.emulator.emulate import EmulatedEntries, compile_emulated
from tests.emulator.watch import watching, ways
from tests.headers import HEADER_BYTES
from tests.patience import hurry
from tests.sums import Sum, quant_specs
from weft.allreduce.kernels import ReducePlan
from weft.errors import PeerTimeout

pytestmark = pytest.mark.slow

TOKENS = 13
CASE = Sum(TOKENS, 640, special=True, bias=1.0)  # 80 vectors: two warps and a half


@dataclass(frozen=True)
class Shape:
    """A launch of one shot: resident clusters, or None for one cluster per token."""

    threads: int
    cluster: int
    clusters: int | None

    def install(self, ar: weft.AllReduce, library: str) -> EmulatedEntries:
        entries = EmulatedEntries(Path(library))
        ar._kernels = entries
        if self.clusters is not None:
            entries.forms["oneshot"] = "oneshot_resident"
        for tokens in range(1, TOKENS + 1):
            clusters = min(tokens, self.clusters or tokens)
            plan = ReducePlan(clusters * self.cluster, self.threads, self.cluster)
            entries.plans["oneshot", tokens] = plan
        return entries


WAVES = Shape(32, 3, None)
ALONE, PAIR, THREE = Shape(64, 1, 1), Shape(32, 2, 2), Shape(32, 3, 3)


def library(count: int, case: Sum = CASE) -> str:
    """Return the kernels of a case, with fault points."""
    return str(compile_emulated(case.config(count, TOKENS), defines=("WEFT_FAULTS=1",)))


def emulated(group: weft.Group, library: str, shapes: list[Shape], case: Sum) -> None:
    with make(group, TOKENS, case) as ar:
        entries = shapes[group.rank].install(ar, library)
        with watching(group, entries.library, ar.site.stride) as watch:
            for seed, tokens in enumerate((1, 2, 9, TOKENS)):
                specs = quant_specs(group.device, case.hidden) if tokens == TOKENS else [None]
                every_call(ar, case.next(tokens=tokens, seed=seed), "oneshot", specs)
        slots = {"slots": range(HEADER_BYTES, 1 << 40)}
        assert ways(watch.events(), slots) == {"slots": {"writes relaxed sys", "reads relaxed sys"}}


@pytest.mark.parametrize(
    "shapes",
    [[ALONE, ALONE], [THREE, PAIR], [PAIR, WAVES]],
    ids=["one cluster", "grids differ", "all fits at the peer"],
)
def test_every_grid_has_the_bits_of_the_reference(ranks, shapes):
    ranks(2, "threads")(emulated, library(2), shapes, CASE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_three_ranks_and_other_numbers(ranks, dtype):
    case = CASE if dtype == CASE.dtype else CASE.next(dtype=dtype, hidden=384, special=False)
    ranks(3, "threads")(emulated, library(3, case), [PAIR, ALONE, THREE], case)


def dropped(group: weft.Group, library: str) -> str:
    """A row is computed twice, for sending and for the sum: its bad index is reported once."""
    with make(group, TOKENS, CASE) as ar:
        PAIR.install(ar, library)
        rows = torch.ones((3, CASE.hidden), dtype=CASE.dtype)
        index = torch.zeros((TOKENS, 2), dtype=torch.int32)
        index[11, 1] = 7
        got = ar.fused(prologue=weft.MoEFinalize(rows, index), backend="oneshot")
        assert got.out is not None
        assert got.out[:, 0].tolist() == [4.0] * 11 + [2.0] + [4.0]
        with pytest.raises(weft.errors.InvalidArgument) as caught:
            ar.check()
        ar.check()
        return str(caught.value)


def test_an_index_out_of_range_is_refused_once(ranks):
    for text in ranks(2, "threads")(dropped, library(2)):
        assert "index[11, 1] of a MoEFinalize is 7" in text
        assert "reports since" not in text


def send_half_rows(group: weft.Group, library: str) -> str:
    """Rank 1 sends the first half of each row, so some lanes of a cluster miss their vectors."""
    with make(group, TOKENS, CASE) as ar:
        PAIR.install(ar, library)
        hurry(ar, 0.5)
        reported = ""
        if group.rank == 0:
            sizes = ar.config
            size = (2 * sizes.direct, sizes.row_bytes)
            rows = ar.heap.tensor(size, torch.uint8, offset=sizes.rows_offset)
            rows[:, : sizes.row_bytes // 2] = 0
            x, weight = CASE.rows(0, group.device), CASE.shared(group.device)[1]
            norm = torch.full_like(x, 7.0)
            with pytest.raises(PeerTimeout) as caught:
                ar.fused(x, weight=weight, norm_out=norm, backend="oneshot")
            reported = str(caught.value)
            assert (norm[:, CASE.hidden // 2 :] == 7.0).all(), (
                "of what did not come nothing is made"
            )
        group.barrier()
        return reported


def test_a_grid_ends_when_half_of_every_row_is_missing(ranks):
    assert "did not arrive from rank 1" in ranks(2, "threads")(send_half_rows, library(2))[0]
