# SPDX-License-Identifier: Apache-2.0
"""Device functions called directly, at sizes that emulated kernels do not reach."""

import ctypes

import pytest
import torch

from tests.emulator.emulate import build_library
from tests.gemm.emulate import GEMM_HEAD, gemm_tree
from weft.allreduce.config import ReduceConfig
from weft.gemm import WgmmaPlan
from weft.gemm.kernels import GemmShape
from weft.grouping.config import GroupConfig
from weft.lowlatency.config import LowLatencyConfig, LowLatencySpec
from weft.shape import Shape

SHAPE = Shape(2, 16, 2, 160, 256, "bf16", (512,))
GROUPS = GroupConfig("contiguous", 80, 2048, 8)
# With 256 local experts the scratch has one entry per two chunks.
LOW = LowLatencyConfig.from_spec(
    LowLatencySpec(ranks=2, max_tokens=450, top_k=2, num_experts=512, hidden=128, reduce="receiver")
).shape
REDUCTION = ReduceConfig.from_args(ranks=2, max_tokens=4, hidden=640)  # five groups of 128
GEMM = GemmShape(64, 256, 128, WgmmaPlan(192), "store", operand="bf16")
TEXT = f"""\
#include <weft/allreduce/epilogue.cuh>
#include <weft/gemm/tile_scheduler.cuh>
#include <weft/grouping/group.cuh>
#include <weft/lowlatency/receive.cuh>
using namespace weft;
constexpr Shape S = {SHAPE.to_cpp()};
constexpr Grouping G = {GROUPS.to_cpp()};
constexpr LowLatencyShape L = {LOW.to_cpp()};
constexpr Reduction R = {REDUCTION.to_cpp()};
constexpr GemmShape M = {GEMM.cpp_value};
static_assert(ReceiveScratch<L>::span == 2);
#define ENTRY extern "C" __attribute__((visibility("default"))) void

ENTRY exponents(u8* scales, u32 stride, u32 token) {{
    ReduceArgs a{{}};
    a.scale_out = scales;
    a.scale_stride = stride;
    for (u32 g = 0; g < R.hidden / scale_columns; ++g) store_exponent<R>(a, token, g, 100 + g);
}}

ENTRY offsets_of_groups(const u32* counts, i32* offsets, i32* written) {{
    static Scratch<S, G> scratch;
    for (u32 g = 0; g < G.groups; ++g) scratch.total[g] = counts[g];
    GroupArgs a{{}};
    a.offsets = offsets;
    a.counts = written;
    a.row_limit = G.rows;
    emulated::launch({{1, 1, 32}}, [a] {{ compute_offsets<S, G>(a, scratch, threadIdx.x); }});
}}

ENTRY first_rows(const u32* tokens, const u32* rows, const u32* second, u32* first) {{
    static ReceiveScratch<L> scratch;
    i32 counts[L.local], ranges[2 * L.ranks * L.local], sources[L.ranks];
    for (u32 s = 0; s < L.ranks; ++s) {{
        scratch.tokens[s] = tokens[s];
        for (u32 e = 0; e < L.local; ++e)
            scratch.first[s][0][e] = rows[s], scratch.first[s][1][e] = second[s];
    }}
    LowLatencyDispatchArgs a{{}};
    a.own_experts = L.local;
    a.counts = counts;
    a.ranges = ranges;
    a.routing.source_tokens = sources;
    emulated::launch({{1, 1, 32}}, [a] {{ compute_offsets<L>(Block{{}}, a, true, scratch); }});
    for (u32 s = 0; s < L.ranks; ++s)
        for (u32 i = 0; i < 2; ++i) first[2 * s + i] = scratch.first[s][i][L.local - 1];
}}

// Writes expert, first row, rows and padded rows of each tile; returns how many there are.
ENTRY tiles_of_counts(const i32* counts, u32 max_rows, u32* tiles, u32* count) {{
    static GemmShared<M> smem;
    GemmArgs a{{}};
    a.counts = counts;
    a.max_rows = max_rows;
    a.rows = M.experts * max_rows;
    emulated::launch({{2, 1, 32}}, [=] {{
        if (blockIdx.x != 0) return;
        schedule_tiles<M>(a, smem, threadIdx.x);
        __syncwarp();
        if (threadIdx.x != 0) return;
        TileScheduler<M> scheduler{{smem}};
        u32* to = tiles;
        for (Tile tile; scheduler.next(tile); to += 4)
            to[0] = tile.expert, to[1] = tile.first_row, to[2] = tile.valid_m, to[3] = tile.m;
        *count = u32(to - tiles) / 4;
    }});
}}
"""


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build_library(gemm_tree(), GEMM_HEAD + TEXT)))


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_last_word_of_exponents_is_padded_with_zeros(library):
    stride, token = 3, 1
    scales = torch.full((2, stride, 4), 255, dtype=torch.uint8)
    library.exponents(pointer(scales), stride, token)
    assert scales[:, token].tolist() == [[100, 101, 102, 103], [104, 0, 0, 0]]
    assert bool((scales[:, [0, 2]] == 255).all())


def test_offsets_of_more_groups_than_a_warp_has_lanes(library):
    counts = (torch.arange(GROUPS.groups, dtype=torch.int32) * 7) % 23
    offsets, written = torch.empty(GROUPS.groups + 1, dtype=torch.int32), torch.empty_like(counts)
    library.offsets_of_groups(pointer(counts), pointer(offsets), pointer(written))
    ends = ((counts + 7) // 8 * 8).cumsum(0)
    assert offsets.tolist() == [0, *ends.tolist()]
    assert torch.equal(written, counts)


def test_an_odd_number_of_chunks_fills_part_of_the_last_span(library):
    tokens, rows, second = ints(60, 60), ints(10, 20), ints(5, 6)  # three chunks
    first = torch.zeros((2, 2), dtype=torch.int32)
    library.first_rows(pointer(tokens), pointer(rows), pointer(second), pointer(first))
    assert first.tolist() == [[0, 5], [10, 16]]


def test_tiles_of_long_experts_are_equally_high(library):
    """1937 rows are 11 tiles of 176.1 rows on average, which is just above 11 times 16."""
    counts = torch.arange(1900, 1900 + GEMM.experts, dtype=torch.int32)
    counts[:8] = ints(0, 1, 16, 17, 191, 192, 193, 2048)
    tiles, count = torch.empty((4096, 4), dtype=torch.int32), ints(0)
    library.tiles_of_counts(pointer(counts), 2048, pointer(tiles), pointer(count))
    by_expert: dict[int, list[list[int]]] = {}
    for expert, first, rows, padded in tiles[: int(count)].tolist():
        assert rows <= padded <= GEMM.plan.block_m
        by_expert.setdefault(expert, []).append([first, rows])
    for expert, expected in enumerate(counts.tolist()):
        parts = sorted(by_expert.get(expert, []))
        ends = [first + rows for first, rows in parts]
        assert [first for first, _ in parts] == [2048 * expert, *ends][: len(parts)]
        assert sum(rows for _, rows in parts) == expected
        assert len({rows for _, rows in parts[:-1]}) <= 1
        assert all(parts[-1][1] <= rows for _, rows in parts), (expected, parts)
