# SPDX-License-Identifier: Apache-2.0
"""Table of faults in the kernels: edits of their source that tests must detect.

A space in a regular expression matches any white space.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from weft.jit.source import PACKAGE

_NO_CODE = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"')
_BRACKETS = re.compile(r"[(){}]")


@dataclass(frozen=True)
class Edit:
    """One change of a function.

    function: its name, as "Struct::name" if it is a member; of overloads, all bodies are searched.
    replacement: may name groups of the pattern.
    """

    file: str
    function: str
    pattern: str
    replacement: str = ""

    def apply(self, text: str) -> str:
        """Return the changed text of the file. Raises LookupError unless one place matches."""
        pattern = re.compile(self.pattern.replace(" ", r"\s+"), re.DOTALL)
        result = [
            match
            for begin, end in function_bodies(text, self.function)
            for match in pattern.finditer(text[:end], begin)
        ]
        if len(result) != 1:
            raise LookupError(
                f"{self.pattern!r} matches {len(result)} times in {self.function} of {self.file}"
            )
        begin, end = result[0].span()
        return text[:begin] + result[0].expand(self.replacement) + text[end:]


@dataclass(frozen=True)
class Mutation:
    """A fault, as one or several edits.

    error: a regular expression for what must fail.   run: what the test needs to provoke it.
    """

    edits: tuple[Edit, ...]
    error: str = ""
    run: dict[str, Any] = field(default_factory=dict)

    def apply(self, file: str, text: str) -> str:
        """Return the text of a file below weft/ with the mutation's edits."""
        for edit in self.edits:
            if edit.file == file:
                text = edit.apply(text)
        return text


def function_bodies(text: str, function: str) -> Iterator[tuple[int, int]]:
    code = _NO_CODE.sub(lambda match: " " * len(match[0]), text)
    scope, _, name = function.rpartition("::")
    begin, end = 0, len(code)
    if scope:
        for struct in re.finditer(rf"\bstruct\b[^;{{}}()]*(?:\([^()]*\))?\s*\b{scope} \{{", code):
            begin, end = struct.end() - 1, _closing(code, struct.end() - 1)
    head = re.compile(rf"WEFT_(?:SLOW_)?FN\b[^;{{}}()]*?\b{name}\(")
    for match in head.finditer(code, begin, end):
        body = code.find("{", _closing(code, match.end() - 1))
        if ";" not in code[match.end() : body]:
            yield body, _closing(code, body)


def _closing(code: str, opening: int) -> int:
    depth = 0
    for match in _BRACKETS.finditer(code, opening):
        depth += 1 if match[0] in "({" else -1
        if depth == 0:
            return match.end()
    raise LookupError(f"a bracket is not closed: {code[opening : opening + 80]!r}")


@functools.cache
def source_of(file: str) -> str:
    return (PACKAGE / file).read_text()


WRONG = "wrong rows"


def _gemm(
    file: str, function: str, pattern: str, replacement: str = "", error: str = WRONG, **run: Any
) -> Mutation:
    """Return a fault of the grouped GEMM. `run`: fields of `GemmRun` in gemm/test_mutations.py."""
    return Mutation((Edit(f"gemm/{file}", function, pattern, replacement),), error, run)


Run = dict[str, Any]
BF16: Run = {"weights": "bf16", "block_m": 256}
GATED: Run = {"epilogue": "gated_fp8", "block_m": 64}
QUANTISED: Run = {"epilogue": "relu2_fp8", "block_m": 64}
GATED_16BIT: Run = {"epilogue": "gated", "weights": "bf16", "block_m": 256}
MXFP4: Run = {"weights": "mxfp4"}
EARLY: Run = {"prefetch_weights": True}
STUCK = f"overrun|deadlock|{WRONG}"

# What the emulated cluster must notice.
# fmt: off
GEMM = {
    # The ring of stages.
    "one arrival too few on empty":
        _gemm("pipeline.cuh", "init_mbarriers", r"\* math_warps\);", "* math_warps - 1);",
              "overrun|gone"),
    "the other CTA is not told of a released stage":
        _gemm("pipeline.cuh", "release_stage",
              r"if \(S\.shares_rows\(\) && lane == 1\)[^;]*;", "", "deadlock"),
    "scales are not awaited":
        _gemm("pipeline.cuh", "init_mbarriers",
              r"S\.has_fp8_rows\(\) \? 1 \+ S\.scale_warps\(\) : 1", "1", "overrun"),
    "a warp releases a stage that its lanes read":
        _gemm("pipeline.cuh", "release_stage", r"__syncwarp\(\);", block_m=160),
    "a stage is released before its wgmma is complete":
        _gemm("mainloop_fp8.cuh", "mainloop_swap_ab",
              r"(block\.template promote<0>\(sum\);) (release_stage[^;]*;)", r"\2 \1"),
    "a normal tile's stage is released before its wgmma is complete":
        _gemm("mainloop_fp8.cuh", "mainloop_normal",
              r"(one\.template promote<1>\(sum, scales\);) (release_stage[^;]*;)", r"\2 \1"),
    "a k block is added before it is complete":
        _gemm("mainloop_fp8.cuh", "mainloop_normal", r"one\.template promote<1>",
              "one.template promote<2>"),
    "the loader does not wait":
        _gemm("loader.cuh", "load_gemm", r"smem\.empty[^;]*;(?= load_weights)", "", STUCK),
    # The end, and the beginning.
    "the last arrivals are not awaited":
        _gemm("loader.cuh", "await_empty_stages", r"i < S\.stages", "i < 0", "gone"),
    "the CTAs of a cluster do not meet first":
        _gemm("grouped_gemm.cuh", "grouped_gemm", r"(__syncthreads\(\);) sync_cluster_relaxed\(\);",
              r"\1", "unmade"),
    "mbarriers are not published":
        _gemm("pipeline.cuh", "init_mbarriers", r"fence_mbarrier_init\(\);", "", "unmade"),
    "the copy engine is not fenced":
        _gemm("loader.cuh", "load_tiles", r"fence_for_bulk\(\);", "", "unordered"),
    "wgmma is not fenced":
        _gemm("wgmma.cuh", "issue_k_block", r"wgmma_fence\(\);(?=.*accumulate)", "", "unordered"),
    "wgmma is not committed":
        _gemm("wgmma.cuh", "issue_k_block", r"(accumulate \|\| i != 0\);) wgmma_commit\(\);",
              r"\1"),
    # The exchange of amax.
    "one exchange buffer":
        Mutation(
            tuple(
                Edit("gemm/epilogue_gated_fp8.cuh", f"AmaxExchange::{function}", *edit)
                for function, *edit in (
                    ("expect", r"turn % 2", "0"),
                    ("send", r"turn % 2\](.*)turn % 2\]", r"0]\g<1>0]"),
                    ("wait", r"turn % 2\](.*)turn / 2 % 2", r"0]\1turn % 2"),
                    ("merged", r"turn % 2", "0"),
                )
            ),
            WRONG, {"epilogue": "gated_fp8"},
        ),
    "expected after the wait":
        _gemm("epilogue_gated_fp8.cuh", "store_gated_fp8_swap_ab",
              r"(exchange\.expect\(tile\.m\);)(.*exchange\.wait\(\);)", r"\2 \1", "deadlock",
              epilogue="gated_fp8"),
    "one CTA's amax alone":
        _gemm("epilogue_gated_fp8.cuh", "AmaxExchange::merged", r"return [^;]*;", "return bits;",
              **GATED),
    "one CTA's amax alone, normal":
        _gemm("epilogue_gated_fp8.cuh", "store_gated_fp8_normal",
              r"exchange\.merged\(first \+ 8 \* i, bits\[i\]\)", "bits[i]", epilogue="gated_fp8"),
    "warps do not meet before the amax is read":
        _gemm("epilogue_gated_fp8.cuh", "store_gated_fp8_swap_ab",
              r"(store_warp_amax[^;]*;) sync_math_warps\(\);", r"\1", **GATED),
    "gates are read before they are written":
        _gemm("epilogue_gated_fp8.cuh", "gate_swap_ab", r"named_barrier[^;]*;", **GATED),
    "gates are overwritten while they are read":
        _gemm("epilogue_gated_fp8.cuh", "gate_swap_ab", r"i % 2 \* 2 \* warp_lanes", "0", **GATED),
    "gates are ups":
        _gemm("epilogue_gated_fp8.cuh", "gate_swap_ab", r">= warpgroup_threads", "< 128", **GATED),
    # What is stored.
    "staging memory is read before it is written":
        _gemm("epilogue.cuh", "store_swap_ab", r"sync_math_warps\(\);", block_m=64),
    "FP8 staging is read before it is written":
        _gemm("epilogue_gated_fp8.cuh", "store_fp8_swap_ab", r"(?<=\}) named_barrier[^;]*;",
              **GATED),
    "FP8 staging is overwritten while it is read":
        _gemm("epilogue_gated_fp8.cuh", "store_fp8_swap_ab",
              r"if \(first != 0\) named_barrier[^;]*;", "", **GATED | {"block_m": 160}),
    "amax is overwritten while it is read":
        _gemm("epilogue_store_fp8.cuh", "quantize_swap_ab",
              r"(inverse_scale<S>[^;]*; \}) sync_math_warps\(\);", r"\1", **QUANTISED),
    "ungated FP8 staging is read before it is written":
        _gemm("epilogue_store_fp8.cuh", "quantize_swap_ab", r"sync_math_warps\(\);(?= if \(row)",
              **QUANTISED),
    "dst_addr is read before it is shared":
        _gemm("epilogue.cuh", "share_dst_addrs", r"(= dst_addr;) sync_math_warps\(\);", r"\1",
              f"misaligned|{WRONG}", epilogue="push", block_m=128),
    "dst_addr is overwritten while it is read":
        _gemm("epilogue.cuh", "share_dst_addrs", r"sync_math_warps\(\);(?= if constexpr)",
              epilogue="push", block_m=32, k=128),
    "normal staging is read before it is written":
        _gemm("epilogue.cuh", "store_normal", r"__syncwarp\(\);(?= #pragma)"),
    "rows of padding are stored":
        _gemm("epilogue.cuh", "store_swap_ab", r"r < tile\.valid_m", "r < tile.m", block_m=64),
    "blocks lie untransposed":
        _gemm("epilogue.cuh", "store_swap_ab", r"stmatrix_x4_trans", "stmatrix_x4", block_m=64),
    "scales lie in order":
        _gemm("pipeline.cuh", "scale_slot", r"return [^;]*;", "return row + 0 * (j + q);"),
    # Split tiles.
    "a block is added before it is complete":
        _gemm("mainloop_fp8.cuh", "mainloop_split", r"promote<0>(\(sum\[0\], scales\[0\]\);)",
              r"promote<1>\1 wgmma_wait<0>();", block_m=256),
    "the second block is added before it is complete":
        _gemm("mainloop_fp8.cuh", "mainloop_split",
              r"wait_accumulator<0>\(product\.acc\);(.*add_to[^;]*;)",
              r"wgmma_wait<1>();\1 wgmma_wait<0>();", block_m=256),
    "a stage is released before its blocks are complete":
        _gemm("mainloop_fp8.cuh", "mainloop_split",
              r"(wait_accumulator[^;]*;) (release_stage\(smem, stage, rank\);)", r"\2 \1",
              block_m=256),
    "the next stage is tested with this pass's parity":
        _gemm("mainloop_fp8.cuh", "mainloop_split", r"next == 0 \? parity \^ 1 : parity", "parity",
              "overrun|" + WRONG, block_m=256, k=1152),
    "a tile starts in the first stage of the ring":
        _gemm("mainloop_fp8.cuh", "first_stage", r"\? 0 : pipeline\.stage", "? 0 : 0",
              STUCK, block_m=256),
    "both blocks have the scales of the first":
        _gemm("mainloop_fp8.cuh", "NormalScales::read_split", r"rows\[block\]", "rows[0]",
              block_m=256),
    "both halves share staging memory":
        _gemm("epilogue_gated_fp8.cuh", "store_gated_fp8_split",
              r"if \(half != 0\) __syncwarp\(\);", "", **GATED | {"block_m": 256}),
    "both CTAs load the first rows":
        _gemm("loader.cuh", "load_rows", r"rank \* normal_m \+ r", "r", block_m=256),
    "weights are loaded for one CTA alone":
        _gemm("loader.cuh", "load_box", r"multicast\(3,", "multicast(2,", "deadlock",
              block_m=256),
    "a warpgroup without rows releases nothing":
        _gemm("mainloop_fp8.cuh", "mainloop_split",
              r"(wait\(pipeline\.parity\);) release_stage[^;]*;", r"\1", "deadlock", block_m=256),
    # Which tiles are split and which wide.
    "the second half of the weights has other rows":
        _gemm("tile_scheduler.cuh", "set_split_or_wide", r"i - expert\.split - expert\.wide : i",
              "i - expert.split : i", block_m=256),
    "a wide tile has half of its weights":
        _gemm("tile_scheduler.cuh", "set_split_or_wide", r"blockIdx\.x % 2 : second_half",
              "second_half : second_half", block_m=256),
    "half of the last 512 weight rows has no tiles":
        _gemm("tile_scheduler.cuh", "SplitExpert::tiles", r"half \* ", "0 * ", block_m=256),
    # Wide tiles. Of the last one, the second CTA has no weights.
    "both CTAs have the same weights":
        _gemm("tile_scheduler.cuh", "set_blocks", r" \+ blockIdx\.x % 2", "", block_m=128),
    "weights that do not exist are expected":
        _gemm("loader.cuh", "load_weights", r"tile\.has_weights<S>\(\) \? ([^:]*) : 0", r"\1",
              "deadlock", block_m=128),
    "columns of no weights are stored":
        _gemm("compute.cuh", "compute_split", r"if \(!has_weights\) return;", "", block_m=128),
    "both blocks of weights are one":
        _gemm("loader.cuh", "load_wide_weights", r"row / block_n \* apart", "0", block_m=128),
    "ups are loaded from the next gates":
        _gemm("loader.cuh", "load_wide_weights", r"S\.gated\(\) \? S\.n / 2 : block_n", "block_n",
              **GATED | {"block_m": 128}),
    "the second CTA has the scales of one block":
        _gemm("loader.cuh", "load", r"S\.has_wide_n\(\) \? 0 : rank", "rank", block_m=128),
    "the second CTA skips the rows of the first":
        _gemm("tile_scheduler.cuh", "first_row_of", r"is_split<S>\(\) \? ([^:]*) : 0", r"\1",
              block_m=128),
    # BF16.
    "a stage is released before the last k block is complete":
        _gemm("mainloop_16bit.cuh", "mainloop_16bit", r"wgmma_wait<1>\(\);", **BF16),
    "sums are read before the last k block is complete":
        _gemm("mainloop_16bit.cuh", "mainloop_16bit", r"wait_accumulator<0>\(sum\);", **BF16),
    "the last stage is never released":
        _gemm("mainloop_16bit.cuh", "mainloop_16bit",
              r"(wait_accumulator[^;]*;) release_stage[^;]*;", r"\1", "deadlock", **BF16),
    "k blocks do not add up":
        _gemm("mainloop_16bit.cuh", "mainloop_16bit", r"offset, true", "offset, false", **BF16),
    "columns beyond n are stored":
        _gemm("epilogue.cuh", "store_swap_ab", r"valid_m && exists", "valid_m", **BF16),
    "gated columns beyond n are stored":
        _gemm("epilogue_gated.cuh", "store_gated_16bit", r" && column < S\.n / 2", **GATED_16BIT),
    "gated staging is read before it is written":
        _gemm("epilogue_gated.cuh", "store_gated_16bit", r"sync_math_warps\(\);(?= const)",
              **GATED_16BIT),
    "gated staging is overwritten while it is read":
        _gemm("epilogue_gated.cuh", "store_gated_16bit", r"c % 2 \* staging", "0 * staging",
              **GATED_16BIT),
    "ups have the bias of gates":
        _gemm("epilogue.cuh", "BiasColumns::BiasColumns", r"\? S\.n / 2 : 8", "? 0 : 8",
              **GATED_16BIT),
    "the second column has the bias of the first":
        _gemm("epilogue.cuh", "BiasColumns::add_to", r"bias\[i / 2 % 2\]", "bias[0]", **BF16),
    "tiles of an expert overlap":
        _gemm("tile_scheduler.cuh", "TileScheduler::set_blocks", r"m_block \* full_m",
              "m_block * block_m_granularity", **BF16 | {"block_m": 64}),
    # MXFP4.
    "registers are written while wgmma reads them":
        Mutation(
            tuple(
                Edit("gemm/mainloop_mxfp4.cuh", "multiply_packed", *edit)
                for edit in ((r"expand\(a\[i\]", "expand(a[0]"), (r"acc, a\[i\]", "acc, a[0]"))
            ),
            WRONG, MXFP4,
        ),
    "a stage is released before its rows are multiplied":
        _gemm("mainloop_mxfp4.cuh", "mainloop_mxfp4_rolled",
              r"(if \(ahead &&)(.*)(release_stage\(smem, stage, rank\);)", r"\3 \1\2", **MXFP4),
    "two CTAs an SM: sums and registers do not wait for wgmma":
        _gemm("mainloop_mxfp4.cuh", "multiply_packed", r"promote<0>(\(sum \+ first_rows / 2\);)",
              r"promote<1>\1 wgmma_wait<0>();", **MXFP4 | {"block_m": 96}),
    "two CTAs an SM: the other rows have the scales of the first":
        _gemm("mainloop_mxfp4.cuh", "multiply_packed", r"stage, first_rows", "stage, 0",
              **MXFP4 | {"block_m": 96}),
    "packed weights are not awaited":
        _gemm("mainloop_mxfp4.cuh", "mainloop_mxfp4_rolled", r"smem\.full[^;]*;", "", "overrun",
              **MXFP4),
    "packed weights are not awaited in the unrolled loop":
        _gemm("mainloop_mxfp4.cuh", "mainloop_mxfp4_unrolled", r"smem\.full[^;]*;", "", "overrun",
              **MXFP4 | {"block_m": 32}),
    "a stage is released before the unrolled loop multiplies it":
        _gemm("mainloop_mxfp4.cuh", "mainloop_mxfp4_unrolled",
              r"(multiply_packed[^;]*;) (release_stage[^;]*;)", r"\2 \1",
              **MXFP4 | {"block_m": 32}),
    "of up to sixteen rows, eight are multiplied":
        _gemm("mainloop_mxfp4.cuh", "mainloop_mxfp4", r"valid_m <= N / 2", "valid_m <= N",
              **MXFP4 | {"block_m": 32}),
    "rows that no CTA shares are loaded by half":
        _gemm("loader.cuh", "load_rows", r"tile\.m / \(S\.shares_rows\(\) \? 2 : 1\)", "tile.m / 2",
              "deadlock|hang|stuck|waits", **MXFP4 | {"block_m": 32}),
    "the next k block's weights are multiplied twice":
        _gemm("mainloop_mxfp4.cuh", "mainloop_mxfp4_rolled", r"packed = next",
              "if (k == 0) packed = next", **MXFP4),
    "both rows have the exponents of one":
        _gemm("expand.cuh", "PackedWeights::expand", r"exponents\.y", "exponents.x", **MXFP4),
    "signs are those of the other half":
        _gemm("expand.cuh", "PackedWeights::expand", r"packed << 4", "packed", **MXFP4),
    "both columns have the power of one":
        _gemm("mainloop_mxfp4.cuh", "Mxfp4Columns::apply_to",
              r"(__fmaf_rn\(sum\[i\],) scale\[i / 2 % 2\]", r"\1 scale[0]", **MXFP4),
    "units of ups are those of gates":
        _gemm("loader.cuh", "load_units", r"S\.gated\(\) \? units / 2 : 1", "1",
              **MXFP4 | {"epilogue": "gated_fp8"}),
    "ups have the power and the bias of gates":
        _gemm("mainloop_mxfp4.cuh", "Mxfp4Columns::Mxfp4Columns", r"group \* \(S\.n / 2\)", "0",
              **MXFP4 | {"epilogue": "gated_fp8"}),
    # Before the previous kernel has ended.
    "rows are loaded before they are written":
        _gemm("loader.cuh", "load_tiles", r"pdl_wait\(\);", "", "hasty|unordered", **EARLY),
    "scales are read before they are written":
        _gemm("loader.cuh", "load_scales", r"pdl_wait\(\);", "{}", **EARLY),
    "results are stored before they may":
        _gemm("compute.cuh", "compute_tiles", r"pdl_wait\(\);", "{}", "hasty", **BF16 | EARLY),
    "prefetched weights are loaded again":
        _gemm("loader.cuh", "load_gemm", r"prefetched != 0\) \{ --prefetched;", "false) {",
              "overrun|deadlock", **EARLY),
    "weights of the first tile, over and over":
        _gemm("loader.cuh", "prefetch_weights", r"(while \([^;]*?) && (scheduler\.next\(tile\))\)",
              r"\2; \1)", f"deadlock|{WRONG}", **EARLY | {"k": 128}),
    # Which tile is whose.
    "a ticket is read before it is sent":
        _gemm("tile_scheduler.cuh", "TileScheduler::await_ticket", r"smem\.ticket_full[^;]*;", "",
              f"deadlock|overrun|{WRONG}", block_m=256),
    "one ticket of the ring for all tiles":
        Mutation(
            tuple(
                Edit("gemm/tile_scheduler.cuh", *edit)
                for edit in (
                    ("TileScheduler::await_ticket",
                     r"% S\.ticket_ring\(\);(.*)/ S\.ticket_ring\(\)", r"* 0;\1/ 1"),
                    ("Tickets::draw", r"% S\.ticket_ring\(\)", "* 0"),
                    ("Tickets::send", r"% S\.ticket_ring\(\)", "* 0"),
                )
            ),
            STUCK, {"block_m": 256, "k": 128},
        ),
    "the other CTA gets no ticket":
        _gemm("tile_scheduler.cuh", "Tickets::send", r"cta < 2", "cta < 1", "deadlock",
              block_m=256),
    "the counter is not reset":
        _gemm("tile_scheduler.cuh", "Tickets::finish", r"\*counter = \{\};", ";", "unreset",
              block_m=256, sms=4),
    "one cluster does not count itself":
        _gemm("loader.cuh", "load_tiles", r"tickets\.finish\(rank\);",
              "if (blockIdx.x != 0) tickets.finish(rank);", "unreset", block_m=256, sms=4),
    "tickets skip tiles":
        _gemm("tile_scheduler.cuh", "Tickets::send", r"clusters \+ value", "2 * clusters + value",
              f"unreset|{WRONG}", block_m=256, sms=4),
    "two clusters compute the same tiles":
        _gemm("tile_scheduler.cuh", "TileScheduler::draw", r"clusters - 1 - self", "clusters - 1",
              block_m=64, sms=4),
}

# What launches of both GEMMs in one kernel must notice (gemm/test_mlp.py).
MLP = {
    "down tiles do not wait for up tiles":
        _gemm("publish.cuh", "await_up_tiles", r"await_count[^;]*;", "(void)tiles;", WRONG),
    "up tiles of one CTA of each cluster are awaited":
        _gemm("publish.cuh", "await_up_tiles", r"2 \* tiles", "tiles", WRONG),
    "scales are read before the up tiles are stored":
        _gemm("loader.cuh", "load_gemm_scales", r"if constexpr \(S\.part[^;]*;", "", WRONG),
    "rows of up tiles are loaded without a fence":
        _gemm("loader.cuh", "load_gemm", r"fence_for_bulk\(\);", "", "unordered"),
    "the kernel does not wait for the previous one":
        _gemm("grouped_mlp.cuh", "grouped_mlp", r"pdl_wait\(\);", "", "hasty"),
    "a tile is published before all warps have stored it":
        _gemm("pipeline.cuh", "init_mbarriers", r"smem\.stored\.init\(math_warps\)",
              "smem.stored.init(1)", f"overrun|deadlock|{WRONG}"),
    "a tile is not published":
        _gemm("publish.cuh", "publish_up_tiles", r"add_acq_rel[^;]*;", "", "deadlock"),
    "the second GEMM draws its first tile again":
        _gemm("grouped_mlp.cuh", "continue_with", r"up\.tile_idx, true", "up.tile_idx, false",
              f"deadlock|overrun|unreset|{WRONG}"),
    "a cluster takes its first tile without a ticket":
        Mutation(
            (
                Edit("gemm/tile_scheduler.cuh", "TileScheduler::draw",
                     r"S\.undrawn_tiles\(\)", "1"),
                Edit("gemm/tile_scheduler.cuh", "TileScheduler::await_ticket",
                     r"S\.undrawn_tiles\(\)", "1"),
                Edit("gemm/tile_scheduler.cuh", "Tickets::send", r"S\.undrawn_tiles\(\)", "1"),
                Edit("gemm/grouped_mlp.cuh", "load_mlp_tiles",
                     r"tickets\.draw\(smem, rank\); tickets\.send\(smem, rank, 0\);", ""),
            ),
            "deadlock", {},
        ),
    "the tickets are not reset":
        _gemm("grouped_mlp.cuh", "load_mlp_tiles", r"state\.tickets = \{\};", "", "unreset"),
    "the counts of up tiles are not reset":
        _gemm("grouped_mlp.cuh", "load_mlp_tiles", r"for \(u32 e = 0[^;]*;[^;]*;[^;]*;", "",
              "unreset"),
}
# fmt: on

_COMBINE, _ROW = "alltoall/combine_fp8.cuh", "device/row.cuh"

# What rounds of a combine by FP8 must notice (tests/alltoall/test_emulated_combine.py).
# fmt: off
COMBINE_FP8 = {
    name: Mutation((Edit(*edit),))
    for name, edit in {
        "a sentinel that is not restored":
            (_ROW, "await_rows", r"rows\.restore\(\);"),
        "a NaN that looks like an empty place":
            (_COMBINE, "push_fragment", r"quantize\(x, block\.inverse, (amax >= infinity_bits)\)",
             r"\1 ? sentinel_vector() : quantize(x, block.inverse, false)"),
        "a vector beyond the row":
            (_COMBINE, "push_fragment", r"if \(v < ReturnedRows<S>::vectors\)"),
        "a scale of another block":
            (_COMBINE, "push_fragment", r"lane % blocks_in_strip \* block_lanes", "0"),
        "rows that no owner waits for":
            (_COMBINE, "push_fragments", r"if \(has_row\)"),
        "strips that no rank pushes":
            (_COMBINE, "push_fragment", r"strip (< fragment\.end; \+\+strip)", r"strip + 1 \1"),
        "a vector that is taken before it has come":
            (_ROW, "PolledVectors::missing", r"if \(\(mine[^;]*\)(?= found \|=)", "if (false)"),
        "a scale that is taken before it has come":
            (_ROW, "RowStrip::missing", r"has_scale && scale == sentinel", "false"),
    }.items()
}

# What programs with ranks as threads must notice (tests/runtime/test_races.py).
RACES = {
    name: Mutation((Edit(*edit),))
    for name, edit in {
        "a release that orders nothing":
            ("device/order.cuh", "store_release", "RELEASE", "RELAXED"),
        "no credits":
            ("lowlatency/layout.cuh", "await_credit", r"(?<=\{)(?= Header&)", " return true;"),
        "one buffer instead of two":
            ("allreduce/layout.cuh", "side_of", r"epoch & 1", "epoch & 0"),
    }.items()
}
# fmt: on

TABLES = {"GEMM": GEMM, "combine by FP8": COMBINE_FP8, "races": RACES}
