# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMM on a GPU: every layout and epilogue with every kind of tile, bits and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.gemm.cases import CASES as ALL
from tests.gemm.cases import LARGE, UNTOUCHED, Case, Made, gated
from weft.gemm import STORE, Epilogue, Gated, GatedQuant, GemmPlan, grouped_gemm, plan
from weft.gemm.config import FP8

pytestmark = pytest.mark.gpu

BF16, HALF = torch.bfloat16, torch.float16
CASES = {name: case for name, case in (ALL | LARGE).items() if case.dtype == FP8}
CASES["bias"] = Case(counts=(33, 2), bias=True, n=512)


def tiles(dtype: torch.dtype, gating: bool) -> Iterator[GemmPlan]:
    """One plan of each kind; results must not depend on it."""
    block_k, block_n = 128 if dtype == FP8 else 64, 256 if gating else 128
    few = GemmPlan(16, block_n, block_k, swap=True, stages=3)
    many = GemmPlan(128, 256, block_k, stages=3, warps=8)
    yield few
    yield replace(few, block_m=32, flatten=False)
    yield replace(few, block_m=64, ctas_per_sm=2)
    yield GemmPlan(64, block_n, block_k, stages=3, ctas_per_sm=2)
    yield many
    yield replace(many, flatten=False)
    yield GemmPlan(64, block_n, block_k, stages=3, flatten=False)


def agreed(
    made: Made, wanted: torch.Tensor, epilogue: Epilogue, tile: GemmPlan
) -> tuple[torch.Tensor, ...]:
    """Numbers and scales of a call that were compared with what is wanted."""
    out = made.call(epilogue, tile, num_sms=5)
    if isinstance(epilogue, Gated):
        wanted = gated(epilogue, wanted)
    # FP8 tensor cores leave out about 2^-13 of a sum, and gates steeper than SwiGLU multiply that.
    steep = isinstance(epilogue, Gated) and (epilogue.beta is not None or epilogue.alpha > 1)
    out.agrees(wanted, 0.08 if isinstance(epilogue, GatedQuant) else 2.0 ** (-6 if steep else -7))
    return (out.numbers,) if out.scales is None else (out.numbers, out.scales)


@pytest.mark.parametrize("dtype", [FP8, BF16])
@pytest.mark.parametrize(
    "epilogue", [STORE, Gated(1.702, 1.0, 0.7), GatedQuant(), Gated(beta=0.5, linear_beta=3.0)]
)
def test_every_tile_makes_the_same_bits(epilogue: Epilogue, dtype: torch.dtype):
    made = replace(CASES["contiguous"], dtype=dtype).make("cuda")
    wanted = made.oracle()
    first: tuple[torch.Tensor, ...] = ()
    for tile in tiles(dtype, isinstance(epilogue, Gated)):
        got = agreed(made, wanted, epilogue, tile)
        first = first or got
        for ours, theirs in zip(got, first, strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), tile


@pytest.mark.parametrize("dtype", [FP8, BF16, HALF])
@pytest.mark.parametrize("name", CASES)
def test_layouts(name: str, dtype: torch.dtype):
    made = replace(CASES[name], dtype=dtype).make("cuda")
    wanted = made.oracle()
    for rows in (16, 128):
        for epilogue in (STORE, GatedQuant()) if dtype == FP8 else (STORE,):
            tile = plan(4, rows, 512, 1024, dtype, gated=epilogue is not STORE)
            agreed(made, wanted, epilogue, tile)


def test_a_rows_bits_do_not_depend_on_its_neighbours():
    """The same rows, alone and among others, in every kind of tile."""
    many = Case(counts=(130,), n=512, k=1024).make("cuda")
    whole = many.call().numbers
    for count in (1, 33, 100):
        many.given["counts"].fill_(count)
        for tile in tiles(FP8, gating=False):
            part = many.call(plan=tile).numbers
            assert torch.equal(part[:count], whole[:count])


def test_quantising_has_the_bits_of_the_reference():
    """Integers and alpha 0 make everything before it exact."""
    made = Case(counts=(150,), n=512, dtype=BF16).make("cuda")
    made.a.copy_(torch.randint(-3, 4, made.a.shape))
    made.b.copy_(torch.randint(-3, 4, made.b.shape))
    made.b[:, :128] = 0
    made.a[3, 0], made.a[5, 0] = torch.nan, torch.inf
    on_cpu = Made(
        made.case, made.a.cpu(), made.b.cpu(), {k: v.cpu() for k, v in made.given.items()}
    )
    gating = GatedQuant(alpha=0.0, offset=0.5)
    theirs = on_cpu.call(gating)
    assert theirs.scales is not None
    for tile in tiles(BF16, gating=True):
        ours = made.call(gating, tile)
        assert ours.scales is not None
        assert torch.equal(ours.scales.cpu().nan_to_num(-1), theirs.scales.nan_to_num(-1))
        assert torch.equal(ours.read().nan_to_num(-1), theirs.read().nan_to_num(-1))


@pytest.mark.parametrize("dtype", [FP8, BF16])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_pushed_to_their_dst_addr(masked: bool, dtype: torch.dtype):
    made = Case(counts=(40, 0, 19), n=512, masked=masked, dtype=dtype).make("cuda")
    wanted = made.call().numbers.reshape(made.case.rows, -1)
    for tile in tiles(dtype, gating=False):
        stored, came = made.pushed(tile)
        assert torch.equal(stored[came], wanted[came])


def test_odd_n_and_k():
    for dtype in (BF16, HALF):
        made = Case(counts=(70, 3), n=208, k=200, dtype=dtype, bias=True).make("cuda")
        for tile in tiles(dtype, gating=False):
            made.call(plan=tile).agrees(made.oracle())
        for tile in tiles(dtype, gating=True):
            made.call(Gated(), tile).agrees(gated(Gated(), made.oracle()))


@pytest.mark.parametrize("programmatic", [False, True])
def test_a_captured_graph_follows_its_counts(programmatic: bool):
    case = Case(counts=(60, 60, 60), n=512, k=1024, masked=True)
    made = case.make("cuda")
    up = torch.empty(3, case.max_rows, 512, device="cuda", dtype=BF16)
    second = Case(counts=(60, 60, 60), n=256, k=512, masked=True, dtype=BF16).make("cuda")
    down = torch.empty(3, case.max_rows, 256, device="cuda", dtype=BF16)

    def both() -> None:
        grouped_gemm(made.a, made.b, out=up, programmatic_launch=programmatic, **made.given)
        grouped_gemm(
            up, second.b, counts=made.given["counts"], out=down, programmatic_launch=programmatic
        )

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    whole = down.clone()
    for counts in ((60, 60, 60), (0, 0, 0), (1, 60, 17), (33, 0, 2)):
        made.given["counts"].copy_(torch.tensor(counts))
        down.fill_(UNTOUCHED)
        graph.replay()
        for expert, count in enumerate(counts):
            assert torch.equal(down[expert, :count], whole[expert, :count])
            assert bool((down[expert, count:] == UNTOUCHED).all())


def test_results_beyond_two_to_the_31():
    rows, n = 300_000, 8192
    a = torch.ones(rows, 128, device="cuda", dtype=BF16)
    a[-1] = 2
    b = torch.ones(1, n, 128, device="cuda", dtype=BF16)
    counts = torch.tensor([rows], dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0], dtype=torch.int32, device="cuda")
    out = grouped_gemm(a, b, counts=counts, offsets=offsets)
    assert isinstance(out, torch.Tensor)
    assert out[:-1].amin().item() == out[:-1].amax().item() == 128
    assert out[-1].amin().item() == 256


def test_counts_are_held_to_the_rows_there_are():
    made = Case(masked=True, counts=(4, 2), slack=0, dtype=torch.bfloat16).make("cuda")
    whole = made.call().numbers
    made.given["counts"].copy_(torch.tensor([1000, 0]))
    got = made.call().numbers
    assert torch.equal(got[0], whole[0])
    assert bool((got[1] == UNTOUCHED).all())


def test_no_rows_at_all():
    made = Case(dtype=BF16).make("cuda")
    given = made.given | {"offsets": torch.zeros(4, dtype=torch.int32, device="cuda")}
    given["counts"] = torch.zeros(3, dtype=torch.int32, device="cuda")
    out = grouped_gemm(made.a[:0], made.b, **given)
    assert isinstance(out, torch.Tensor)
    assert out.shape == (0, 256)
