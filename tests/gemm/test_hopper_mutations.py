"""What the emulated cluster notices: a product that is broken on purpose fails, each in its way."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.gemm.cases import SENTINEL, Case, Output, gated
from tests.gemm.emulate import EmulatedProducts, compile_products, tensor_map
from tests.recorded import reads
from weft.gemm import STORE, Gated, GatedQuant, Push, WgmmaPlan, hopper, reference
from weft.gemm.hopper import Kind

pytestmark = pytest.mark.usefixtures("one_thread")

# Low and tall tiles in turn, enough for the ring of stages to go round; twins, cut and whole.
CASE = Case(counts=(40, 130, 120, 5, 30), n=256, k=384)
TWINS = replace(CASE, counts=(30, 200, 270))
HALVES = replace(CASE, dtype=torch.bfloat16, n=272, bias=True)
WRONG = "wrong rows"
GATED, PLAIN = GatedQuant(), Gated()
FOLLOWS, FILLED = "follow_predecessor();\n", "filled < P.stages"
OPERANDS = "    const Operands<P> from(stages);\n"
SCALES = (
    "    Walk<P> walk{s};\n    Ring<P.stages> ring;\n    Tile tile;\n"
    "    while (walk.next(tile))\n        for (u32 k = 0; k < P.steps(); k += P.scale_ahead()) {"
)
TOLD = "s.amax_told[turn % 2].await(turn / 2 % 2);"


@dataclass(frozen=True)
class Mutation:
    """Texts of the kernel and what they become; what fails then, a rule or WRONG.

    finish: "gated" has numbers of two bytes, others FP8 unless `halves`.
    rows: most of a tile.   sms: of the GPU.   k: of the case.
    """

    texts: dict[str, str]
    error: str
    finish: str = "store"
    rows: int = 128
    sms: int = 2
    k: int = 384
    halves: bool = False
    settled: bool = False

    @property
    def case(self) -> Case:
        """What it is tried on."""
        if self.halves or self.finish == "gated":
            return replace(HALVES, k=self.k)
        return replace(TWINS if self.rows == 256 else CASE, k=self.k)

    @property
    def kind(self) -> Kind:
        """The kernel for that."""
        case = self.case
        sizes = (len(case.counts), case.n, case.k, WgmmaPlan(self.rows))
        kind = Kind(*sizes, self.finish, settled=self.settled)
        return replace(kind, operand="bf16", bias="bf16") if case.bias else kind


MUTATIONS = {
    # The ring of stages.
    "one arrival too few on empty": Mutation(
        {"init(2 * weight_warps)": "init(2 * weight_warps - 1)"}, "overrun|gone"
    ),
    "the neighbour is not told": Mutation(
        {"if (lane == 1) arrive_at(rank ^ 1, s.empty[at]);": ""}, "deadlock"
    ),
    "scales are not awaited": Mutation({"P.scaled() ? 1 + scale_warps : 1": "1"}, "overrun"),
    "a warp frees a stage that its lanes read": Mutation(
        {"__syncwarp();\n    if (lane == 0) s.empty": "if (lane == 0) s.empty"}, WRONG, rows=160
    ),
    "a stage is freed before its product is there": Mutation(
        {
            "step.template add<0>(sum);\n        release_stage(s, ring.at, rank);": (
                "release_stage(s, ring.at, rank);\n        step.template add<0>(sum);"
            )
        },
        WRONG,
    ),
    "a tall stage is freed before its product is there": Mutation(
        {
            "one.template add<1>(sum);\n        release_stage(s, stage, rank);": (
                "release_stage(s, stage, rank);\n        one.template add<1>(sum);"
            )
        },
        WRONG,
    ),
    "a step is added before it is made": Mutation(
        {"one.template add<1>(sum);": "one.template add<2>(sum);"}, WRONG
    ),
    "the loader does not wait": Mutation(
        {
            f"s.empty[ring.at].await(ring.parity ^ 1);\n{' ' * 16}load_weights(": "load_weights(",
        },
        f"overrun|deadlock|{WRONG}",
    ),
    # The end, and the beginning.
    "the last arrivals are not awaited": Mutation(
        {"i < P.stages; ++i, ring.next()) s.empty": "i < 0; ++i, ring.next()) s.empty"}, "gone"
    ),
    "CTAs do not meet first": Mutation(
        {"meet_cluster();  // no CTA arrives": "// no CTA arrives"}, "unmade"
    ),
    "barriers are not published": Mutation({"    publish_arrivals();\n": ""}, "unmade"),
    "the copy engine is not fenced": Mutation({"    fence_for_bulk();  // the": "// the"}, "unord"),
    "products are not fenced": Mutation({"    begin_products();\n": ""}, "unordered"),
    "products are not committed": Mutation({"    commit_products();\n": ""}, WRONG),
    # The exchange of the largest numbers.
    "one half of what is exchanged": Mutation(
        {"amax_told[turn % 2]": "amax_told[0]", "amax_there[turn % 2]": "amax_there[0]"}
        | {".await(turn / 2 % 2)": ".await(turn % 2)"},
        WRONG,
        "gated_fp8",
    ),
    "expected after the wait": Mutation(
        {
            "    exchange.expect(tile.rows);\n": "",
            "exchange.await();\n    if (row < N)": "exchange.await();\n    "
            "exchange.expect(tile.rows);\n    if (row < N)",
        },
        "deadlock",
        "gated_fp8",
    ),
    "one CTA's amax alone": Mutation(
        {"max(bits, s.amax_there[turn % 2][row])": "bits"}, WRONG, "gated_fp8", 64
    ),
    "one CTA's amax alone, tall": Mutation(
        {"exchange.with(row, bits[t][i])": "bits[t][i]"}, WRONG, "gated_fp8"
    ),
    "warps do not meet before the amax is read": Mutation(
        {"note_amax<P, N>(s, gated);\n    meet_multipliers();": "note_amax<P, N>(s, gated);"},
        WRONG,
        "gated_fp8",
        64,
    ),
    "gates are read before they are there": Mutation(
        {"        meet(2 + warp, 2 * warp_lanes);\n": ""}, WRONG, "gated_fp8", 64
    ),
    "gates are overwritten while they are read": Mutation(
        {"place + i % 2 * 2 * warp_lanes": "place"}, WRONG, "gated_fp8", 64
    ),
    "gates are ups": Mutation(
        {"const bool up = multiplier() >= group_threads": "const bool up = multiplier() < 128"},
        WRONG,
        "gated_fp8",
        64,
    ),
    # What is stored.
    "chunks are read before they are there": Mutation(
        {"meet_multipliers();\n        const u32 r = c * chunk": "const u32 r = c * chunk"},
        WRONG,
        "store",
        64,
    ),
    "FP8 chunks are read before they are there": Mutation(
        {"            }\n        meet(6 + group, group_threads);\n": "            }\n"},
        WRONG,
        "gated_fp8",
        64,
    ),
    "FP8 chunks are overwritten while they are read": Mutation(
        {"        if (first != 0) meet(6 + group, group_threads);\n": ""}, WRONG, "gated_fp8", 160
    ),
    "homes are read before they are there": Mutation(
        {"= home;\n        meet_multipliers();": "= home;"}, f"misaligned|{WRONG}", "push"
    ),
    "homes are overwritten while they are read": Mutation(
        {
            "Tile& tile, u64 home) {\n    meet_multipliers();\n    if constexpr (P.finish == "
            "Finish::push)": "Tile& tile, u64 home) {\n    if constexpr (P.finish == Finish::push)"
        },
        WRONG,
        "push",
        32,
        k=128,
    ),
    "tall chunks are read before they are there": Mutation(
        {"__syncwarp();\n#pragma unroll\n        for (u32 r": "for (u32 r"}, WRONG
    ),
    "rows of padding are stored": Mutation(
        {"r < tile.live && made": "r < tile.rows && made"}, WRONG, "store", 64
    ),
    "blocks lie untransposed": Mutation(
        {"store_transposed(chunk + at": "store_blocks(chunk + at"}, WRONG, "store", 64
    ),
    "scales lie in order": Mutation(
        {"return j / 2 * 16 + q * 4 + j % 2 * 2 + row % 2;": "return row + 0 * (j + q);"}, WRONG
    ),
    # Twins.
    "a stage is freed before the second of twins is made": Mutation(
        {"step.template add<0>(sum[twin]);": "step.template add<1>(sum[twin]);"}, WRONG, rows=256
    ),
    "twins have the same scales": Mutation(
        {"from.tall[i % 2] + twin * tall_rows": "from.tall[i % 2]"}, WRONG, rows=256
    ),
    "twins share a chunk": Mutation(
        {"if (t != 0) __syncwarp();": ""}, WRONG, "gated_fp8", rows=256
    ),
    "a low rest leaves rows out": Mutation(
        {"if (low && block + 1 == own) above -= tall_rows;": ""}, WRONG, rows=256
    ),
    # Numbers of two bytes.
    "a stage is freed before its products are read": Mutation(
        {"        await_products<1>();\n        release_stage": "        release_stage"},
        WRONG,
        rows=256,
        halves=True,
    ),
    "sums are read before the last step is made": Mutation(
        {"    await_step<0>(sum);\n    release_stage(s, last": "    release_stage(s, last"},
        WRONG,
        rows=256,
        halves=True,
    ),
    "the last stage is never freed": Mutation(
        {"    await_step<0>(sum);\n    release_stage(s, last, rank);": "    await_step<0>(sum);"},
        "deadlock",
        rows=256,
        halves=True,
    ),
    "steps do not add up": Mutation(
        {"from.rows + skip, true);": "from.rows + skip, false);"}, WRONG, rows=256, halves=True
    ),
    "columns of nobody are stored": Mutation(
        {"r < tile.live && made ?": "r < tile.live ?"}, WRONG, rows=256, halves=True
    ),
    "gated columns of nobody are stored": Mutation(
        {"r < tile.live && column < P.n / 2": "r < tile.live"}, WRONG, "gated", 256
    ),
    "gated chunks are read before they are there": Mutation(
        {"meet_multipliers();\n        const u32 r = c * halves": "const u32 r = c * halves"},
        WRONG,
        "gated",
        256,
    ),
    "gated chunks are overwritten while they are read": Mutation(
        {"s.chunk + c % 2 * half_chunk;\n        u32 pair": "s.chunk;\n        u32 pair"},
        WRONG,
        "gated",
        256,
    ),
    "ups have the bias of gates": Mutation(
        {"column + (P.gated() ? P.n / 2 : 8)": "column + (P.gated() ? 0 : 8)"}, WRONG, "gated", 256
    ),
    "the second column has the bias of the first": Mutation(
        {"sum[i] += of[i / 2 % 2]": "sum[i] += of[0]"}, WRONG, rows=256, halves=True
    ),
    "tiles of an expert overlap": Mutation(
        {"above = block * full": "above = block * row_step"}, WRONG, rows=64, halves=True
    ),
    # Before the kernel in front has ended.
    "rows come before they are written": Mutation(
        {"rank);\n        follow_predecessor();": "rank);"}, "hasty|unordered", settled=True
    ),
    "scales are read before they are written": Mutation(
        {FOLLOWS + SCALES: "{}\n" + SCALES}, WRONG, settled=True
    ),
    "results are stored before they may": Mutation(
        {FOLLOWS + OPERANDS: "{}\n" + OPERANDS}, "hasty", rows=256, halves=True, settled=True
    ),
    "early weights are loaded again": Mutation(
        {"if (early != 0) {\n                --early;": "if (false) {"},
        "overrun|deadlock",
        settled=True,
    ),
    "weights of the first tile, over and over": Mutation(
        {f"while ({FILLED} && walk.next(tile))": f"walk.next(tile);\n    while ({FILLED})"},
        f"deadlock|{WRONG}",
        k=128,
        settled=True,
    ),
    # Which tile is whose.
    "two clusters make the same tiles": Mutation(
        {"clusters - 1 - self": "clusters - 1"}, WRONG, "store", 64, sms=4
    ),
}


def make(mutation: Mutation, folder: Path, monkeypatch: pytest.MonkeyPatch, seeds: int) -> None:
    """A product in many orders, compared with the oracle. Raises AssertionError."""
    monkeypatch.setattr(hopper, "tensor_map", tensor_map)
    plan, case, kinds = WgmmaPlan(mutation.rows), mutation.case, (mutation.kind,)
    library = ctypes.CDLL(str(compile_products(kinds, folder / "tree", mutation.texts)))
    made = case.make()
    product = made.product()
    how = {"settled": mutation.settled, "programmatic_launch": True}
    for seed in range(seeds):
        products = EmulatedProducts(library, kinds, seed, seed % 3, mutation.sms)
        monkeypatch.setattr(reference, "compute", products.compute)
        if mutation.finish == "gated_fp8":
            got, wanted, tolerance = made.call(GATED, plan, **how), gated(GATED, product), 0.08
        elif mutation.finish == "gated":
            got, wanted, tolerance = made.call(PLAIN, plan, **how), gated(PLAIN, product), 2.0**-6
        elif mutation.finish == "store":
            got, wanted, tolerance = made.call(STORE, plan, **how), product, 2.0**-7
        else:
            there = torch.full((case.rows, case.n), SENTINEL, dtype=torch.bfloat16)
            order = torch.arange(case.rows).flip(0)
            made.call(Push(there.data_ptr() + order * case.n * 2), plan, **how)
            got, wanted, tolerance = Output(case, there[order]), product, 2.0**-7
        try:
            got.agrees(wanted, tolerance)
        except AssertionError as error:
            raise AssertionError(WRONG) from error


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("finish", ["store", "push", "gated"])
def test_the_kernel_as_it_is_passes(
    finish: str, halves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    word = "gated_fp8" if finish == "gated" and not halves else finish
    for rows in (256,) if halves else (128, 256):
        make(Mutation({}, "", word, rows, halves=halves), tmp_path / str(rows), monkeypatch, 3)


@reads("tests/emulator/*.hpp")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mutation = MUTATIONS[name]
    with pytest.raises(AssertionError, match=mutation.error):
        make(mutation, tmp_path, monkeypatch, 40)
