# SPDX-License-Identifier: Apache-2.0
"""Hopper's grouped GEMM on a GPU: the bits of Triton's with any tile, and no other row written.

Triton's has no MXFP4 weights: there all tiles make one result, that of FP8 weights of these values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tests.gemm.cases import (
    EXPONENTS,
    LAYOUTS,
    UNTOUCHED,
    Case,
    every_exponent,
    gated,
    hold_damage_to_its_row,
    hold_to_rows,
    shape_of,
)
from weft.errors import OutOfOrder
from weft.gemm import (
    STORE,
    Epilogue,
    Gated,
    GatedQuant,
    WgmmaPlan,
    grouped_gemm,
    pack_mxfp4,
    plan,
    quantize_mxfp4,
    unpack_mxfp4,
)
from weft.gemm.config import BLOCK_MS, FP8, FP8_BLOCK_MS, MXFP4, MXFP4_BLOCK_MS
from weft.gemm.kernels import GemmShape, preload

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16

CASES = LAYOUTS | {
    "odd steps": Case(counts=(33, 100), n=256, k=640),
    "normal": Case(counts=(97, 112, 128, 129, 192, 191, 256, 224, 257, 289, 545), n=512, k=1024),
    "deep": Case(counts=(100, 33, 250), n=512, k=7168),
    "bf16": Case(BF16, counts=(5, 0, 130, 1, 64), n=272, k=200, bias=True),
    "bf16, high": Case(BF16, counts=(150, 257, 192, 48, 224), n=768, k=2880),
    "fp16, masked": Case(torch.float16, counts=(17, 0, 3, 200), n=512, k=1024, masked=True),
    "mxfp4, high": Case(MXFP4, counts=(97, 144, 160, 161, 192, 321, 545), n=512, k=1024),
    "mxfp4, biased": Case(MXFP4, counts=(5, 0, 130, 1, 64), n=512, k=1024, bias=True),
}
CASES |= {
    f"mxfp4, {name}": replace(CASES[name], dtype=MXFP4)
    for name in (*LAYOUTS, "odd steps", "deep")
    if name not in ("one expert", "k-major, masked")
}
# The others: swapped tiles alone, and both.
EVERY_TILE = {"contiguous", "normal", "deep", "bf16, high"}
EVERY_TILE |= {"mxfp4, contiguous", "mxfp4, high", "mxfp4, biased"}
PUSHED = ("normal", "bf16, high", "mxfp4, high")
GATINGS = (Gated(), Gated(1.702, 1.0, 0.7), Gated(beta=4.0, linear_beta=25.0))


def block_ms(name: str) -> tuple[int, ...]:
    if name not in EVERY_TILE:
        return (32, 128)
    return {FP8: FP8_BLOCK_MS, MXFP4: MXFP4_BLOCK_MS}.get(CASES[name].dtype, BLOCK_MS)


def shapes_of(name: str) -> Iterator[GemmShape]:
    for rows in block_ms(name):
        for epilogue in ("store", "gated", "push") if name in PUSHED else ("store", "gated"):
            shape = shape_of(CASES[name], rows, epilogue)
            yield shape
            if epilogue == "push":
                yield replace(shape, flag_in_data=True)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All shapes at once, or the tests would compile one after the other."""
    torch.zeros(1, device="cuda")  # makes the context that kernels are loaded into
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("WgmmaPlan's kernel is for Hopper")
    preload([shape for name in CASES for shape in shapes_of(name)])


@pytest.mark.parametrize("gating", [None, *GATINGS])
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_other_kernel(name: str, gating: Gated | None):
    case = CASES[name]
    if case.dtype == MXFP4:
        # Tensor cores align FP8 products before they add them: of rows that span the whole window
        # the smallest numbers are lost, with FP8 weights as well.
        case = replace(case, window=4)
    made = case.make("cuda")
    wanted, tolerance = made.oracle(), 2.0**-7
    epilogue: Epilogue = STORE
    if gating is not None:
        epilogue = how = GatedQuant(**asdict(gating)) if case.fp8_rows else gating
        wanted, tolerance = gated(how, wanted), 0.08 if case.fp8_rows else 2.0**-6
    theirs = None
    if case.dtype != MXFP4:
        tile = plan(4, 32, case.n, case.k, case.dtype, gated=gating is not None)
        theirs = made.call(epilogue, tile)
    for rows in block_ms(name):
        ours = made.call(epilogue, WgmmaPlan(rows))
        ours.agrees(wanted, tolerance)
        theirs = theirs or ours
        assert ours.same_bits(theirs), rows


@pytest.mark.parametrize(
    "name", ["mxfp4, contiguous", "mxfp4, masked", "mxfp4, high", "mxfp4, deep", "mxfp4, odd steps"]
)
def test_bits_of_mxfp4_are_those_of_fp8_weights(name: str):
    """Sums of the same numbers in the same order; the power of a column commutes with rounding."""
    case = CASES[name]
    made = case.make("cuda")
    factor = made.given["b_scale"]
    fp8 = unpack_mxfp4(made.b, torch.ones_like(factor)).to(FP8)
    ones = torch.ones(len(factor), case.n // 128, case.k // 128, device="cuda")
    theirs = replace(made, b=fp8, given=made.given | {"b_scale": ones}).call(plan=WgmmaPlan(64))
    wanted, live = theirs.numbers.view(case.rows, -1).float(), case.live()
    for expert, (start, count) in enumerate(zip(case.starts, case.counts, strict=False)):
        wanted[start : start + count] *= factor[expert]
    for rows in block_ms(name):
        ours = made.call(plan=WgmmaPlan(rows)).numbers.view(case.rows, -1)
        assert torch.equal(ours[live], wanted[live].bfloat16()), rows


def test_every_number_at_every_exponent():
    made, live = every_exponent("cuda"), EXPONENTS.live()
    got = made.call(plan=WgmmaPlan(32)).numbers.cpu()
    assert torch.equal(got[live], made.oracle()[live].to(BF16))


@pytest.mark.parametrize(
    ("name", "rows"),
    [(name, rows) for name in PUSHED for rows in block_ms(name)],
)
def test_rows_are_pushed_to_dst_addr_or_nowhere(name: str, rows: int):
    made, tile = CASES[name].make("cuda"), WgmmaPlan(rows)
    whole = made.call(STORE, tile).numbers.reshape(made.case.rows, made.case.n)
    for aborted in (None, 0, 1):
        stored, came = made.pushed(tile, BF16, aborted=aborted)
        assert torch.equal(stored[came], whole[came])
    stored, came = made.pushed(tile, torch.float16)
    assert torch.allclose(stored[came].float(), whole[came].float(), rtol=2.0**-7, atol=0.02)


@pytest.mark.parametrize("rows", [32, 160])
def test_counts_and_starts_that_lie_touch_no_row_of_others(rows: int):
    hold_to_rows(CASES["contiguous"].make("cuda"), WgmmaPlan(rows))


def test_damage_stays_in_its_row():
    plans = (WgmmaPlan(rows) for rows in (160, 32, 128, 256))
    hold_damage_to_its_row(CASES["normal"].make("cuda"), *plans)


@pytest.mark.parametrize("num_sms", [1, 2, 7, 40])
@pytest.mark.parametrize("name", ["contiguous", "bf16", "mxfp4, contiguous"])
def test_few_sms_make_the_same(name: str, num_sms: int):
    made = CASES[name].make("cuda")
    whole = made.call(plan=WgmmaPlan(64))
    assert made.call(plan=WgmmaPlan(64), num_sms=num_sms).same_bits(whole)


@pytest.mark.parametrize(
    ("programmatic", "prefetch"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("dtype", [FP8, MXFP4])
def test_graphs_replay_with_other_counts(dtype: torch.dtype, programmatic: bool, prefetch: bool):
    """Both GEMMs one after the other, as a layer has them; counts change between replays."""
    up = Case(dtype, counts=(70, 130, 1), n=1024, k=512, align=1, slack=0).make("cuda")
    rows, wide = up.case.rows, torch.randn(3, 512, 512, device="cuda")
    down, down_scale = wide.to(FP8), torch.rand(3, 4, 4, device="cuda")
    if dtype == MXFP4:
        down, down_scale = pack_mxfp4(*quantize_mxfp4(wide))
    out = torch.empty(rows, 512, dtype=BF16, device="cuda")
    act = torch.empty(rows, 512, dtype=FP8, device="cuda"), torch.empty(rows, 4, device="cuda")
    given = up.given | {"programmatic_launch": programmatic, "plan": WgmmaPlan(128)}
    given["prefetch_weights"] = prefetch

    def both() -> None:
        grouped_gemm(up.a, up.b, out=act, epilogue=GatedQuant(), **given)
        mine = given | {"a_scale": act[1], "b_scale": down_scale}
        grouped_gemm(act[0], down, out=out, **mine)

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            both()
    for counts in ((70, 130, 1), (0, 0, 1), (70, 97, 0)):
        up.given["counts"].copy_(torch.tensor(counts))
        out.fill_(UNTOUCHED)
        both()
        wanted = out.clone()
        out.fill_(UNTOUCHED)
        graph.replay()
        assert torch.equal(out, wanted)


def test_weights_come_early_and_rows_do_not():
    """A chain of GEMMs in which each one's rows are what the previous one stores at its end."""
    experts, size = 3, 512
    rows = torch.randn(400, size, device="cuda").bfloat16()
    weights = torch.randn(experts, size, size, device="cuda").bfloat16() * size**-0.5
    counts = torch.tensor([200, 37, 150], dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, 200, 240, 400], dtype=torch.int32, device="cuda")
    given: dict[str, Any] = {"counts": counts, "offsets": offsets, "plan": WgmmaPlan(160)}

    def chain(**how: Any) -> torch.Tensor:
        x, y = rows.clone(), torch.zeros_like(rows)
        for _ in range(40):
            grouped_gemm(x, weights, out=y, **given, **how)
            x, y = y, x
        return x

    wanted = chain()
    live = [slice(0, 200), slice(200, 237), slice(240, 390)]
    for _ in range(50):
        got = chain(programmatic_launch=True, prefetch_weights=True)
        assert all(torch.equal(got[part], wanted[part]) for part in live)


def test_counts_are_read_as_the_kernel_before_the_last_left_them():
    """In each round of a graph the counts change, then a GEMM runs, then one that prefetches."""
    experts, size, rounds = 3, 512, 20
    rows = torch.randn(400, size, device="cuda").bfloat16()
    weights = torch.randn(experts, size, size, device="cuda").bfloat16() * size**-0.5
    drawn = torch.randint(0, 130, (rounds, experts), device="cuda", dtype=torch.int32)
    counts = torch.zeros(experts, dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, 130, 260, 400], dtype=torch.int32, device="cuda")
    other = torch.full_like(counts, 130)  # all rows that any count may ask for
    h, out = torch.zeros_like(rows), torch.empty(rounds, *rows.shape, device="cuda").bfloat16()
    given: dict[str, Any] = {"offsets": offsets, "plan": WgmmaPlan(160)}

    def play(prefetch: bool) -> torch.Tensor:
        out.fill_(UNTOUCHED)
        for i in range(rounds):
            counts.copy_(drawn[i])
            how: dict[str, Any] = {"programmatic_launch": prefetch}
            grouped_gemm(rows, weights, counts=other, out=h, **how, **given)
            how["prefetch_weights"] = prefetch
            grouped_gemm(h, weights, counts=counts, out=out[i], **how, **given)
        return out.clone()

    wanted = play(False)
    play(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = play(True)
    for _ in range(30):
        graph.replay()
        assert torch.equal(got, wanted)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_does_not_load():
    made = Case(counts=(3,), n=768, k=384).make("cuda")
    graph = torch.cuda.CUDAGraph()
    out = torch.empty(made.case.rows, 768, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(OutOfOrder, match="before capturing"), torch.cuda.graph(graph):
        grouped_gemm(made.a, made.b, out=out, plan=WgmmaPlan(32), **made.given)
