# SPDX-License-Identifier: Apache-2.0
"""The all-reduce's kernels in the emulator give the reference's bits in every launch shape."""

from pathlib import Path

import pytest
import torch

import weft
from tests.allreduce.test_allreduce import every_call, make
from tests.emulator.emulate import EmulatedEntries, compile_emulated
from tests.emulator.watch import watching, ways
from tests.headers import HEADER_BYTES
from tests.sums import BACKENDS, Sum, play, quant_specs
from weft.allreduce.kernels import ReducePlan
from weft.errors import PeerTimeout

pytestmark = pytest.mark.slow

TOKENS = 5


def oneshot(tokens: int, threads: int, cluster: int) -> ReducePlan:
    return ReducePlan(tokens * cluster, threads, cluster)


def twoshot(threads: int, cluster: int, pushers: int, reducers: int) -> ReducePlan:
    return ReducePlan((pushers + reducers) * cluster, threads, cluster, pushers * cluster)


# 384 bf16 are 48 vectors: a warp and a half.
SHAPES = [
    (oneshot(TOKENS, 64, 1), twoshot(64, 1, 1, 1), twoshot(32, 1, 1, 1)),
    (oneshot(TOKENS, 32, 2), twoshot(32, 2, 1, 1), twoshot(32, 1, 2, 1)),
    (oneshot(TOKENS, 32, 3), twoshot(32, 2, 1, 2), twoshot(32, 2, 1, 1)),
    (oneshot(TOKENS, 32, 4), twoshot(64, 1, 2, 1), twoshot(64, 1, 1, 2)),
]


def emulated(
    group: weft.Group, library: str, shapes: tuple[ReducePlan, ...], case: Sum, many: bool
) -> None:
    with make(group, TOKENS, case) as ar:
        entries = EmulatedEntries(Path(library))
        ar._kernels = entries
        for backend, plan in zip(BACKENDS, shapes, strict=True):
            entries.plans[backend, TOKENS] = plan
        with watching(group, entries.library, ar.site.stride) as watch:
            for backend in BACKENDS:
                specs = quant_specs(group.device, case.hidden, group.rank) if many else [None]
                # At the receiver other threads write a row than those that have read it to send
                # it: what the peers made of it orders them, and that no watch follows.
                every_call(ar, case, backend, specs, in_place=not case.differ)
                play(ar, case.next(seed=9), backend)
        slots = {"slots": range(HEADER_BYTES, 1 << 40)}
        # Rows, trailers and calls say themselves of which round they are.
        expected = {"slots": {"writes relaxed sys", "reads relaxed sys"}}
        assert ways(watch.events(), slots) == expected


def half_a_row(
    group: weft.Group, library: str, shapes: tuple[ReducePlan, ...], case: Sum, backend: str
) -> str:
    """Rank 1 sends only the first half of each row: some lanes receive theirs, others never."""
    with make(group, TOKENS, case, first_timeout=0.5) as ar:
        entries = EmulatedEntries(Path(library))
        ar._kernels = entries
        entries.plans[backend, TOKENS] = shapes[BACKENDS.index(backend)]
        x = case.rows(group.rank, group.device)
        reported = ""
        if group.rank == 0:
            sizes = ar.config
            slots = ar.heap.tensor(
                (2 * (sizes.direct + sizes.owned), sizes.row_bytes),
                torch.uint8,
                offset=sizes.rows_offset,
            )
            slots[:, : sizes.row_bytes // 2] = 0
            try:
                ar.fused(x, weight=case.shared(group.device)[1], backend=backend)
            except PeerTimeout as error:
                reported = str(error)
            with pytest.raises(PeerTimeout):
                ar.fused(x, backend=backend)
        group.barrier()
        return reported


def library(count: int, case: Sum) -> str:
    return str(compile_emulated(case.config(count, TOKENS)))


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("shapes", range(len(SHAPES)))
def test_every_launch_shape_has_the_bits_of_the_reference(ranks, shapes, differ):
    case = Sum(TOKENS, 384, special=True, bias=1.0, differ=differ)
    ranks(2, "threads")(emulated, library(2, case), SHAPES[shapes], case, shapes == 1)


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shapes", [0, 2])
def test_kernels_end_when_half_of_every_row_is_missing(ranks, shapes, backend, differ):
    case = Sum(TOKENS, 384, differ=differ)
    reported = ranks(2, "threads")(half_a_row, library(2, case), SHAPES[shapes], case, backend)
    assert "did not arrive from rank 1" in reported[0]


@pytest.mark.parametrize(
    "case",
    [
        Sum(TOKENS, 384, torch.float16, weight_dtype=torch.float32),
        Sum(TOKENS, 256, torch.float32),
        Sum(TOKENS, 256, torch.float32, differ=True),
    ],
    ids=lambda case: f"{case.dtype} {case.epilogue_at}",
)
def test_other_numbers(ranks, case):
    shapes = (oneshot(TOKENS, 32, 2), twoshot(32, 2, 1, 2), twoshot(32, 1, 1, 1))
    ranks(3, "threads")(emulated, library(3, case), shapes, case, True)
