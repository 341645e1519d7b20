# SPDX-License-Identifier: Apache-2.0
"""What the emulated cluster notices: a GEMM that is broken on purpose fails, each in its way."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gemm.cases import UNTOUCHED, Case, Output, gated, shape_of
from tests.gemm.emulate import EmulatedGemms, compile_gemms, tensor_map
from weft.gemm import STORE, Gated, GatedQuant, Push, WgmmaPlan, kernels, reference
from weft.gemm.config import MXFP4
from weft.gemm.kernels import GemmShape

pytestmark = pytest.mark.usefixtures("one_thread")

# Swapped and normal tiles in turn, enough for the ring of stages to wrap; split tiles, some cut,
# one of which leaves a warpgroup without rows.
CASE = Case(counts=(40, 130, 120, 5, 30), n=256, k=384)
SPLIT_M = replace(CASE, counts=(30, 190, 270))
CASE_16BIT = replace(CASE, dtype=torch.bfloat16, n=272, bias=True)
CASE_MXFP4 = replace(CASE, dtype=MXFP4, bias=True)
WRONG = "wrong rows"
GATED, PLAIN = GatedQuant(), Gated()
PDL_WAIT, FILLED = "pdl_wait();\n", "filled < S.stages"
OPERANDS = "    const Operands<S> operands(tiles);\n"
SCALES = (
    "    TileScheduler<S> scheduler{smem};\n    PipelineState<S.stages> pipeline;\n    Tile tile;\n"
    "    while (scheduler.next(tile))\n"
    "        if (tile.is_paired<S>())"
)
GROUP_BARRIER = "        named_barrier(warpgroup_barrier + group, warpgroup_threads);\n"


@dataclass(frozen=True)
class Mutation:
    """Texts of the kernel and what they become; what fails then, a rule or WRONG.

    epilogue: "gated" is in bfloat16, others in FP8 unless `bf16`.   mxfp4: so are the weights.
    block_m: of the plan.   sms: of the GPU.   k: of the case.
    """

    texts: dict[str, str]
    error: str
    epilogue: str = "store"
    block_m: int = 128
    sms: int = 2
    k: int = 384
    bf16: bool = False
    mxfp4: bool = False
    prefetch_weights: bool = False

    @property
    def case(self) -> Case:
        """What it is tried on."""
        if self.bf16 or self.epilogue == "gated":
            return replace(CASE_16BIT, k=self.k)
        if self.mxfp4:
            return replace(CASE_MXFP4, k=self.k)
        return replace(SPLIT_M if self.block_m == 256 else CASE, k=self.k)

    @property
    def shape(self) -> GemmShape:
        """The kernel for that."""
        prefetch = {"prefetch_weights": self.prefetch_weights}
        return shape_of(self.case, self.block_m, self.epilogue, **prefetch)


MUTATIONS = {
    # The ring of stages.
    "one arrival too few on empty": Mutation(
        {"init(2 * math_warps)": "init(2 * math_warps - 1)"}, "overrun|gone"
    ),
    "the other CTA is not told of a released stage": Mutation(
        {"if (lane == 1) arrive_remote(rank ^ 1, smem.empty[stage]);": ""}, "deadlock"
    ),
    "scales are not awaited": Mutation({"S.has_fp8_rows() ? 1 + scale_warps : 1": "1"}, "overrun"),
    "a warp releases a stage that its lanes read": Mutation(
        {"__syncwarp();\n    if (lane == 0) smem.empty": "if (lane == 0) smem.empty"},
        WRONG,
        block_m=160,
    ),
    "a stage is released before its wgmma is complete": Mutation(
        {
            "block.template promote<0>(sum);\n        release_stage(smem, pipeline.stage, rank);": (
                "release_stage(smem, pipeline.stage, rank);\n"
                "        block.template promote<0>(sum);"
            )
        },
        WRONG,
    ),
    "a normal tile's stage is released before its wgmma is complete": Mutation(
        {
            "one.template promote<1>(sum, scales);\n        release_stage(smem, stage, rank);": (
                "release_stage(smem, stage, rank);\n        one.template promote<1>(sum, scales);"
            )
        },
        WRONG,
    ),
    "a k block is added before it is complete": Mutation(
        {"one.template promote<1>(sum, scales);": "one.template promote<2>(sum, scales);"}, WRONG
    ),
    "the loader does not wait": Mutation(
        {
            f"smem.empty[pipeline.stage].wait(pipeline.parity ^ 1);\n{' ' * 16}load_weights(": (
                "load_weights("
            ),
        },
        f"overrun|deadlock|{WRONG}",
    ),
    # The end, and the beginning.
    "the last arrivals are not awaited": Mutation(
        {"i < S.stages; ++i, pipeline.advance())": "i < 0; ++i, pipeline.advance())"}, "gone"
    ),
    "the CTAs of a cluster do not meet first": Mutation(
        {"sync_cluster_relaxed();  // no CTA arrives": "// no CTA arrives"}, "unmade"
    ),
    "mbarriers are not published": Mutation({"    fence_mbarrier_init();\n": ""}, "unmade"),
    "the copy engine is not fenced": Mutation({"    fence_for_bulk();  // the": "// the"}, "unord"),
    "wgmma is not fenced": Mutation({"    wgmma_fence();\n": ""}, "unordered"),
    "wgmma is not committed": Mutation({"    wgmma_commit();\n}": "}"}, WRONG),
    # The exchange of amax.
    "one exchange buffer": Mutation(
        {"amax_full[turn % 2]": "amax_full[0]", "peer_amax[turn % 2]": "peer_amax[0]"}
        | {".wait(turn / 2 % 2)": ".wait(turn % 2)"},
        WRONG,
        "gated_fp8",
    ),
    "expected after the wait": Mutation(
        {
            "    exchange.expect(tile.m);\n": "",
            "exchange.wait();\n    if (row < N)": "exchange.wait();\n    "
            "exchange.expect(tile.m);\n    if (row < N)",
        },
        "deadlock",
        "gated_fp8",
    ),
    "one CTA's amax alone": Mutation(
        {"max(bits, smem.peer_amax[turn % 2][row])": "bits"}, WRONG, "gated_fp8", 64
    ),
    "one CTA's amax alone, normal": Mutation(
        {"exchange.merged(first + 8 * i, bits[i])": "bits[i]"}, WRONG, "gated_fp8"
    ),
    "warps do not meet before the amax is read": Mutation(
        {"<S, N>(smem, gated);\n    sync_math_warps();": "<S, N>(smem, gated);"},
        WRONG,
        "gated_fp8",
        64,
    ),
    "gates are read before they are written": Mutation(
        {"        named_barrier(gate_barrier + warp, 2 * warp_lanes);\n": ""},
        WRONG,
        "gated_fp8",
        64,
    ),
    "gates are overwritten while they are read": Mutation(
        {"buffers + i % 2 * 2 * warp_lanes": "buffers"}, WRONG, "gated_fp8", 64
    ),
    "gates are ups": Mutation(
        {"bool up = math_thread() >= warpgroup_threads": "bool up = math_thread() < 128"},
        WRONG,
        "gated_fp8",
        64,
    ),
    # What is stored.
    "staging memory is read before it is written": Mutation(
        {"sync_math_warps();\n        const u32 r = c * swap": "const u32 r = c * swap"},
        WRONG,
        "store",
        64,
    ),
    "FP8 staging is read before it is written": Mutation(
        {f"            }}\n{GROUP_BARRIER}": "            }\n"},
        WRONG,
        "gated_fp8",
        64,
    ),
    "FP8 staging is overwritten while it is read": Mutation(
        {f"        if (first != 0) {GROUP_BARRIER.strip()}\n": ""}, WRONG, "gated_fp8", 160
    ),
    "dst_addr is read before it is shared": Mutation(
        {"= dst_addr;\n        sync_math_warps();": "= dst_addr;"}, f"misaligned|{WRONG}", "push"
    ),
    "dst_addr is overwritten while it is read": Mutation(
        {
            "Tile& tile, u64 dst_addr) {\n    sync_math_warps();\n    if": (
                "Tile& tile, u64 dst_addr) {\n    if"
            )
        },
        WRONG,
        "push",
        32,
        k=128,
    ),
    "normal staging is read before it is written": Mutation(
        {"__syncwarp();\n#pragma unroll\n        for (u32 r": "for (u32 r"}, WRONG
    ),
    "rows of padding are stored": Mutation(
        {"r < tile.valid_m && exists": "r < tile.m && exists"}, WRONG, "store", 64
    ),
    "blocks lie untransposed": Mutation(
        {"stmatrix_x4_trans(staging + at": "stmatrix_x4(staging + at"}, WRONG, "store", 64
    ),
    "scales lie in order": Mutation(
        {"return j / 2 * 16 + q * 4 + j % 2 * 2 + row % 2;": "return row + 0 * (j + q);"}, WRONG
    ),
    # Split tiles.
    "a block is added before it is complete": Mutation(
        {"promote<0>(sum[block], scales);": "promote<1>(sum[block], scales);\nwgmma_wait<0>();"},
        WRONG,
        block_m=256,
    ),
    "a stage is released before its blocks are complete": Mutation(
        {
            "        }\n        release_stage(smem, at.stage, rank);\n": "        }\n",
            "wait(at.parity);\n": "wait(at.parity);\nrelease_stage(smem, at.stage, rank);\n",
        },
        WRONG,
        block_m=256,
    ),
    "both blocks have the scales of the first": Mutation(
        {"rows[block][operands": "rows[0][operands"}, WRONG, block_m=256
    ),
    "both halves share staging memory": Mutation(
        {"if (half != 0) __syncwarp();": ""}, WRONG, "gated_fp8", block_m=256
    ),
    "both CTAs load the first rows": Mutation(
        {"tile.first_row + rank * normal_m + r": "tile.first_row + r"}, WRONG, block_m=256
    ),
    "weights are loaded for one CTA alone": Mutation(
        {"tma_load_2d_multicast(3, to, map": "tma_load_2d_multicast(1 << 1, to, map"},
        "deadlock",
        block_m=256,
    ),
    "a warpgroup without rows releases nothing": Mutation(
        {
            "smem.full[pipeline.stage].wait(pipeline.parity);\n"
            "            release_stage(smem, pipeline.stage, rank);": (
                "smem.full[pipeline.stage].wait(pipeline.parity);"
            )
        },
        "deadlock",
        block_m=256,
    ),
    # Two k blocks in a stage.
    "the second k block is added before it is complete": Mutation(
        {"two.template promote<0>(sum);": "two.template promote<1>(sum);\nwgmma_wait<0>();"},
        WRONG,
        epilogue="gated_fp8",
        block_m=256,
    ),
    "the first k block is added before it is complete": Mutation(
        {"one.template promote<1>(sum);": "one.template promote<2>(sum);"},
        WRONG,
        epilogue="gated_fp8",
        block_m=256,
    ),
    "a stage is released before its second k block is complete": Mutation(
        {
            "two.template promote<0>(sum);\n        release_stage(smem, pipeline.stage, rank);": (
                "release_stage(smem, pipeline.stage, rank);\n        two.template promote<0>(sum);"
            )
        },
        WRONG,
        epilogue="gated_fp8",
        block_m=256,
        k=1280,
    ),
    "the second k block has the weights of the first": Mutation(
        {"two.issue(weights + S.half_stage_bytes() / 16,": "two.issue(weights,"},
        WRONG,
        epilogue="gated_fp8",
        block_m=256,
    ),
    "the second k block has the scales of the first": Mutation(
        {
            "two.read_scales(operands, smem, pipeline.stage, max_paired_m);": (
                "two.read_scales(operands, smem, pipeline.stage);"
            )
        },
        WRONG,
        epilogue="gated_fp8",
        block_m=256,
    ),
    "scales of both k blocks go to one place": Mutation(
        {"place * max_paired_m": "0"}, WRONG, epilogue="gated_fp8", block_m=256
    ),
    "one k block of two is awaited": Mutation(
        {"full.arrive_expect_tx(k_blocks * (": "full.arrive_expect_tx(("},
        f"overrun|deadlock|{WRONG}",
        epilogue="gated_fp8",
        block_m=256,
    ),
    "rows of both k blocks go to one place": Mutation(
        {"load_row_tile<S>(a, to + i * S.half_stage_bytes(),": "load_row_tile<S>(a, to,"},
        WRONG,
        epilogue="gated_fp8",
        block_m=256,
    ),
    "an odd last k block is left out": Mutation(
        {"if constexpr (S.k_blocks() % 2 != 0)": "if constexpr (false)"},
        f"deadlock|{WRONG}",
        epilogue="gated_fp8",
        block_m=256,
    ),
    "the scales of an odd last k block never arrive": Mutation(
        {"place + 1 < per_stage && k + n + 1 < S.k_blocks()": "place + 1 < per_stage"},
        "deadlock",
        epilogue="gated_fp8",
        block_m=256,
    ),
    "prefetched weights are one k block a stage": Mutation(
        {
            "load_weights(a, smem, tiles, filled, tile, rank, k);\n"
            "            k += tile.k_blocks_of_stage<S>(k);": (
                "load_weights(a, smem, tiles, filled, tile, rank, k);\n            k += 1;"
            )
        },
        f"overrun|deadlock|{WRONG}",
        epilogue="gated_fp8",
        block_m=256,
        sms=8,
        prefetch_weights=True,
    ),
    # BF16.
    "a stage is released before the last k block is complete": Mutation(
        {"        wgmma_wait<1>();\n        release_stage": "        release_stage"},
        WRONG,
        block_m=256,
        bf16=True,
    ),
    "sums are read before the last k block is complete": Mutation(
        {"    wait_accumulator<0>(sum);\n    release_stage": "    release_stage"},
        WRONG,
        block_m=256,
        bf16=True,
    ),
    "the last stage is never released": Mutation(
        {"(sum);\n    release_stage(smem, last, rank);": "(sum);"},
        "deadlock",
        block_m=256,
        bf16=True,
    ),
    "k blocks do not add up": Mutation(
        {"operands.swap_b + offset, true);": "operands.swap_b + offset, false);"},
        WRONG,
        block_m=256,
        bf16=True,
    ),
    "columns beyond n are stored": Mutation(
        {"r < tile.valid_m && exists ?": "r < tile.valid_m ?"}, WRONG, block_m=256, bf16=True
    ),
    "gated columns beyond n are stored": Mutation(
        {"r < tile.valid_m && column < S.n / 2": "r < tile.valid_m"}, WRONG, "gated", 256
    ),
    "gated staging is read before it is written": Mutation(
        {"sync_math_warps();\n        const u32 r = c * gated": "const u32 r = c * gated"},
        WRONG,
        "gated",
        256,
    ),
    "gated staging is overwritten while it is read": Mutation(
        {
            "smem.staging + c % 2 * staging_buffer_bytes;\n        u32 pair": (
                "smem.staging;\n        u32 pair"
            )
        },
        WRONG,
        "gated",
        256,
    ),
    "ups have the bias of gates": Mutation(
        {"column + (S.gated() ? S.n / 2 : 8)": "column + (S.gated() ? 0 : 8)"}, WRONG, "gated", 256
    ),
    "the second column has the bias of the first": Mutation(
        {"sum[i] += bias[i / 2 % 2]": "sum[i] += bias[0]"}, WRONG, block_m=256, bf16=True
    ),
    "tiles of an expert overlap": Mutation(
        {"begin = m_block * full_m": "begin = m_block * block_m_granularity"},
        WRONG,
        block_m=64,
        bf16=True,
    ),
    # MXFP4.
    "registers are written while wgmma reads them": Mutation(
        {
            "packed.expand(a[i], i, smem.magnitudes)": "packed.expand(a[0], i, smem.magnitudes)",
            "first_rows>(block.acc, a[i],": "first_rows>(block.acc, a[0],",
        },
        WRONG,
        block_m=128,
        mxfp4=True,
    ),
    "a stage is released before its rows are multiplied": Mutation(
        {
            "        release_stage(smem, stage, rank);\n": "",
            "if (ahead &&": "release_stage(smem, stage, rank);\n            if (ahead &&",
        },
        WRONG,
        mxfp4=True,
    ),
    "two CTAs an SM: sums and registers do not wait for wgmma": Mutation(
        {
            "block.template promote<0>(sum + first_rows / 2);": (
                "block.template promote<1>(sum + first_rows / 2);\n        wgmma_wait<0>();"
            )
        },
        WRONG,
        block_m=96,
        mxfp4=True,
    ),
    "two CTAs an SM: the other rows have the scales of the first": Mutation(
        {"read_scales(operands, smem, stage, first_rows)": "read_scales(operands, smem, stage, 0)"},
        WRONG,
        block_m=96,
        mxfp4=True,
    ),
    "packed weights are not awaited": Mutation(
        {"smem.full[pipeline.stage].wait(pipeline.parity);\n        next.read": "next.read"},
        "overrun",
        mxfp4=True,
    ),
    "the next k block's weights are multiplied twice": Mutation(
        {"        packed = next;\n": "        if (k == 0) packed = next;\n"}, WRONG, mxfp4=True
    ),
    "both rows have the exponents of one": Mutation(
        {"r == 0 ? exponents.x : exponents.y": "exponents.x"}, WRONG, mxfp4=True
    ),
    "signs are those of the other half": Mutation(
        {"(packed << 4 & 0x80808080)": "(packed & 0x80808080)"}, WRONG, mxfp4=True
    ),
    "both columns have the power of one": Mutation(
        {"__fmaf_rn(sum[i], scale[i / 2 % 2]": "__fmaf_rn(sum[i], scale[0]"}, WRONG, mxfp4=True
    ),
    "units of ups are those of gates": Mutation(
        {"apart = S.gated() ? units / 2 : 1": "apart = 1"}, WRONG, "gated_fp8", mxfp4=True
    ),
    "ups have the power and the bias of gates": Mutation(
        {"group * (S.n / 2)": "0 * (S.n / 2)"}, WRONG, "gated_fp8", mxfp4=True
    ),
    # Before the previous kernel has ended.
    "rows are loaded before they are written": Mutation(
        {"rank);\n        pdl_wait();": "rank);"}, "hasty|unordered", prefetch_weights=True
    ),
    "scales are read before they are written": Mutation(
        {PDL_WAIT + SCALES: "{}\n" + SCALES}, WRONG, prefetch_weights=True
    ),
    "results are stored before they may": Mutation(
        {PDL_WAIT + OPERANDS: "{}\n" + OPERANDS},
        "hasty",
        block_m=256,
        bf16=True,
        prefetch_weights=True,
    ),
    "prefetched weights are loaded again": Mutation(
        {"if (prefetched != 0) {\n                --prefetched;": "if (false) {"},
        "overrun|deadlock",
        prefetch_weights=True,
    ),
    "weights of the first tile, over and over": Mutation(
        {
            f"while ({FILLED} && scheduler.next(tile))": (
                f"scheduler.next(tile);\n    while ({FILLED})"
            )
        },
        f"deadlock|{WRONG}",
        k=128,
        prefetch_weights=True,
    ),
    # Which tile is whose.
    "two clusters compute the same tiles": Mutation(
        {"clusters - 1 - self": "clusters - 1"}, WRONG, "store", 64, sms=4
    ),
}


def make(mutation: Mutation, folder: Path, monkeypatch: pytest.MonkeyPatch, seeds: int) -> None:
    """A grouped GEMM in many orders, compared with the oracle. Raises AssertionError."""
    monkeypatch.setattr(kernels, "tensor_map", tensor_map)
    plan, case, shapes = WgmmaPlan(mutation.block_m), mutation.case, (mutation.shape,)
    library = ctypes.CDLL(str(compile_gemms(shapes, folder / "tree", mutation.texts)))
    made = case.make()
    y = made.oracle()
    how: dict[str, Any] = {"prefetch_weights": mutation.prefetch_weights}
    how["programmatic_launch"] = True
    for seed in range(seeds):
        gemms = EmulatedGemms(library, shapes, seed, seed % 3, mutation.sms)
        monkeypatch.setattr(reference, "compute", gemms.compute)
        if mutation.epilogue == "gated_fp8":
            got, wanted, tolerance = made.call(GATED, plan, **how), gated(GATED, y), 0.08
        elif mutation.epilogue == "gated":
            got, wanted, tolerance = made.call(PLAIN, plan, **how), gated(PLAIN, y), 2.0**-6
        elif mutation.epilogue == "store":
            got, wanted, tolerance = made.call(STORE, plan, **how), y, 2.0**-7
        else:
            there = torch.full((case.rows, case.n), UNTOUCHED, dtype=torch.bfloat16)
            order = torch.arange(case.rows).flip(0)
            made.call(Push(there.data_ptr() + order * case.n * 2), plan, **how)
            got, wanted, tolerance = Output(case, there[order]), y, 2.0**-7
        try:
            got.agrees(wanted, tolerance)
        except AssertionError as error:
            raise AssertionError(WRONG) from error


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp8", "mxfp4", "bf16"])
@pytest.mark.parametrize("epilogue", ["store", "push", "gated"])
def test_the_kernel_as_it_is_passes(
    epilogue: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bf16, mxfp4 = weights == "bf16", weights == "mxfp4"
    name = "gated_fp8" if epilogue == "gated" and not bf16 else epilogue
    for block_m in {"fp8": (128, 256), "mxfp4": (32, 64, 96, 128), "bf16": (256,)}[weights]:
        mutation = Mutation({}, "", name, block_m, bf16=bf16, mxfp4=mxfp4)
        make(mutation, tmp_path / str(block_m), monkeypatch, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mutation = MUTATIONS[name]
    with pytest.raises(AssertionError, match=mutation.error):
        make(mutation, tmp_path, monkeypatch, 40)
