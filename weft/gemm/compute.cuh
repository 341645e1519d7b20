// SPDX-License-Identifier: Apache-2.0
// The math warpgroups' loop over tiles. Each tile's height and dtype select its mainloop and
// epilogue.
#pragma once
#include <weft/gemm/epilogue.cuh>
#include <weft/gemm/epilogue_gated.cuh>
#include <weft/gemm/epilogue_gated_fp8.cuh>
#include <weft/gemm/epilogue_store_fp8.cuh>
#include <weft/gemm/mainloop_16bit.cuh>
#include <weft/gemm/mainloop_fp8.cuh>
#include <weft/gemm/mainloop_mxfp4.cuh>
#include <weft/gemm/math_warps.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/publish.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/tile_scheduler.cuh>

namespace weft {

// The next lower height of swapped tiles. It skips 128 in FP8, where such tiles are normal.
template <GemmShape S> constexpr u32 lower_swap_ab_m(u32 m) {
    const u32 lower = m - S.m_granularity(m);
    return S.is_fp8() && lower == normal_m ? lower - block_m_granularity : lower;
}

// Computes a swapped tile of N rows; recurses to the next lower height for a smaller tile.
template <GemmShape S, u32 N>
WEFT_FN void compute_swap_ab(const GemmArgs& a, GemmShared<S>& smem, const Operands<S>& operands,
                             PipelineState<S.stages>& pipeline, const Tile& tile, u32 rank,
                             u32& exchanges) {
    if constexpr (N > block_m_granularity) {
        if (tile.m < N) {
            compute_swap_ab<S, lower_swap_ab_m<S>(N)>(a, smem, operands, pipeline, tile, rank,
                                                      exchanges);
            return;
        }
    }
    float sum[N / 2] = {};
    const u64 dst_addr = load_dst_addr<S>(a, tile);
    if constexpr (S.is_fp8()) {
        mainloop_swap_ab<S, N>(smem, pipeline, operands, rank, sum);
    } else if constexpr (S.is_mxfp4()) {
        const Mxfp4Columns<S> columns(a, tile, rank);
        mainloop_mxfp4<S, N>(smem, pipeline, operands, rank, tile.valid_m, sum);
        columns.apply_to(sum);
    } else {
        const BiasColumns<S> bias(a, tile, rank);
        mainloop_16bit<S, N>(smem, pipeline, operands, rank, sum);
        bias.add_to(sum);
    }
    activate<S>(sum);
    if constexpr (S.gated_fp8())
        store_gated_fp8_swap_ab<S, N>(a, smem, tile, rank, sum, exchanges);
    else if constexpr (S.gated())
        store_gated_16bit<S, N>(a, smem, tile, rank, sum);
    else if constexpr (S.stores_fp8())
        quantize_swap_ab<S, N>(a, smem, tile, rank, sum);
    else
        store_swap_ab<S, N>(a, smem, tile, rank, sum, dst_addr);
}

template <GemmShape S>
WEFT_FN void compute_normal(const GemmArgs& a, GemmShared<S>& smem, const Operands<S>& operands,
                            PipelineState<S.stages>& pipeline, const Tile& tile, u32 rank,
                            u32& exchanges) {
    float sum[normal_sums] = {};
    const u64 dst_addr = load_dst_addr<S>(a, tile);
    mainloop_normal<S>(smem, pipeline, operands, rank, sum);
    activate<S>(sum);
    if constexpr (S.gated()) {
        store_gated_fp8_normal<S>(a, smem, tile, rank, sum, exchanges);
    } else if constexpr (S.stores_fp8()) {
        sync_math_warps();  // the previous tile's staging memory is free
        quantize_normal<S>(a, smem, tile, rank, sum, 0);
    } else {
        share_dst_addrs(smem, tile, dst_addr);
        store_normal<S>(a, smem, tile, rank, sum, 0);
    }
}

// Computes a split or wide tile. Each warp uses only its own staging memory.
template <GemmShape S>
WEFT_FN void compute_split(const GemmArgs& a, GemmShared<S>& smem, const Operands<S>& operands,
                           PipelineState<S.stages>& pipeline, const Tile& tile, u32 rank) {
    float sum[2][normal_sums] = {};
    const u64 dst_addr = load_dst_addr<S>(a, tile);
    const u32 first_row = tile.first_row_of<S>(rank);
    const bool has_rows = tile.valid_m > first_row + math_warpgroup() * (normal_m / 2);
    const bool has_weights = tile.has_weights<S>();
    mainloop_split<S>(smem, pipeline, operands, rank, has_rows && has_weights, sum);
    if (!has_weights) return;
    if constexpr (S.epilogue == Epilogue::push) share_dst_addrs(smem, tile, dst_addr);
    if constexpr (S.gated()) {
        store_gated_fp8_split<S>(a, smem, tile, first_row, sum);
    } else {
#pragma unroll
        for (u32 block = 0; block < 2; ++block) {
            activate<S>(sum[block]);
            if constexpr (S.stores_fp8())
                quantize_normal<S>(a, smem, tile, block, sum[block], first_row);
            else
                store_normal<S>(a, smem, tile, block, sum[block], first_row);
        }
    }
}

// Computes this cluster's tiles of a GEMM.
template <GemmShape S>
WEFT_FN void compute_gemm(const GemmArgs& a, GemmShared<S>& smem, u8* tiles,
                          TileScheduler<S>& scheduler, PipelineState<S.stages>& pipeline,
                          u32 rank) {
    const Operands<S> operands(tiles);
    Tile tile;
    u32 exchanges = 0;  // number of amax exchanges with the other CTA so far
    u32 up_tiles = 0;   // number of up tiles so far
    while (scheduler.next(tile)) {
        if constexpr (S.has_wide_n()) {
            compute_split<S>(a, smem, operands, pipeline, tile, rank);
            if constexpr (S.part == Part::up) announce_up_tile(smem, tile.expert, up_tiles++);
        } else {
            if constexpr (S.is_fp8() && S.block_m >= normal_m) {
                if (tile.m == normal_m) {
                    compute_normal<S>(a, smem, operands, pipeline, tile, rank, exchanges);
                    continue;
                }
            }
            constexpr bool highest_is_normal = S.is_fp8() && S.block_m == normal_m;
            constexpr u32 highest = highest_is_normal ? lower_swap_ab_m<S>(normal_m) : S.block_m;
            compute_swap_ab<S, highest>(a, smem, operands, pipeline, tile, rank, exchanges);
        }
    }
    if constexpr (S.part == Part::up) announce_up_tile(smem, no_expert, up_tiles);
}

template <GemmShape S>
WEFT_FN void compute_tiles(const GemmArgs& a, GemmShared<S>& smem, u8* tiles, u32 rank) {
    if constexpr (S.prefetch_weights) pdl_wait();
    TileScheduler<S> scheduler{smem};
    PipelineState<S.stages> pipeline;
    compute_gemm(a, smem, tiles, scheduler, pipeline, rank);
}

}  // namespace weft
