// The math warpgroups: for every tile a mainloop and an epilogue, by its height and the dtype.
#pragma once
#include <weft/gemm/epilogue.cuh>
#include <weft/gemm/epilogue_gated.cuh>
#include <weft/gemm/epilogue_gated_fp8.cuh>
#include <weft/gemm/mainloop_16bit.cuh>
#include <weft/gemm/mainloop_fp8.cuh>
#include <weft/gemm/mainloop_mxfp4.cuh>
#include <weft/gemm/math_warps.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/tile_scheduler.cuh>

namespace weft {

// The next lower height of swapped tiles. FP8 tiles of 128 rows are normal ones.
template <GemmShape S> constexpr u32 lower_swap_ab_m(u32 m) {
    const u32 lower = m - S.m_granularity(m);
    return S.is_fp8() && lower == normal_m ? lower - block_m_granularity : lower;
}

// A swapped tile of N rows; a tile of fewer is passed on to the next lower height.
template <GemmShape S, u32 N>
WEFT_FN void compute_swap_ab(const GemmArgs& a, GemmShared<S>& smem, const Operands<S>& operands,
                             PipelineState<S.stages>& pipeline, const Tile& tile, u32 rank,
                             u32 tile_idx) {
    if constexpr (N > block_m_granularity) {
        if (tile.m < N) {
            compute_swap_ab<S, lower_swap_ab_m<S>(N)>(a, smem, operands, pipeline, tile, rank,
                                                      tile_idx);
            return;
        }
    }
    float sum[N / 2] = {};
    const u64 dst_addr = load_dst_addr<S>(a, tile);
    if constexpr (S.is_fp8()) {
        mainloop_swap_ab<S, N>(smem, pipeline, operands, rank, sum);
    } else if constexpr (S.is_mxfp4()) {
        const Mxfp4Columns<S> columns(a, tile, rank);
        mainloop_mxfp4<S, N>(smem, pipeline, operands, rank, sum);
        columns.apply_to(sum);
    } else {
        const BiasColumns<S> bias(a, tile, rank);
        mainloop_16bit<S, N>(smem, pipeline, operands, rank, sum);
        bias.add_to(sum);
    }
    if constexpr (S.gated_fp8())
        store_gated_fp8_swap_ab<S, N>(a, smem, tile, rank, sum, tile_idx);
    else if constexpr (S.gated())
        store_gated_16bit<S, N>(a, smem, tile, rank, sum);
    else
        store_swap_ab<S, N>(a, smem, tile, rank, sum, dst_addr);
}

// A normal tile of one M-tile, or a dual tile of two.
template <GemmShape S, u32 m_tiles>
WEFT_FN void compute_normal(const GemmArgs& a, GemmShared<S>& smem, const Operands<S>& operands,
                            PipelineState<S.stages>& pipeline, const Tile& tile, u32 rank,
                            u32 tile_idx) {
    float sum[m_tiles][normal_sums] = {};
    const u64 dst_addr = load_dst_addr<S>(a, tile);
    if constexpr (m_tiles == 1)
        mainloop_normal<S>(smem, pipeline, operands, rank, sum[0]);
    else
        mainloop_dual_m<S>(smem, pipeline, operands, rank, sum);
    if constexpr (S.gated()) {
        store_gated_fp8_normal<S, m_tiles>(a, smem, tile, rank, sum, tile_idx);
    } else {
        share_dst_addrs(smem, tile, dst_addr);
#pragma unroll
        for (u32 t = 0; t < m_tiles; ++t)
            store_normal<S>(a, smem, tile, rank, sum[t], t * normal_m);
    }
}

template <GemmShape S>
WEFT_FN void compute_tiles(const GemmArgs& a, GemmShared<S>& smem, u8* tiles, u32 rank) {
    if constexpr (S.prefetch_weights) pdl_wait();
    const Operands<S> operands(tiles);
    TileScheduler<S> scheduler{smem};
    PipelineState<S.stages> pipeline;
    Tile tile;
    for (u32 tile_idx = 0; scheduler.next(tile); ++tile_idx) {
        if constexpr (S.has_dual_m()) {
            if (tile.m > S.max_single_m()) {
                compute_normal<S, 2>(a, smem, operands, pipeline, tile, rank, tile_idx);
                continue;
            }
        }
        if constexpr (S.is_fp8() && S.block_m >= normal_m) {
            if (tile.m == normal_m) {
                compute_normal<S, 1>(a, smem, operands, pipeline, tile, rank, tile_idx);
                continue;
            }
        }
        constexpr bool highest_is_normal = S.is_fp8() && S.block_m == normal_m;
        constexpr u32 highest = highest_is_normal ? lower_swap_ab_m<S>(normal_m) : S.max_single_m();
        compute_swap_ab<S, highest>(a, smem, operands, pipeline, tile, rank, tile_idx);
    }
}

}  // namespace weft
