# SPDX-License-Identifier: Apache-2.0
"""Hopper's grouped GEMM on a GPU: graphs, chains of kernels and captures."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gemm.cases import CASES, LARGE, UNTOUCHED, Case
from weft.errors import OutOfOrder
from weft.gemm import (
    GatedQuant,
    GemmPlan,
    WgmmaPlan,
    grouped_gemm,
    pack_mxfp4,
    quantize_mxfp4,
    unpack_mxfp4,
)
from weft.gemm.config import FP8, MXFP4, MXFP4_BLOCK_MS

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("WgmmaPlan's kernel is for Hopper")


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4, masked", "mxfp4, heights", "mxfp4, deep"])
def test_bits_of_mxfp4_are_those_of_fp8_weights(name: str):
    """Sums of the same values in the same order; a column's power of two commutes with rounding."""
    case = replace((CASES | LARGE)[name], bias=False)
    made = case.make("cuda")
    factor = made.given["b_scale"]
    fp8 = unpack_mxfp4(made.b, torch.ones_like(factor)).to(FP8)
    ones = torch.ones(len(factor), case.n // 128, case.k // 128, device="cuda")
    theirs = replace(made, b=fp8, given=made.given | {"b_scale": ones}).call(plan=WgmmaPlan(64))
    expected, live = theirs.numbers.view(case.rows, -1).float(), case.live()
    for expert, (start, count) in enumerate(zip(case.starts, case.counts, strict=False)):
        expected[start : start + count] *= factor[expert]
    for rows in MXFP4_BLOCK_MS:
        ours = made.call(plan=WgmmaPlan(rows)).numbers.view(case.rows, -1)
        assert torch.equal(ours[live], expected[live].bfloat16()), rows


@pytest.mark.parametrize(
    ("programmatic", "prefetch"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize(
    ("dtype", "plan", "num_sms"),
    [(FP8, WgmmaPlan(128), None), (FP8, WgmmaPlan(256), 4), (MXFP4, WgmmaPlan(128), None)]
    + [(FP8, GemmPlan(64, 256, 128, stages=3), None)],
)
def test_graphs_replay_with_other_counts(dtype, plan, num_sms, programmatic, prefetch):
    """Run both GEMMs in turn, as a layer does; counts change between replays."""
    up = Case(dtype, counts=(70, 130, 1), n=1024, k=512, align=1, slack=0).make("cuda")
    rows, wide = up.case.rows, torch.randn(3, 512, 512, device="cuda")
    down, down_scale = wide.to(FP8), torch.rand(3, 4, 4, device="cuda")
    if dtype == MXFP4:
        down, down_scale = pack_mxfp4(*quantize_mxfp4(wide))
    out = torch.empty(rows, 512, dtype=BF16, device="cuda")
    act = torch.empty(rows, 512, dtype=FP8, device="cuda"), torch.empty(rows, 4, device="cuda")
    kwargs = up.given | {"programmatic_launch": programmatic, "plan": plan}
    kwargs |= {"prefetch_weights": prefetch, "num_sms": num_sms}

    def both() -> None:
        grouped_gemm(up.a, up.b, out=act, epilogue=GatedQuant(), **kwargs)
        own = kwargs | {"a_scale": act[1], "b_scale": down_scale}
        grouped_gemm(act[0], down, out=out, **own)

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
        expected = out.clone()
        out.fill_(UNTOUCHED)
        graph.replay()
        assert torch.equal(out, expected)


def test_concurrent_launches_draw_tickets_of_their_own():
    """One prepared call runs in two streams at once, and as two graphs of one stream."""
    made = Case(counts=(300, 520, 260), n=1024, k=512, align=1, slack=0).make("cuda")
    outs = [torch.empty(made.case.rows, 1024, dtype=BF16, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in outs]

    def run(out: torch.Tensor) -> None:
        grouped_gemm(made.a, made.b, out=out, plan=WgmmaPlan(256), num_sms=32, **made.given)

    run(outs[0])
    expected = outs[0].clone()
    graphs = [torch.cuda.CUDAGraph() for _ in outs]
    for graph, out in zip(graphs, outs, strict=True):
        with torch.cuda.graph(graph):
            for _ in range(5):
                run(out)
    for captured in (False, True):
        for _ in range(100):
            for out in outs:
                out.fill_(UNTOUCHED)
            torch.cuda.synchronize()
            for graph, stream, out in zip(graphs, streams, outs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay() if captured else run(out)
            torch.cuda.synchronize()
            assert all(torch.equal(out, expected) for out in outs)


def square_operands() -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows, and weights of three experts whose results have the rows' shape."""
    rows = torch.randn(400, 512, device="cuda").bfloat16()
    return rows, torch.randn(3, 512, 512, device="cuda").bfloat16() * 512**-0.5


def test_weights_come_early_and_rows_do_not():
    rows, weights = square_operands()
    counts = torch.tensor([200, 37, 150], dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, 200, 240, 400], dtype=torch.int32, device="cuda")
    kwargs: dict[str, Any] = {"counts": counts, "offsets": offsets, "plan": WgmmaPlan(160)}

    def chain(**how: Any) -> torch.Tensor:
        x, y = rows.clone(), torch.zeros_like(rows)
        for _ in range(40):
            grouped_gemm(x, weights, out=y, **kwargs, **how)
            x, y = y, x
        return x

    expected = chain()
    live = [slice(0, 200), slice(200, 237), slice(240, 390)]
    for _ in range(50):
        got = chain(programmatic_launch=True, prefetch_weights=True)
        assert all(torch.equal(got[part], expected[part]) for part in live)


def test_counts_are_read_as_the_kernel_before_the_last_left_them():
    """In each round of a graph the counts change, then a GEMM runs, then a prefetching one."""
    (rows, weights), rounds = square_operands(), 20
    drawn = torch.randint(0, 130, (rounds, 3), device="cuda", dtype=torch.int32)
    counts = torch.zeros(3, dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, 130, 260, 400], dtype=torch.int32, device="cuda")
    other = torch.full_like(counts, 130)  # all rows that any count may ask for
    h, out = torch.zeros_like(rows), torch.empty(rounds, *rows.shape, device="cuda").bfloat16()
    kwargs: dict[str, Any] = {"offsets": offsets, "plan": WgmmaPlan(160)}

    def play(prefetch: bool) -> torch.Tensor:
        out.fill_(UNTOUCHED)
        for i in range(rounds):
            counts.copy_(drawn[i])
            how: dict[str, Any] = {"programmatic_launch": prefetch}
            grouped_gemm(rows, weights, counts=other, out=h, **how, **kwargs)
            how["prefetch_weights"] = prefetch
            grouped_gemm(h, weights, counts=counts, out=out[i], **how, **kwargs)
        return out.clone()

    expected = play(False)
    play(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = play(True)
    for _ in range(30):
        graph.replay()
        assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_does_not_load():
    made = Case(counts=(3,), n=768, k=384).make("cuda")
    graph = torch.cuda.CUDAGraph()
    out = torch.empty(made.case.rows, 768, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(OutOfOrder, match="before the capture"), torch.cuda.graph(graph):
        grouped_gemm(made.a, made.b, out=out, plan=WgmmaPlan(32), **made.given)
