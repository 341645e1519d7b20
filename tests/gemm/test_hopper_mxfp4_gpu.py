"""MXFP4 weights on a GPU: the bits of FP8 weights with the same values, whatever the tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gemm.cases import UNTOUCHED, Case, Made, Output, gated
from weft.gemm import (
    STORE,
    Epilogue,
    GatedQuant,
    Push,
    WgmmaPlan,
    grouped_gemm,
    quantize_mxfp4,
    unpack_mxfp4,
)
from weft.gemm.config import FP8, MXFP4, MXFP4_BLOCK_MS
from weft.gemm.kernels import OPERANDS, GemmShape, preload
from weft.gemm.mxfp4 import pack_mxfp4

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16

CASES = {
    "contiguous": Case(MXFP4, counts=(5, 0, 130, 1, 64), n=512, k=1024),
    "masked": Case(MXFP4, counts=(17, 0, 3, 129), n=512, k=1024, masked=True),
    "packed": Case(MXFP4, counts=(3, 1, 7, 0, 200), align=1, slack=0, n=512),
    "no rows": Case(MXFP4, counts=(0, 0, 0), n=512),
    "k-major": Case(MXFP4, counts=(40, 9), k_major=True, n=512),
    "many experts": Case(MXFP4, counts=tuple(e % 5 for e in range(200)), n=512, k=128),
    "odd steps": Case(MXFP4, counts=(33, 100), n=256, k=640),
    "high": Case(MXFP4, counts=(97, 144, 160, 161, 192, 321, 545), n=512, k=1024),
    "deep": Case(MXFP4, counts=(100, 33, 250), n=512, k=7168),
    "biased": Case(MXFP4, counts=(5, 0, 130, 1, 64), n=512, k=1024, bias=True),
}
EVERY_TILE = ("contiguous", "high", "biased")
GATINGS = (None, (1.0, 0.0, None), (1.702, 1.0, 0.7))


def block_ms(name: str) -> tuple[int, ...]:
    return MXFP4_BLOCK_MS if name in EVERY_TILE else (32, 128)


def shapes_of(name: str) -> Iterator[GemmShape]:
    case = CASES[name]
    more: dict[str, Any] = {"operand": OPERANDS[MXFP4], "bias": "bf16" if case.bias else "none"}
    for rows in block_ms(name):
        sizes = (len(case.counts), case.n, case.k, WgmmaPlan(rows))
        yield GemmShape(*sizes, "store", **more)
        yield GemmShape(*sizes, "gated_fp8", **more)
        if name == "high":
            yield GemmShape(*sizes, "push", **more)
            yield GemmShape(*sizes, "push", flag_in_data=True, **more)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All shapes at once, or the tests would compile one after the other."""
    torch.zeros(1, device="cuda")  # makes the context that kernels are loaded into
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("MXFP4 weights are for Hopper")
    preload([shape for name in CASES for shape in shapes_of(name)])


def same_bits(ours: Output, theirs: Output) -> bool:
    pairs = [(ours.numbers, theirs.numbers)]
    if ours.scales is not None and theirs.scales is not None:
        pairs.append((ours.scales, theirs.scales))
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_oracle_with_any_tiles(
    name: str, gating: tuple[float, float, float | None] | None
):
    # Tensor cores align FP8 products before they add them: of rows that span the whole window the
    # smallest numbers are lost, with FP8 weights as well.
    made = replace(CASES[name], window=4).make("cuda")
    wanted, tolerance = made.oracle(), 2.0**-7
    epilogue: Epilogue = STORE
    if gating is not None:
        epilogue = how = GatedQuant(*gating)
        wanted, tolerance = gated(how, wanted), 0.08
    first = None
    for rows in block_ms(name):
        ours = made.call(epilogue, WgmmaPlan(rows))
        ours.agrees(wanted, tolerance)
        first = first or ours
        assert same_bits(ours, first), rows


@pytest.mark.parametrize("name", ["contiguous", "masked", "high", "deep", "odd steps"])
def test_bits_are_those_of_fp8_weights(name: str):
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
    """Row r multiplies the blocks of exponent r of its weights' rows alone, down to 2^-14."""
    case, seed = Case(MXFP4, counts=(16,), n=256, k=512), torch.Generator().manual_seed(5)
    made = case.make()
    values = torch.randint(0, 256, (1, case.n, case.k // 2), generator=seed).byte()
    exponents = torch.arange(case.k // 32).clamp(max=14)
    b, b_scale = pack_mxfp4(values, (exponents + 120).byte().expand(1, case.n, -1).contiguous())
    rows = torch.zeros(case.rows, case.k)
    for row, exponent in enumerate(exponents.tolist()):
        rows[row, exponent * 32 : exponent * 32 + 32] = torch.randint(1, 4, (32,), generator=seed)
    wanted = (rows.double() @ unpack_mxfp4(b, b_scale)[0].double().T)[:16].bfloat16()
    given = made.given | {"a_scale": torch.ones_like(made.given["a_scale"]), "b_scale": b_scale}
    moved = {key: tensor.cuda() for key, tensor in given.items()}
    got = grouped_gemm(rows.to(FP8).cuda(), b.cuda(), plan=WgmmaPlan(32), **moved)
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got[:16].cpu(), wanted)


@pytest.mark.parametrize("rows", MXFP4_BLOCK_MS)
def test_rows_are_pushed_to_dst_addr_or_nowhere(rows: int):
    case, plan = CASES["high"], WgmmaPlan(rows)
    made = case.make("cuda")
    whole = made.call(STORE, plan).numbers.reshape(case.rows, case.n)
    order = torch.randperm(case.rows, generator=torch.Generator().manual_seed(1)).cuda()
    there = torch.full((case.rows, case.n), UNTOUCHED, dtype=BF16, device="cuda")
    dst_addr = there.data_ptr() + order * case.n * 2
    nowhere = torch.arange(case.rows, device="cuda") % 7 == 3
    dst_addr[nowhere] = 0
    live = case.live().cuda() & ~nowhere
    for aborted in (None, 0, 1):
        there.fill_(UNTOUCHED)
        push = Push(dst_addr, BF16)
        if aborted is not None:
            flag = torch.full((1,), aborted, dtype=torch.int32, device="cuda")
            push = Push(dst_addr, BF16, flag_in_data=True, abort_flag=flag)
        made.call(push, plan)
        came, stored = live & (aborted != 1), there[order]
        assert torch.equal(stored[came], whole[came])
        assert bool((stored[~came] == UNTOUCHED).all())


@pytest.mark.parametrize("num_sms", [1, 2, 7, 40])
def test_few_sms_make_the_same(num_sms: int):
    made = CASES["contiguous"].make("cuda")
    whole = made.call(plan=WgmmaPlan(64))
    assert same_bits(made.call(plan=WgmmaPlan(64), num_sms=num_sms), whole)


@pytest.mark.parametrize(
    ("programmatic", "prefetch"), [(False, False), (True, False), (True, True)]
)
def test_graphs_replay_with_other_counts(programmatic: bool, prefetch: bool):
    """Both GEMMs one after the other, as a layer has them; counts change between replays."""
    up: Made = Case(MXFP4, counts=(70, 130, 1), n=1024, k=512, align=1, slack=0).make("cuda")
    rows = up.case.rows
    down, down_scale = pack_mxfp4(*quantize_mxfp4(torch.randn(3, 512, 512, device="cuda")))
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
